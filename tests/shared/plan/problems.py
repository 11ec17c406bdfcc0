"""Small problems for tests of the planner."""

from itertools import combinations
from time import perf_counter

from shared.cost.kinds import EngineModels
from shared.cost.library import Library
from shared.cost.network import Link, Network
from shared.domain.job import Slo
from shared.plan.inventory import Inventory, Pool
from shared.plan.problem import Problem
from shared.plan.search import Search
from shared.sim.spec import RunSpec
from shared.sim.workload import synthetic

LIBRARY = Library.built_in()
INSIDE = Link(16e9, 1e-4, 0.8)


def inventory(*nodes: tuple[str, str, int], gbps: float = 40.0, **pairs: float) -> Inventory:
    """Nodes as (name, accelerator, how many). pairs: links that differ, as `a_b=gbps`; 0 is none."""
    pools = [Pool(name, LIBRARY.catalogue.get(kind), count, 1.0) for name, kind, count in nodes]
    names = sorted({name for name, *_ in nodes})
    rates = {f"{one}_{other}": gbps for one, other in combinations(names, 2)} | pairs
    between = {(pair.split("_")[0], pair.split("_")[1]): Link(rate * 1e9 / 8.0) for pair, rate in rates.items() if rate}
    return Inventory(tuple(pools), Network(dict.fromkeys(names, INSIDE), between))


def problem(
    stock: Inventory, model: str = "Llama-3-8B", prompt: int = 800, output: int = 150, **more: object
) -> Problem:
    """Requests of about those lengths, none of more than 4,096 tokens."""
    workload = synthetic(600, prompt, output, prompt_cv=0.7, output_cv=0.7, longest_tokens=4096, seed=3)
    slo = more.pop("slo", Slo(ttft_s=2.0, tpot_s=0.1))
    return Problem(stock, EngineModels(LIBRARY, LIBRARY.geometry(model)), workload, slo, **more)  # type: ignore[arg-type]


def search(asked: Problem) -> Search:
    """Without a deadline, and without a step budget."""
    return Search(asked, perf_counter, RunSpec())
