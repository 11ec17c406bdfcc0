"""One call of `polyphase plan`: read, search, compare, write, report."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.status import Status

from lab.plan.report import show
from lab.simulate.workloads import WorkloadOptions, make_workload
from services.launcher.model_source import PROJECT
from shared.cost.catalogue import Catalogue
from shared.cost.kinds import Workshop
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import Incompatible, InvalidRequest
from shared.plan.advice import nearest
from shared.plan.cheapest import cheapest
from shared.plan.inventory_file import read_inventory
from shared.plan.methods.registry import QUICK, method
from shared.plan.plan_file import Target, plan_text
from shared.plan.problem import Problem
from shared.plan.search import Found, Outcome, Search, Stopped, searched
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import Workload

TOKENIZER = PROJECT / "models" / "demo"  # of emulated engines


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line says. slo: `ttft=…,tpot=…` in seconds."""

    inventory: Path
    model: str
    workload: str = "azure-conv"
    slo: str = "ttft=2,tpot=0.1"
    rate: float = 0.0
    target: float = 0.9
    budget: float | None = None
    cheapest: bool = False
    method: str = "best"
    compare: bool = True
    seconds: float = 60.0
    requests: int = 3000
    codec: str = "raw"
    engine: str = "emulated"
    one_node: bool = False
    max_model_len: int | None = None
    chunk_size: int = 2048
    seed: int = 1
    out: Path = Path("plan.yaml")


def run_plan(options: PlanOptions, console: Console) -> dict[str, Any]:
    """Plan and report. Returns {"figures": {name_unit: number}}.

    Raises InvalidRequest, NotFound or Incompatible that names what is wrong and the nearest that is possible.
    """
    problem, name = read_problem(options)
    outcomes = _outcomes(options, problem)
    chosen = outcomes[0]
    estimator = Search(problem, perf_counter).estimator
    target = Target(
        f"{name}: {problem.shop.geometry.name} for {problem.workload.name}",
        str(TOKENIZER) if options.engine == "emulated" else options.model,
        options.model,
        "emulated" if options.engine == "emulated" else "vllm",
    )
    text = plan_text(problem, chosen.plan, estimator.costs, estimator.places, target, _head(problem, chosen))
    show(console, problem, outcomes)
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {options.out}: {error.strerror}") from error
    shipped = Catalogue.built_in().names()
    own = sorted({pool.accelerator.name for pool in problem.inventory.pools} - set(shipped))
    if own:
        told = f"{', '.join(own)}: of your own catalogue, which cluster files do not know yet: only to be read"
        console.print(told, style="yellow", markup=False)
    rate = chosen.promise.rate
    console.print(f"\nWritten: {options.out}", markup=False)
    console.print(f"  polyphase up --cluster {options.out}", style="dim", markup=False)
    trace = f"--trace {options.workload} --requests {options.requests} --rate {rate:.3g}"
    console.print(f"  polyphase simulate {options.out} {trace}", style="dim", markup=False, soft_wrap=True)
    return {"figures": _figures(outcomes)}


def read_problem(options: PlanOptions) -> tuple[Problem, str]:
    """What is asked, and the inventory's name."""
    if not options.model:
        raise InvalidRequest("--model: which model? A bundled name, or a config.json or its folder")
    if options.inventory == Path():
        raise InvalidRequest("--inventory: which file? `polyphase plan inventory` writes one for this machine")
    if options.engine not in ("emulated", "vllm"):
        raise InvalidRequest(f"--engine: emulated or vllm, not {options.engine!r}")
    if options.codec not in list(Codec):
        raise InvalidRequest(f"--codec: one of {', '.join(Codec)}, not {options.codec!r}")
    if options.cheapest and not options.rate > 0:
        raise InvalidRequest("--cheapest needs the --rate that is to be served")
    method(options.method)
    inventory, library, name = read_inventory(options.inventory)
    geometry = library.geometry(options.model)
    longest = options.max_model_len or geometry.max_position
    workload = make_workload(WorkloadOptions(options.workload, requests=options.requests, seed=options.seed))
    problem = Problem(
        inventory,
        Workshop(library, geometry),
        fitting(workload, longest),
        slo=read_slo(options.slo),
        rate=options.rate,
        target=options.target,
        limits=EngineLimits(batched_tokens=options.chunk_size, sequences=min(256, options.chunk_size)),
        one_node=options.one_node or options.engine == "vllm",
        codec=Codec(options.codec),
        budget_usd_hour=inf if options.budget is None else options.budget,
        longest_tokens=options.max_model_len or 0,
    )
    return problem, name


