"""Command line of `polyphase plan`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common

plan_app = typer.Typer(
    help="Plan roles, layouts and routes for a set of accelerators, and predict the performance.",
    invoke_without_command=True,
    no_args_is_help=True,
)
_Out = Annotated[Path, typer.Option("--out", help="The file to write.")]
_Workload = Annotated[
    str, typer.Option(help="A trace file or a synthetic workload, as for `polyphase simulate --trace`.")
]
_Slo = Annotated[str, typer.Option(help="SLO targets in seconds, such as ttft=2,tpot=0.1,itl=0.25.")]


@plan_app.callback()
def plan_command(
    context: typer.Context,
    inventory: Annotated[Path, typer.Option(help="The inventory file with nodes, devices and links.")] = Path(),
    model: Annotated[str, typer.Option(help="The model: a bundled name, a config.json or its folder.")] = "",
    workload: _Workload = "azure-conv",
    slo: _Slo = "ttft=2,tpot=0.1",
    rate: Annotated[float, typer.Option(help="Requests per second to serve; 0: as many as possible.")] = 0.0,
    target: Annotated[float, typer.Option(help="SLO attainment from which a rate counts as served.")] = 0.9,
    budget: Annotated[float | None, typer.Option(help="Maximum cost of the accelerators in USD per hour.")] = None,
    cheapest: Annotated[bool, typer.Option("--cheapest", help="Minimize the cost of serving --rate.")] = False,
    method: Annotated[
        str, typer.Option(help="Search method: best, tabu, joint, exhaustive, coupled, thirds…")
    ] = "best",
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Compare the plan with those of the other methods.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(help="Time limit of the search in seconds; running evaluations still finish.")
    ] = 60.0,
    requests: Annotated[int, typer.Option(help="Number of requests to take from the trace or to generate.")] = 3000,
    codec: Annotated[str, typer.Option(help="Codec of KV transfers: raw, int8, int4 or fp8.")] = "raw",
    engine: Annotated[
        str, typer.Option(help="Engine in the written cluster file: emulated, or vllm (each group on one node).")
    ] = "emulated",
    one_node: Annotated[bool, typer.Option("--one-node", help="Keep each group on one node.")] = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Maximum tokens of a request. Default: that of the model.")
    ] = None,
    chunk_size: Annotated[int, typer.Option(help="Maximum tokens of a step, prefill and decode together.")] = 2048,
    quantised: Annotated[
        list[str],
        typer.Option(
            help="Precision of weights that prefill instances may have besides the model's: fp8, int8, int4 or fp4, "
            "with =FOLDER of its checkpoint where the engine cannot quantise. May be repeated."
        ),
    ] = [],  # noqa: B006
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Whether instances have prefix caches.")
    ] = True,
    robust: Annotated[
        float,
        typer.Option(
            help="Share of the goodput that method best may give up for a plan that keeps more when it loses any one "
            "of its groups; 0: goodput alone counts."
        ),
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, lengths and random choices.")] = 1,
    out: _Out = Path("plan.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; the last line is one object.")] = False,
) -> None:
    """Search for groups, roles, layouts and routes, given an inventory, a model, a workload and an SLO.

    Ctrl-C ends the search with the best plan found so far.
    """
    if context.invoked_subcommand is not None:
        return
    from shared.plan.find import PlanGoals
    from tools.plan.session import PlanOptions, run_plan

    goals = PlanGoals(
        rate=rate,
        target=target,
        budget=budget,
        cheapest=cheapest,
        method=method,
        compare=compare,
        seconds=seconds,
        codec=codec,
        engine=engine,
        one_node=one_node,
        max_model_len=max_model_len,
        chunk_size=chunk_size,
        seed=seed,
        quantised={name: checkpoint for name, _, checkpoint in (each.partition("=") for each in quantised)},
        prefix_cache=prefix_cache,
        robust=robust,
    )
    answer = run_plan(PlanOptions(inventory, model, workload, slo, requests, goals, out), Console())
    if as_json:
        cli_common.print_json(cli_common.summary(answer))


@plan_app.command("inventory")
def inventory_command(out: _Out = Path("inventory.yaml")) -> None:
    """Write an inventory file of this machine, to complete by hand."""
    from shared.cost.library import Library
    from shared.errors import InvalidRequest
    from shared.plan.inventory import write_inventory
    from tools.plan.local_inventory import inventory_here

    if out.exists():
        raise InvalidRequest(f"{out} exists already: choose another --out")
    inventory, note = inventory_here(Library.built_in().catalogue)
    out.write_text(write_inventory(inventory, inventory.nodes[0]), encoding="utf-8")
    print(f"{out}: {', '.join(map(str, inventory.pools))}" + (f" ({note})" if note else ""))
