"""The `polyphase bench` commands."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common
from services.launcher.cli_common import Json

# name → module and function. Each returns {"figures": {name_unit: number}, "aims": {name: {want, got, met}}}, and
# optionally "tables": {title: rows} and "notes": [text].
BENCHES: dict[str, tuple[str, str]] = {
    "overhead": ("benchmarks.overhead", "run_overhead_bench"),
    "kv": ("benchmarks.kv", "run_kv_bench"),
    "soak": ("benchmarks.soak", "run_soak_bench"),
    "streams": ("benchmarks.streams", "run_streams_bench"),
    "kv_engines": ("benchmarks.kv_engines", "run_kv_engines_bench"),
    "kv_quality": ("benchmarks.kv_quality", "run_kv_quality_bench"),
    "control": ("benchmarks.control", "run_control_bench"),
    "dashboard": ("benchmarks.dashboard", "run_dashboard_bench"),
    "policy": ("benchmarks.policy", "run_policy_bench"),
    "policies": ("benchmarks.policies", "run_policies_bench"),
    "roles": ("benchmarks.roles", "run_roles_bench"),
    "roles_live": ("benchmarks.roles", "run_live"),
    "overload": ("benchmarks.overload", "run_overload_bench"),
    "cost": ("benchmarks.cost", "run_cost_bench"),
    "mixed": ("benchmarks.mixed", "run_mixed_bench"),
    "prefix": ("benchmarks.prefix", "run_prefix_bench"),
    "learning": ("benchmarks.learning", "run_learning_bench"),
    "engine": ("benchmarks.engine", "run_engine_bench"),
    "live": ("benchmarks.live", "run_live_bench"),
    "traces": ("benchmarks.traces", "run_traces_bench"),
    "sim": ("benchmarks.sim", "run_sim_bench"),
    "plan": ("benchmarks.plan", "run_plan_bench"),
    "predictor": ("benchmarks.predictor", "run_predictor_bench"),
    "papers": ("benchmarks.papers", "run_papers_bench"),
    "troubles": ("benchmarks.troubles", "run_troubles_bench"),
    "chaos": ("benchmarks.chaos.run", "run_chaos_bench"),
}
Bench = Callable[..., dict[str, object]]

bench_app = typer.Typer(no_args_is_help=True, help="Run a benchmark. The exit code is 0 if all its aims are met.")


@bench_app.callback(invoke_without_command=False)
def _bench() -> None:
    """Run a benchmark."""


DataFolder = Annotated[Path, typer.Option("--data", help="The folder with public traces and measurements.")]
DATA = Path("../shared/data")


def find_bench(name: str) -> Bench:
    """The function behind a name of `BENCHES`; its module is loaded now, so that the command line starts quickly."""
    module, function = BENCHES[name]
    bench: Bench = getattr(importlib.import_module(module), function)
    return bench


def _add_bench(name: str, text: str, *, on_data: bool = False) -> None:
    def command(as_json: Json = False) -> None:
        _measure(name, as_json)

    def command_on_data(data: DataFolder = DATA, as_json: Json = False) -> None:
        _measure(name, as_json, data)

    bench_app.command(name, help=text)(command_on_data if on_data else command)


def _measure(name: str, as_json: bool, *arguments: object, **options: object) -> None:
    if not cli_common.report(Console(), find_bench(name)(*arguments, **options), as_json):
        raise typer.Exit(1)


_add_bench("overhead", "The overhead of the control plane: CPU time per request and token, added TTFT.")
_add_bench("streams", "2,000 chat streams open for a minute: losses, delays, memory; one gateway process against two.")
_add_bench("kv", "KV transfer between two processes, compared with a plain socket.")
_add_bench("kv_engines", "KV transfer between two real engines, by transport.")
_add_bench("kv_quality", "Perplexity and answers of the demo model with KV coded in int8, int4 and fp8.", on_data=True)
_add_bench("control", "Monitor and scheduler with 10, 100 and 1,000 instances: CPU, traffic, placement, a restart.")
_add_bench(
    "dashboard", "Load time of dashboard pages and cost of a session, with 4, 32 and 200 instances; CPU of their reads."
)
_add_bench("policy", "The time of one decision of each policy with 10, 100 and 1,000 instances.")
_add_bench("overload", "Interactive and batch requests at twice the capacity, with and without overload control.")
_add_bench("cost", "The cost model compared with published measurements.", on_data=True)
_add_bench("sim", "The speed of the simulator, and its macro-steps compared with single steps.", on_data=True)
_add_bench(
    "learning",
    "Learned step times after two minutes compared with a calibration's; an engine that is slowed down (root).",
    on_data=True,
)
_add_bench("traces", "5,000 traced requests: time to the first token outside all spans, dropped spans, overhead.")
_add_bench("engine", "Prefill orders and decode admission policies, changed on a real engine while it runs.")
_add_bench("live", "The simulator compared with the live cluster it is calibrated on: means, and the better policy.")


@bench_app.command("soak")
def bench_soak(
    minutes: Annotated[float, typer.Option(min=0.5, help="Duration in minutes.")] = 20.0, as_json: Json = False
) -> None:
    """Regular clients while hostile ones attack: failures, gaps, memory and file descriptors over time (root)."""
    _measure("soak", as_json, minutes)


@bench_app.command("predictor")
def bench_predictor(
    part: Annotated[
        list[str] | None, typer.Option(help="One part: bayes, latency, modes or worth; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The length predictor: accuracy against the optimum, latency, cost of a request, benefit."""
    _measure("predictor", as_json, part or [])


