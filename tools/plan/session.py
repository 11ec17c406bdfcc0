"""A run of `polyphase plan`: reads the files, searches, compares, writes the cluster file, and prints the plan."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from os import cpu_count
from pathlib import Path
from time import perf_counter

import msgspec
from rich.console import Console
from rich.status import Status
from rich.table import Table

from services.launcher.cli_common import Result
from shared.cost.catalogue import Catalogue
from shared.cost.kinds import EngineModels
from shared.domain.instance import Role
from shared.domain.job import Slo, tight_gaps
from shared.errors import InvalidRequest
from shared.plan.find import PlanGoals, PlanRequest, cluster_file, endurance_in_words, figures, find_plans, why
from shared.plan.inventory import read_inventory
from shared.plan.plan import Plan
from shared.plan.problem import Problem
from shared.plan.search import Outcome, ScoredPlan
from tools.simulate.workloads import WorkloadOptions, make_workload


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command line. slo: `ttft=…,tpot=…,itl=…` in seconds."""

    inventory: Path
    model: str
    workload: str = "azure-conv"
    slo: str = "ttft=2,tpot=0.1"
    requests: int = 3000
    goals: PlanGoals = field(default_factory=PlanGoals)
    out: Path = Path("plan.yaml")


def run_plan(options: PlanOptions, console: Console) -> Result:
    """Plan and report. Returns {"figures": {name_unit: number}}.

    Raises InvalidRequest, NotFound or Incompatible, with the nearest alternative that is possible.
    """
    request = read_request(options)
    if assumed := request.problem.inventory.assumed:
        console.print(assumed, style="yellow", markup=False)
    with Console(stderr=True).status("planning") as status:
        progress = _progress(status, perf_counter())
        outcomes = find_plans(request, perf_counter, progress, helped=(cpu_count() or 1) > 1)
    text = cluster_file(request, outcomes[0])
    show(console, request.problem, outcomes)
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {options.out}: {error.strerror}") from error
    shipped = Catalogue.built_in().names()
    if own := sorted({pool.accelerator.name for pool in request.problem.inventory.pools} - set(shipped)):
        note = f"the cluster file cannot be started: {', '.join(own)} are not in the built-in catalogue"
        console.print(note, style="yellow", markup=False)
    trace = f"--trace {options.workload} --requests {options.requests} --rate {outcomes[0].promise.rate:.3g}"
    console.print(f"\nWritten: {options.out}", markup=False)
    console.print(f"  polyphase up --cluster {options.out}", style="dim", markup=False)
    console.print(f"  polyphase simulate {options.out} {trace}", style="dim", markup=False, soft_wrap=True)
    others = {f"{one.method}/{name}": value for one in outcomes[1:] for name, value in figures(one).items()}
    return {"figures": figures(outcomes[0]) | others}


def read_request(options: PlanOptions) -> PlanRequest:
    """The planning problem of the options, with the files that they name."""
    if not options.model:
        raise InvalidRequest("--model is missing: a bundled name, or a config.json or its folder")
    if options.inventory == Path():
        raise InvalidRequest("--inventory is missing: `polyphase plan inventory` writes a file for this machine")
    options.goals.check()
    inventory, library, name = read_inventory(options.inventory)
    models = EngineModels(library, library.geometry(options.model))
    words = WorkloadOptions(options.workload, requests=options.requests, seed=options.goals.seed)
    return PlanRequest.build(
        options.goals, name, inventory, options.model, models, make_workload(words), read_slo(options.slo)
    )


