"""What cannot be: each refusal, and whether it says what is the nearest that can."""

from collections.abc import Callable
from time import perf_counter

from lab.bench.plan_cases import cluster, library, problem_of
from lab.bench.plan_thunderserve import Part, aim
from shared.cost.network import Network
from shared.domain.job import Slo
from shared.errors import PolyphaseError
from shared.plan.answer import nearest
from shared.plan.inventory import Inventory
from shared.sim.workload import synthetic


def case_impossible() -> Part:
    """A model that fits nowhere, an SLO that nothing meets, nodes without a link, an unknown accelerator."""
    pair = cluster({"one": ("A10", 2), "two": ("L4", 1)}, 25.0)
    workload = synthetic(300, 900, 200, seed=1)

    def too_large() -> str:
        return nearest(problem_of(pair, "Llama-2-70B", workload, Slo()), perf_counter)

    def too_tight() -> str:
        return nearest(problem_of(pair, "Llama-3-8B", workload, Slo(ttft_s=0.001, tpot_s=0.0001)), perf_counter)

    def apart() -> str:
        return told(lambda: Inventory(pair.pools, Network(pair.network.inside)).require_joined())

    def unknown() -> str:
        return told(lambda: library().catalogue.get("A1000-SXM"))

    aims = {}
    for what, ask, want in (
        ("a model that fits nowhere", too_large, "GB are missing"),
        ("an SLO that nothing meets", too_tight, "the nearest possible SLO: TTFT"),
        ("nodes without a link", apart, "no link between the nodes 'one' and 'two'"),
        ("an unknown accelerator", unknown, "did you mean"),
    ):
        said = ask()
        aims[what] = aim(want, said, want in said)
    return {}, aims, []


def told(act: Callable[[], object]) -> str:
    """What the error says."""
    try:
        act()
    except PolyphaseError as error:
        return error.message
    return "no error"
