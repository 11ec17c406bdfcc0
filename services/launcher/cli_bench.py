"""The `polyphase bench` commands."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common

bench_app = typer.Typer(no_args_is_help=True, help="Measure. Exit code 0 only if every aim is met.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON; its last line is one object.")]


@bench_app.callback(invoke_without_command=False)
def _bench() -> None:
    """Measure."""


DataFolder = Annotated[Path, typer.Option("--data", help="The folder of public traces and measurements.")]
DATA = Path("../shared/data")


def _add_bench_on_data(name: str, text: str) -> None:
    def command(data: DataFolder = DATA, as_json: Json = False) -> None:
        _measure(name, as_json, data)

    bench_app.command(name, help=text)(command)


def _add_bench(name: str, text: str) -> None:
    def command(as_json: Json = False) -> None:
        _measure(name, as_json)

    bench_app.command(name, help=text)(command)


def _measure(name: str, as_json: bool, *arguments: object) -> None:
    if not cli_common.report(Console(), cli_common.find_bench(name)(*arguments), as_json):
        raise typer.Exit(1)


_add_bench("overhead", "What the control plane costs: CPU a request and a token, added TTFT.")
_add_bench("streams", "2,000 chat streams open for a minute: lost, late, memory; rates of one gateway process and two.")
_add_bench("kv", "KV transfer between two processes, beside a plain socket.")
_add_bench("kv_engines", "KV between two real engines, by transport.")
_add_bench_on_data("kv_quality", "Perplexity and answers of the demo model with KV coded in int8, int4 and fp8.")
_add_bench("control", "Monitor and scheduler with 10, 100 and 1,000 instances: CPU, bytes, placement, a restart.")
_add_bench("console", "What a console reads, with 200 instances over a day and 100,000 requests: CPU, pauses.")
_add_bench("dashboard", "How soon a page is of use, and what a session costs, with 4, 32 and 200 instances.")
_add_bench("policy", "What a decision of each policy costs with 10, 100 and 1,000 instances.")
_add_bench("overload", "Interactive and batch work at twice the capacity, with and without overload control.")
_add_bench_on_data("cost", "The cost model beside published measurements.")
_add_bench_on_data("sim", "How fast the simulator is, and macro-steps beside stepping.")
_add_bench_on_data(
    "learning", "Rates after two minutes beside a calibration's; an engine slowed down while it serves (root)."
)
_add_bench("traces", "5,000 traced requests: the wait for first tokens in no span, spans dropped, what it costs.")
_add_bench("engine", "Prefill orders and decode admissions, changed on a real engine while it runs.")
_add_bench("live", "The simulator beside a live cluster, calibrated on it: means, and which policy is better.")


@bench_app.command("soak")
def bench_soak(
    minutes: Annotated[float, typer.Option(min=0.5, help="Beside hostile clients.")] = 20.0, as_json: Json = False
) -> None:
    """Well-behaved clients beside hostile ones: failures, gaps, memory and descriptors over time (root)."""
    _measure("soak", as_json, minutes)


@bench_app.command("growth")
def bench_growth(
    minutes: Annotated[float, typer.Option(min=0.5, help="The most that the load takes.")] = 20.0, as_json: Json = False
) -> None:
    """What grows in a scheduler and a monitor with requests, and where that ends: their heaps are walked."""
    _measure("growth", as_json, minutes)


@bench_app.command("predictor")
def bench_predictor(
    part: Annotated[
        list[str] | None, typer.Option(help="bayes, latency, full_size, modes or worth; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The length predictor: beside the best possible, how quick, what asking costs, what it is worth."""
    _measure("predictor", as_json, part or [])


