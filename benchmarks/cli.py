"""The `polyphase bench` commands."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common
from services.launcher.cli_common import Json

# `benchmarks.NAME` has the function `run_NAME_bench`. Each returns {"figures": {name_unit: number},
# "aims": {name: {want, got, met}}}, and optionally "tables": {title: rows} and "notes": [text].
MODULES = (
    "benchmarks.overhead", "benchmarks.kv", "benchmarks.soak", "benchmarks.streams", "benchmarks.kv_engines",
    "benchmarks.kv_memory", "benchmarks.kv_quality", "benchmarks.control", "benchmarks.dashboard", "benchmarks.policy",
    "benchmarks.policies", "benchmarks.roles", "benchmarks.overload", "benchmarks.cost", "benchmarks.mixed",
    "benchmarks.prefix", "benchmarks.learning", "benchmarks.engine", "benchmarks.live", "benchmarks.traces",
    "benchmarks.sim", "benchmarks.plan", "benchmarks.predictor", "benchmarks.papers", "benchmarks.models",
    "benchmarks.mobility", "benchmarks.truth", "benchmarks.chaos.run",
)  # fmt: skip
BENCHES = {module.removesuffix(".run").rpartition(".")[2]: module for module in MODULES}  # by name
BENCHES["troubles"] = "benchmarks.chaos.run"
Bench = Callable[..., cli_common.Result]

bench_app = typer.Typer(no_args_is_help=True, help="Run a benchmark. The exit code is 0 if all its aims are met.")


@bench_app.callback(invoke_without_command=False)
def _bench() -> None:
    """Run a benchmark."""


DATA = Path("../shared/data")
DataFolder = Annotated[Path, typer.Option("--data", help="The folder with public traces and measurements.")]
Parts = Annotated[list[str] | None, typer.Option("--part", help="One part of the bench by name; may be repeated.")]
Processes = Annotated[int, typer.Option(min=1, help="Number of processes that simulate or search in parallel.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds over all systems on real engines; results are medians.")]
Live = Annotated[bool, typer.Option("--live", help="Run on instances in real time instead of the simulator.")]


def find_bench(name: str) -> Bench:
    """The function of a bench; its module is loaded now, so that the command line starts quickly."""
    bench: Bench = getattr(importlib.import_module(BENCHES[name]), f"run_{name}_bench")
    return bench


def _measure(name: str, as_json: bool, *arguments: object, **options: object) -> None:
    if not cli_common.report(Console(), find_bench(name)(*arguments, **options), as_json):
        raise typer.Exit(1)


PLAIN = {
    "streams": "2,000 chat streams open for a minute: losses, delays, memory; one gateway process against two.",
    "kv": "KV transfer between two processes, compared with a plain socket.",
    "kv_engines": "KV transfer between two real engines, by transport.",
    "kv_memory": "KV memory and KV on the wire of models with sliding windows, compared with plain vLLM.",
    "policy": "The time of one decision of each policy with 10, 100 and 1,000 instances.",
    "overload": "Interactive and batch requests at twice the capacity, with and without overload control.",
    "traces": "5,000 traced requests: time to the first token outside all spans, dropped spans, overhead.",
    "engine": "Prefill orders and decode admission policies, changed on a real engine while it runs.",
    "live": "The simulator compared with the live cluster it is calibrated on: means, and the better policy.",
}
ON_DATA = {
    "kv_quality": "Perplexity and answers of the demo model with KV coded in int8, int4 and fp8.",
    "cost": "The cost model compared with published measurements.",
    "sim": "The speed of the simulator, and its macro-steps compared with single steps.",
    "learning": "Learned step times after two minutes compared with a calibration's; an engine that is slowed down "
    "(root).",
}


def _add(name: str, text: str, *, on_data: bool) -> None:
    def command(as_json: Json = False) -> None:
        _measure(name, as_json)

    def command_on_data(data: DataFolder = DATA, as_json: Json = False) -> None:
        _measure(name, as_json, data)

    bench_app.command(name, help=text)(command_on_data if on_data else command)


for _name, _text in (PLAIN | ON_DATA).items():
    _add(_name, _text, on_data=_name in ON_DATA)


@bench_app.command("overhead")
def bench_overhead(
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="A number of streams; may be repeated. Default: 16.")
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="1 to 256 streams, other routers, structured outputs and long prompts, too (long)."
        ),
    ] = False,
    one_process: Annotated[
        bool,
        typer.Option("--one-process", help="Gateway, scheduler and monitor are one process, as in a small cluster."),
    ] = False,
    as_json: Json = False,
) -> None:
    """The suite's own CPU time per request and token, and the TTFT it adds, compared with vLLM's API layer alone."""
    _measure("overhead", as_json, tuple(streams or ()), full=full, one_process=one_process)


@bench_app.command("control")
def bench_control(
    instances: Annotated[
        list[int] | None,
        typer.Option(min=2, help="A number of instances; may be repeated. Default: 10, 100 and 1,000."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Monitor and scheduler with 10, 100 and 1,000 instances: CPU, traffic, placement, a restart."""
    _measure("control", as_json, tuple(instances or ()))


@bench_app.command("soak")
def bench_soak(
    minutes: Annotated[float, typer.Option(min=0.5, help="Duration in minutes.")] = 20.0, as_json: Json = False
) -> None:
    """Regular clients while hostile ones attack: failures, gaps, memory and file descriptors over time (root)."""
    _measure("soak", as_json, minutes)