def read_slo(text: str) -> Slo:
    """Targets from `ttft=…,tpot=…,itl=…`. Raises InvalidRequest."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = map(str.strip, part.partition("="))
        if key not in ("ttft", "tpot", "itl"):
            raise InvalidRequest(f"--slo {text!r}: unknown target {key!r}; known: ttft, tpot, itl")
        try:
            targets[f"{key}_s"] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"--slo {text!r}: {key} must be seconds, got {value!r}") from error
        if not 0 < targets[f"{key}_s"] < inf:
            raise InvalidRequest(f"--slo {text!r}: {key} must be positive")
    slo = msgspec.convert(targets, Slo)
    if wrong := tight_gaps(slo.itl_s, slo.tpot_s):
        raise InvalidRequest(f"--slo {text!r}: {wrong}")
    return slo


def _progress(status: Status, begin: float) -> Callable[[str, ScoredPlan | None], None]:
    best = 0.0

    def progress(what: str, found: ScoredPlan | None) -> None:
        nonlocal best
        best = max(best, found[1] if found else 0.0)
        so_far = f", best so far {best:.2f} requests/s" if best else ""
        status.update(f"{what}{so_far} ({perf_counter() - begin:.0f} s; Ctrl-C: use the best so far)")

    return progress


def show(console: Console, problem: Problem, outcomes: Sequence[Outcome]) -> None:
    """Print groups, routes and promise of the first outcome, the comparison of all, and why the first won."""
    chosen = outcomes[0]
    inventory, slo = problem.inventory, problem.slo
    pools = ", ".join(map(str, inventory.pools))
    console.print(f"{problem.models.geometry.name} on {pools}", markup=False)
    console.print(
        f"{problem.workload.name}: {problem.workload.prompt_tokens.mean():,.0f} + "
        f"{problem.workload.output_tokens.mean():,.0f} tokens on average; SLO: TTFT {slo.ttft_s:g} s, TPOT "
        f"{1000 * slo.tpot_s:g} ms, ITL {1000 * slo.itl_s:g} ms for {100 * problem.target:g} % of the requests",
        markup=False,
    )
    console.print(_groups(problem, chosen))
    console.print(_promise(problem, chosen))
    if chosen.endurance is not None:
        console.print(endurance_in_words(chosen), markup=False)
    if chosen.plan.routes:
        console.print(_routes(problem, chosen.plan))
    if len(outcomes) > 1:
        console.print(_compared(problem, outcomes))
        console.print(why(outcomes), markup=False)
    if chosen.promise.rate > chosen.promise.goodput:
        console.print(
            f"{chosen.promise.rate:.2f} requests/s exceed the goodput of {chosen.promise.goodput:.2f} requests/s",
            style="yellow",
        )
    if chosen.stopped:
        console.print("stopped: this is the best plan so far", style="yellow")


def _table(title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """words, numbers: the names of the columns to the left and to the right."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _price(problem: Problem, outcome: Outcome) -> float:
    return problem.price_usd_hour(outcome.plan.groups)


def _groups(problem: Problem, chosen: Outcome) -> Table:
    rows = []
    for name, group in zip(chosen.plan.names(problem), chosen.plan.groups, strict=True):
        busy = chosen.promise.figures.get(f"utilisation_{name}")
        role = "both" if chosen.plan.coupled else group.role.value
        price = f"{group.price_usd_hour(problem.inventory):.2f}"
        shown = "–" if busy is None else f"{100 * busy:.0f} %"
        rows.append((name, role, group.words(problem.inventory), group.layout, shown, price))
    policies = "along routes" if chosen.plan.policies.startswith("plan:") else chosen.plan.policies
    title = f"Plan ({chosen.method}, policies {policies})"
    return _table(title, ("group", "role", "accelerators", "layout"), ("busy", "USD/h"), rows)


def _promise(problem: Problem, chosen: Outcome) -> Table:
    promise, expected = chosen.promise, chosen.promise.figures
    price = f"{_price(problem, chosen):.2f} USD/h, {promise.usd_per_million:.3f} USD for a million tokens at goodput"
    rows = (
        ("goodput", f"{promise.goodput:.2f} requests/s"),
        ("SLO attainment", _percent(promise.attainment)),
        ("TTFT, mean and p90", f"{expected['ttft_mean_s']:.3f} s, {expected['ttft_p90_s']:.3f} s"),
        ("TPOT, mean and p90", f"{1000 * expected['tpot_mean_s']:.1f} ms, {1000 * expected['tpot_p90_s']:.1f} ms"),
        ("longest gap of a stream, p90", f"{1000 * expected['longest_gap_p90_s']:.0f} ms"),
        ("mean utilisation", f"{100 * expected['utilisation_mean']:.0f} %"),
        ("price", price),
    )
    return _table(f"Expected at {promise.rate:.2f} requests/s (simulated)", ("",), ("",), rows)


def _routes(problem: Problem, plan: Plan) -> Table:
    followed = plan.policies.startswith("plan:")
    title = "Routes" if followed else "Routes (what the plan expects; adaptive decides request by request)"
    names = plan.names(problem)
    rows = [
        (
            "the same" if route.prefill is None else names[route.prefill],
            names[route.decode],
            f"{100 * route.share:.1f} %",
        )
        for route in plan.routes
    ]
    return _table(title, ("prompts computed by", "decoded by"), ("share of requests",), rows)


def _compared(problem: Problem, outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        promise, roles = outcome.promise, outcome.plan.roles
        ttft, tpot = (promise.figures.get(name) for name in ("ttft_mean_s", "tpot_mean_s"))
        rows.append(
            (
                outcome.method,
                str(roles[Role.PREFILL]),
                str(roles[Role.DECODE]),
                f"{promise.goodput:.2f}",
                "–" if ttft is None else f"{ttft:.2f}",
                "–" if tpot is None else f"{1000 * tpot:.0f}",
                f"{_price(problem, outcome):.2f}",
                f"{promise.usd_per_million:.3f}" if isfinite(promise.usd_per_million) else "–",
                f"{outcome.found_s:.1f}",
            )
        )
    columns = ("prefill", "decode", "goodput", "TTFT s", "TPOT ms", "USD/h", "USD/M tokens", "found in s")
    return _table("Compared with", ("method",), columns, rows)