def fitting(workload: Workload, longest: int) -> Workload:
    """The requests that a context of `longest` tokens holds. Raises InvalidRequest where none is left."""
    fits = workload.prompt_tokens + workload.output_tokens <= longest
    if not fits.any():
        raise InvalidRequest(f"{workload.name}: every request is longer than {longest} tokens (max_model_len)")
    if fits.all():
        return workload
    return replace(
        workload,
        name=f"{workload.name} (without {int((~fits).sum())} of {len(fits)} requests of more than {longest} tokens)",
        arrival_s=workload.arrival_s[fits],
        prompt_tokens=workload.prompt_tokens[fits],
        output_tokens=workload.output_tokens[fits],
        prefixes=None,
        mix=None,
    )


def read_slo(said: str) -> Slo:
    """Targets from `ttft=…,tpot=…`. Raises InvalidRequest that names the part."""
    values: dict[str, float] = {}
    for part in said.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in ("ttft", "tpot"):
            raise InvalidRequest(f"--slo {said!r}: no target {key.strip()!r}; known: ttft, tpot")
        try:
            values[key.strip()] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"--slo {said!r}: {key.strip()} must be seconds, not {value!r}") from error
        if not 0 < values[key.strip()] < inf:
            raise InvalidRequest(f"--slo {said!r}: {key.strip()} must be positive")
    default = Slo()
    return Slo(ttft_s=values.get("ttft", default.ttft_s), tpot_s=values.get("tpot", default.tpot_s))


def _outcomes(options: PlanOptions, problem: Problem) -> list[Outcome]:
    """The plan that was asked for, then those of the methods that it is compared with."""
    begin = perf_counter()
    with Console(stderr=True).status("planning") as status:
        if options.cheapest:
            return [_cheapest(options, problem, status, begin)]
        try:
            chosen = _searched(options, problem, options.method, status, begin)
        except Incompatible as error:
            if options.method != "best" or isinstance(error, Stopped):
                raise
            raise Incompatible(f"{error.message}\n{nearest(problem, perf_counter)}") from error
        if chosen.promise.goodput <= 0.0:
            raise Incompatible(f"nothing serves this within the SLO\n{nearest(problem, perf_counter)}")
        found = [chosen]
        for name in QUICK if options.compare and not chosen.stopped else ():
            if name != options.method and perf_counter() - begin < options.seconds:
                try:
                    found.append(_searched(options, problem, name, status, begin))
                except Incompatible:
                    continue
    return found


def _searched(options: PlanOptions, problem: Problem, name: str, status: Status, begin: float) -> Outcome:
    until_s = begin + options.seconds
    tell, helped = _teller(status, begin), (cpu_count() or 1) > 1
    search = Search(problem, perf_counter, _run(options), until_s, options.seed, tell, helped)
    return searched(name, method(name), search)


def _cheapest(options: PlanOptions, problem: Problem, status: Status, begin: float) -> Outcome:
    search = Search(problem, perf_counter, _run(options), begin + options.seconds, options.seed, _teller(status, begin))
    plan = cheapest(search)
    promise = search.judge.promise(plan, search.judge.goodput(plan, problem.rate))
    took_s = perf_counter() - begin
    return Outcome("cheapest", plan, promise, took_s, took_s, search.judge.runs)


def _run(options: PlanOptions) -> RunSpec:
    """Emulated engines send KV when the whole prompt is computed."""
    return RunSpec(streaming=options.engine != "emulated")


def _teller(status: Status, begin: float) -> Callable[[str, Found | None], None]:
    best = 0.0

    def tell(what: str, found: Found | None) -> None:
        nonlocal best
        best = max(best, found[1] if found else 0.0)
        so_far = f", best so far {best:.2f} requests/s" if best else ""
        status.update(f"{what}{so_far} ({perf_counter() - begin:.0f} s; Ctrl-C takes the best so far)")

    return tell


def _head(problem: Problem, chosen: Outcome) -> str:
    promise, figures = chosen.promise, chosen.promise.figures
    slo = problem.slo
    return (
        f"A plan by `polyphase plan`, method {chosen.method}.\n"
        f"{problem.shop.geometry.name}, {problem.workload.name}; SLO: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s, "
        f"for {100 * problem.target:g} % of the requests.\n"
        f"Goodput {promise.goodput:.2f} requests/s. At {promise.rate:.2f} requests/s: mean TTFT "
        f"{figures['ttft_mean_s']:.3f} s, mean TPOT {figures['tpot_mean_s']:.4f} s, attainment "
        f"{100 * promise.attainment:.1f} %."
    )


def _figures(outcomes: list[Outcome]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for at, one in enumerate(outcomes):
        head = "" if at == 0 else f"{one.method}/"
        told = one.promise.figures
        found = {
            "goodput_requests_per_s": one.promise.goodput,
            "attainment_share": one.promise.attainment,
            "ttft_mean_s": told.get("ttft_mean_s", inf),
            "tpot_mean_s": told.get("tpot_mean_s", inf),
            "usd_per_million_tokens": one.promise.usd_per_million,
            "took_s": one.took_s,
        }
        figures |= {f"{head}{name}": value for name, value in found.items() if isfinite(value)}
    return figures