@bench_app.command("predictor")
def bench_predictor(part: Parts = None, as_json: Json = False) -> None:
    """The length predictor: bayes (accuracy against the optimum), latency, modes (cost of a request) and worth."""
    _measure("predictor", as_json, part or ())


@bench_app.command("truth")
def bench_truth(
    part: Parts = None,
    rounds: Annotated[int, typer.Option(min=3, help="Times that the same requests are sent, the first unjudged.")] = 5,
    simulated: Annotated[bool, typer.Option("--simulated", help="Simulate pair and fleet only.")] = False,
    as_json: Json = False,
) -> None:
    """Predicted TTFT and TPOT beside what came while the load changes: pair (four instances), fleet (32), each also
    simulated; with --part mixed two real engines of unequal speed (root)."""
    _measure("truth", as_json, part or (), rounds, simulated=simulated)


@bench_app.command("dashboard")
def bench_dashboard(
    busy: Annotated[
        bool, typer.Option("--busy", help="All pages beside 32 emulated instances that use all cores instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Load time of dashboard pages and cost of a session, with 4, 32 and 200 instances."""
    _measure("dashboard", as_json, busy=busy)


@bench_app.command("policies")
def bench_policies(
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="A scenario, `pauses`, or with --live also one of the pauses; may be repeated."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Keep each run in this file, and continue from its runs of the same code.")
    ] = None,
    processes: Processes = 2,
    live: Live = False,
    runs: Annotated[int, typer.Option(min=1, help="With --live: runs of each pause, for medians.")] = 1,
    as_json: Json = False,
) -> None:
    """Goodput of adaptive compared with all fixed policies, in twelve simulated scenarios (long: see --results)."""
    if live and results is not None:
        raise typer.BadParameter("--live repeats all runs: --results is for simulated runs only")
    _measure("policies", as_json, scenario or (), results=results, processes=processes, live=live, runs=runs)


@bench_app.command("roles")
def bench_roles(data: DataFolder = DATA, live: Live = False, as_json: Json = False) -> None:
    """Roles that follow demand compared with all fixed ratios, while demand shifts from conversation to code."""
    _measure("roles", as_json, data, live=live)


@bench_app.command("mixed")
def bench_mixed(
    data: DataFolder = DATA,
    rounds: Rounds = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Send only a few requests, to check that the bench works.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Two real engines, one limited to a third of the other's cores, under all ways to share work (30 min; root)."""
    _measure("mixed", as_json, data, rounds, quick=quick)


@bench_app.command("prefix")
def bench_prefix(
    data: DataFolder = DATA,
    rounds: Rounds = 2,
    simulated: Annotated[bool, typer.Option("--simulated", help="Run the simulated part only.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Run the part on real engines only.")] = False,
    as_json: Json = False,
) -> None:
    """Prefix cache hits of adaptive compared with least_load and an oracle: simulated traces, live chats (root)."""
    _measure("prefix", as_json, data, rounds, simulated=simulated or not live, on_engines=live or not simulated)


@bench_app.command("mobility")
def bench_mobility(
    data: DataFolder = DATA,
    section: Annotated[
        list[str] | None,
        typer.Option("--sections", help="One of chats, goodput, traces, host, pulls, migration; may be repeated."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Keep each run of goodput in this file, and continue from its runs.")
    ] = None,
    processes: Processes = 2,
    as_json: Json = False,
) -> None:
    """KV from any instance to any other: chats, goodput and host tiers simulated, pulls (root) and migrations live."""
    _measure("mobility", as_json, data, section or (), processes=processes, results=results)


@bench_app.command("plan")
def bench_plan(data: DataFolder = DATA, part: Parts = None, processes: Processes = 2, as_json: Json = False) -> None:
    """The planner on the papers' cases, compared with the oracle and all other methods, and on 512 devices (long)."""
    _measure("plan", as_json, data, part or (), processes)


@bench_app.command("papers")
def bench_papers(
    data: DataFolder = DATA,
    write_docs: Annotated[Path | None, typer.Option(help="Write papers.md into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """The simulator compared with the results of the papers."""
    _measure("papers", as_json, data, write_docs)


@bench_app.command("models")
def bench_models(
    family: Annotated[list[str] | None, typer.Option(help="A family of models by name; may be repeated.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Keep each family's result in this folder, and measure those that are missing there."),
    ] = None,
    write_docs: Annotated[Path | None, typer.Option(help="Write the table into models.md in this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Tiny models of many families on real engines: tokens after all kinds of hand-overs (long: see --results)."""
    _measure("models", as_json, family or (), results, write_docs=write_docs)


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
    only: Annotated[list[str] | None, typer.Option(help="A fault or a part of its name; may be repeated.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep logs and data of the suites in this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Inject faults into running suites and check that the monitor's verdict names the problem of each."""
    from benchmarks.chaos.run import ChaosOptions

    chosen = ChaosOptions(tuple(only or ()), keep_logs=logs)
    answer = cli_common.summary(find_bench("troubles")(chosen, Console(stderr=as_json)))
    if as_json:
        cli_common.print_json(answer)
    if not answer["ok"]:
        raise typer.Exit(1)