@bench_app.command("policies")
def bench_policies(
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="A scenario, `pauses`, or with --live also one of the pauses; may be repeated."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Keep each run in this file, and continue from its runs of the same code.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that simulate.")] = 2,
    live: Annotated[
        bool, typer.Option("--live", help="Run three scenarios, or pauses, on emulated instances.")
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="With --live: runs of each pause, for medians.")] = 1,
    as_json: Json = False,
) -> None:
    """Goodput of adaptive compared with all fixed policies, in twelve simulated scenarios (long: see --results)."""
    if live and results is not None:
        raise typer.BadParameter("--live repeats all runs: --results is for simulated runs only")
    options = {"results": results, "processes": processes, "live": live, "runs": runs}
    _measure("policies", as_json, scenario or (), **options)


@bench_app.command("roles")
def bench_roles(
    data: DataFolder = DATA,
    live: Annotated[
        bool, typer.Option("--live", help="Use emulated instances in real time instead of the simulator.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Roles that follow demand compared with all fixed ratios, while demand shifts from conversation to code."""
    _measure("roles_live" if live else "roles", as_json, data)


@bench_app.command("mixed")
def bench_mixed(
    data: DataFolder = DATA,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all systems; results are medians.")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Send only a few requests, to check that the bench works.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Two real engines, one limited to a third of the other's cores, under all ways to share work (30 min; root)."""
    from benchmarks.mixed import MixedOptions

    _measure("mixed", as_json, data, MixedOptions(rounds, quick))


@bench_app.command("prefix")
def bench_prefix(
    data: DataFolder = DATA,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of chats on real engines.")] = 2,
    simulated: Annotated[bool, typer.Option("--simulated", help="Run the simulated part only.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Run the part on real engines only.")] = False,
    as_json: Json = False,
) -> None:
    """Prefix cache hits of adaptive compared with least_load and an oracle: simulated traces, live chats (root)."""
    parts = {"simulated": simulated or not live, "on_engines": live or not simulated}
    _measure("prefix", as_json, data, rounds, **parts)


@bench_app.command("plan")
def bench_plan(
    data: DataFolder = DATA,
    part: Annotated[list[str] | None, typer.Option(help="One part of the bench by name; may be repeated.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that search in parallel.")] = 2,
    as_json: Json = False,
) -> None:
    """The planner on the papers' cases, compared with the oracle and all other methods, and on 512 devices (long)."""
    from benchmarks.plan import PlanBenchOptions

    _measure("plan", as_json, PlanBenchOptions(data, tuple(part or ()), processes))


@bench_app.command("papers")
def bench_papers(
    data: DataFolder = DATA,
    write_docs: Annotated[Path | None, typer.Option(help="Write papers.md into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """The simulator compared with the results of the papers."""
    _measure("papers", as_json, data, *([write_docs] if write_docs else []))


@bench_app.command("chaos")
def bench_chaos(
    only: Annotated[list[str] | None, typer.Option(help="A scenario or a part of its name; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
    show: Annotated[bool, typer.Option("--list", help="List the scenarios and exit.")] = False,
    at_random: Annotated[bool, typer.Option("--random", help="Inject random faults for --minutes instead.")] = False,
    minutes: Annotated[float, typer.Option(help="Duration of --random in minutes.")] = 60.0,
    write_docs: Annotated[Path | None, typer.Option(help="Write reliability.md into this folder.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep logs and data of the suites in this folder.")] = None,
    kv_transport: Annotated[str, typer.Option(help="KV transport of the real engines: tcp or nixl.")] = "tcp",
    as_json: Json = False,
) -> None:
    """Inject faults into a suite under load and measure what clients see and how fast the suite recovers."""
    from benchmarks.chaos.run import ChaosOptions, show_scenarios

    chosen = ChaosOptions(tuple(only or ()), seed, minutes if at_random else 0.0, write_docs, logs, kv_transport)
    if show:
        show_scenarios(chosen, Console())
        return
    answer = cli_common.summary(find_bench("chaos")(chosen, Console(stderr=as_json)))
    if as_json:
        cli_common.print_json(answer)
    if not answer["ok"]:
        raise typer.Exit(1)


@bench_app.command("troubles")
def bench_troubles(
    only: Annotated[list[str] | None, typer.Option(help="One fault by name; may be repeated.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep logs and data of the suites in this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Stage faults on running suites and check the verdict on each, with all its figures."""
    from benchmarks.troubles import TroublesOptions

    console = Console(stderr=as_json)
    answer = cli_common.summary(find_bench("troubles")(TroublesOptions(tuple(only or ()), logs), console))
    if as_json:
        cli_common.print_json(answer)
    if not answer["ok"]:
        raise typer.Exit(1)