@bench_app.command("policies")
def bench_policies(
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="One of the twelve, `pauses`, or with --live also one of pauses; may be repeated."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Keep each run in this file, and go on from those in it (of the same code).")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="That simulate.")] = 2,
    live: Annotated[bool, typer.Option("--live", help="Three of them, or pauses, on emulated instances.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="With --live: of each of pauses, with its medians.")] = 1,
    as_json: Json = False,
) -> None:
    """Goodput of adaptive beside all fixed policies, in twelve simulated scenarios (long: see --results)."""
    if live and results is not None:
        raise typer.BadParameter("--live measures all of it anew: --results is of the simulated runs")
    if live:
        options = cli_common.from_lab("bench.policies_live", "LiveOptions")
        _measure("policies_live", as_json, options(tuple(scenario or ()), runs))
        return
    options = cli_common.from_lab("bench.policies", "PoliciesOptions")
    _measure("policies", as_json, options(tuple(scenario or ()), results, processes))


@bench_app.command("roles")
def bench_roles(
    data: DataFolder = DATA,
    live: Annotated[bool, typer.Option("--live", help="On emulated instances instead, in real time.")] = False,
    as_json: Json = False,
) -> None:
    """Roles that follow what clients ask for, beside every fixed ratio, while it turns from conversation to code."""
    _measure("roles_live" if live else "roles", as_json, data)


@bench_app.command("mixed")
def bench_mixed(
    data: DataFolder = DATA,
    rounds: Annotated[int, typer.Option(min=1, help="Of all systems; medians are over them.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="A few requests of each: only to see that it works.")] = False,
    as_json: Json = False,
) -> None:
    """Two real engines, one held to a third of the other's cores: every way to share them (half an hour; root)."""
    options = cli_common.from_lab("bench.mixed", "MixedOptions")
    _measure("mixed", as_json, data, options(rounds, quick))


@bench_app.command("prefix")
def bench_prefix(
    data: DataFolder = DATA,
    rounds: Annotated[int, typer.Option(min=1, help="Of chats on real engines.")] = 2,
    simulated: Annotated[bool, typer.Option("--simulated", help="Only in the simulator.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Only on real engines.")] = False,
    as_json: Json = False,
) -> None:
    """What adaptive finds in prefix caches, beside least_load and an oracle: traces simulated, chats live (root)."""
    options = cli_common.from_lab("bench.prefix", "PrefixOptions")
    _measure("prefix", as_json, data, options(rounds, simulated or not live, live or not simulated))


@bench_app.command("plan")
def bench_plan(
    data: DataFolder = DATA,
    part: Annotated[list[str] | None, typer.Option(help="Of the bench, by name; may be repeated.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That search at once, where there are many.")] = 2,
    as_json: Json = False,
) -> None:
    """The planner: the papers' cases, beside the oracle and every other method, and on 512 accelerators (long)."""
    options = cli_common.from_lab("bench.plan", "PlanBenchOptions")
    _measure("plan", as_json, options(data, tuple(part or ()), processes))


@bench_app.command("papers")
def bench_papers(
    data: DataFolder = DATA,
    write_docs: Annotated[Path | None, typer.Option(help="Write papers.md and its charts into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """The simulator beside the papers' results."""
    _measure("papers", as_json, data, *([write_docs] if write_docs else []))


@bench_app.command("chaos")
def bench_chaos(
    only: Annotated[list[str] | None, typer.Option(help="A scenario, or part of its name; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    show: Annotated[bool, typer.Option("--list", help="Name the scenarios and end.")] = False,
    at_random: Annotated[bool, typer.Option("--random", help="Draw faults for --minutes instead.")] = False,
    minutes: Annotated[float, typer.Option(help="How long --random goes on.")] = 60.0,
    write_docs: Annotated[Path | None, typer.Option(help="Write reliability.md into this folder.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep logs and data of the suites in this folder.")] = None,
    kv_transport: Annotated[str, typer.Option(help="How real engines transfer KV: tcp or nixl.")] = "tcp",
    as_json: Json = False,
) -> None:
    """Kill, freeze, cut, flood and lie to a suite under load: what clients saw, and what recovered when."""
    options = cli_common.from_lab("chaos.run", "ChaosOptions")
    chosen = options(tuple(only or ()), seed, minutes if at_random else 0.0, write_docs, logs, kv_transport)
    if show:
        cli_common.from_lab("chaos.run", "show_scenarios")(chosen, Console())
        return
    answer = cli_common.summary(cli_common.find_bench("chaos")(chosen, Console(stderr=as_json)))
    if as_json:
        cli_common.print_json(answer)
    if not answer["ok"]:
        raise typer.Exit(1)


@bench_app.command("troubles")
def bench_troubles(
    only: Annotated[list[str] | None, typer.Option(help="The name of one; may be repeated.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep logs and data of the suites in this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Stage troubles on running suites: what the verdict says of each, and whether every figure of it is right."""
    options = cli_common.from_lab("bench.troubles", "TroublesOptions")
    console = Console(stderr=as_json)
    answer = cli_common.summary(cli_common.find_bench("troubles")(options(tuple(only or ()), logs), console))
    if as_json:
        cli_common.print_json(answer)
    if not answer["ok"]:
        raise typer.Exit(1)
