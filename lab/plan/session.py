"""One call of `polyphase plan`: read, search, compare, write, report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.status import Status

from lab.plan.report import show
from lab.simulate.workloads import WorkloadOptions, make_workload
from shared.cost.catalogue import Catalogue
from shared.cost.kinds import Workshop
from shared.domain.job import Slo, tight_gaps
from shared.errors import InvalidRequest
from shared.plan.answer import Asked, Wanted, answered, cluster_file, figures
from shared.plan.inventory import read_inventory
from shared.plan.search import Found, Outcome


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line says. slo: `ttft=…,tpot=…,itl=…` in seconds."""

    inventory: Path
    model: str
    workload: str = "azure-conv"
    slo: str = "ttft=2,tpot=0.1"
    requests: int = 3000
    wanted: Wanted = field(default_factory=Wanted)
    out: Path = Path("plan.yaml")


def run_plan(options: PlanOptions, console: Console) -> dict[str, Any]:
    """Plan and report. Returns {"figures": {name_unit: number}}.

    Raises InvalidRequest, NotFound or Incompatible that names what is wrong and the nearest that is possible.
    """
    asked = read_asked(options)
    if assumed := asked.problem.inventory.assumed:
        console.print(assumed, style="yellow", markup=False)
    with Console(stderr=True).status("planning") as status:
        tell = _teller(status, perf_counter())
        outcomes = answered(asked, perf_counter, tell, helped=(cpu_count() or 1) > 1)
    text = cluster_file(asked, outcomes[0])
    show(console, asked.problem, outcomes)
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {options.out}: {error.strerror}") from error
    _told_on(console, options, asked, outcomes[0].promise.rate)
    return {"figures": _figures(outcomes)}


def read_asked(options: PlanOptions) -> Asked:
    """What is asked, with the files that it names."""
    if not options.model:
        raise InvalidRequest("--model: which model? A bundled name, or a config.json or its folder")
    if options.inventory == Path():
        raise InvalidRequest("--inventory: which file? `polyphase plan inventory` writes one for this machine")
    options.wanted.check()
    inventory, library, name = read_inventory(options.inventory)
    shop = Workshop(library, library.geometry(options.model))
    words = WorkloadOptions(options.workload, requests=options.requests, seed=options.wanted.seed)
    return Asked.of(options.wanted, name, inventory, options.model, shop, make_workload(words), read_slo(options.slo))


def read_slo(said: str) -> Slo:
    """Targets from `ttft=…,tpot=…,itl=…`. Raises InvalidRequest that names the part."""
    values: dict[str, float] = {}
    for part in said.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in ("ttft", "tpot", "itl"):
            raise InvalidRequest(f"--slo {said!r}: no target {key.strip()!r}; known: ttft, tpot, itl")
        try:
            values[key.strip()] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"--slo {said!r}: {key.strip()} must be seconds, not {value!r}") from error
        if not 0 < values[key.strip()] < inf:
            raise InvalidRequest(f"--slo {said!r}: {key.strip()} must be positive")
    default = Slo()
    slo = Slo(
        ttft_s=values.get("ttft", default.ttft_s),
        tpot_s=values.get("tpot", default.tpot_s),
        itl_s=values.get("itl", 0.0),
    )
    if wrong := tight_gaps(slo.itl_s, slo.tpot_s):
        raise InvalidRequest(f"--slo {said!r}: {wrong}")
    return slo


def _teller(status: Status, begin: float) -> Callable[[str, Found | None], None]:
    best = 0.0

    def tell(what: str, found: Found | None) -> None:
        nonlocal best
        best = max(best, found[1] if found else 0.0)
        so_far = f", best so far {best:.2f} requests/s" if best else ""
        status.update(f"{what}{so_far} ({perf_counter() - begin:.0f} s; Ctrl-C takes the best so far)")

    return tell


def _told_on(console: Console, options: PlanOptions, asked: Asked, rate: float) -> None:
    """Where the plan is, and what can be done with it."""
    shipped = Catalogue.built_in().names()
    own = sorted({pool.accelerator.name for pool in asked.problem.inventory.pools} - set(shipped))
    if own:
        told = f"{', '.join(own)}: of your own catalogue, which cluster files do not know yet: only to be read"
        console.print(told, style="yellow", markup=False)
    console.print(f"\nWritten: {options.out}", markup=False)
    console.print(f"  polyphase up --cluster {options.out}", style="dim", markup=False)
    trace = f"--trace {options.workload} --requests {options.requests} --rate {rate:.3g}"
    console.print(f"  polyphase simulate {options.out} {trace}", style="dim", markup=False, soft_wrap=True)


def _figures(outcomes: list[Outcome]) -> dict[str, float]:
    found = figures(outcomes[0])
    for one in outcomes[1:]:
        found |= {f"{one.method}/{name}": value for name, value in figures(one).items()}
    return found
