"""Inventories, workloads and problems of `polyphase bench plan`."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter

from lab.papers.lengths import CODING, CONVERSATION, azure
from shared.cost.kinds import Workshop
from shared.cost.library import Library
from shared.cost.network import Link, Network
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.plan.group import Group, Part
from shared.plan.inventory import Inventory, Pool, read_inventory
from shared.plan.methods.registry import method
from shared.plan.problem import Problem
from shared.plan.search import Outcome, Search, searched
from shared.sim.workload import Workload, synthetic

FILE = Path(__file__).with_name("inventories") / "thunderserve.yaml"
MODEL, CONTEXT_TOKENS = "LLaMA-30B", 2048
NO_ITL_S = 3600.0  # the papers name no target for the gaps between tokens
SLO = Slo(ttft_s=3.0, tpot_s=0.15, itl_s=NO_ITL_S)
TRACES = {"coding": CODING, "conversation": CONVERSATION}
INSIDE = Link(16e9, 1e-4, 0.8)


@cache
def library() -> Library:
    """The shipped one."""
    return Library.built_in()


@cache
def requests(data: Path, kind: str) -> Workload:
    """The Azure trace's requests that the model's context holds."""
    return replace(azure(data, TRACES[kind], 3000, CONTEXT_TOKENS), name=kind)


def thunderserve(data: Path, kind: str, nodes: tuple[str, ...] = ()) -> Problem:
    """The paper's inventory, or some of its nodes."""
    inventory = read_inventory(FILE)[0]
    if nodes:
        inventory = part_of(inventory, nodes)
    return problem_of(inventory, MODEL, requests(data, kind), SLO, Codec.INT4)


def part_of(inventory: Inventory, nodes: tuple[str, ...]) -> Inventory:
    """Some of its nodes."""
    return Inventory(tuple(pool for pool in inventory.pools if pool.node in nodes), inventory.network)


def problem_of(inventory: Inventory, model: str, workload: Workload, slo: Slo, codec: Codec = Codec.RAW) -> Problem:
    """A problem with a workshop of its own, so that no search profits from what another one worked out."""
    return Problem(inventory, Workshop(library(), library().geometry(model)), workload, slo, codec=codec)


def solved(problem: Problem, name: str, seconds: float = float("inf"), seed: int = 1) -> Outcome:
    """The outcome of a method."""
    return searched(name, method(name), Search(problem, perf_counter, until_s=perf_counter() + seconds, seed=seed))


def cluster(nodes: dict[str, tuple[str, int]], gbps: float) -> Inventory:
    """Nodes of one type each, by name, and one link between all."""
    catalogue = library().catalogue
    pools = tuple(
        Pool(name, catalogue.get(kind), count, catalogue.get(kind).price_usd_hour)
        for name, (kind, count) in nodes.items()
    )
    names = sorted(nodes)
    between = {(one, other): Link(gbps * 1e9 / 8.0) for one in names for other in names if one < other}
    return Inventory(pools, Network(dict.fromkeys(names, INSIDE), between))


def table_3(kind: str) -> tuple[Group, ...]:
    """The paper's own plan for 32 GPUs, on the pools of the inventory file in its order."""
    a6000, b6000, a5000, b5000, a40, first, second = range(7)
    layers = 60

    def tensor(role: Role, pool: int, degree: int) -> Group:
        return Group(role, degree, (Part(pool, layers),))

    def halves(role: Role, degree: int, one: int, other: int) -> Group:
        return Group(role, degree, (Part(one, layers // 2), Part(other, layers // 2)))

    p, d = Role.PREFILL, Role.DECODE
    if kind == "coding":
        return (
            *[tensor(p, a40, 2)] * 4,
            tensor(p, a5000, 4),
            *[tensor(p, a6000, 2)] * 2,
            halves(p, 2, b5000, first),
            halves(d, 2, second, second),
            *[halves(d, 1, b6000, b6000)] * 2,
            halves(d, 2, b5000, first),
        )
    return (
        *[tensor(p, a40, 2)] * 3,
        halves(p, 2, b5000, first),
        halves(d, 2, second, second),
        halves(d, 1, a40, a40),
        halves(d, 2, a5000, a5000),
        *[halves(d, 1, b6000, b6000)] * 2,
        *[halves(d, 1, a6000, a6000)] * 2,
        halves(d, 2, b5000, first),
    )


LOST = {"coding": (9, 10), "conversation": (7, 8)}  # of `table_3`: the decode instances on 4 A6000


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn problem, and what it is in words."""

    problem: Problem
    words: str


KINDS = ("A100-SXM-80", "A100-PCIe-40", "A10", "A40", "L40S", "RTX-A5000", "RTX-A6000", "RTX-3090-Ti", "RTX-4090", "L4")
MODELS = ("Llama-3-8B", "Llama-2-13B", "Qwen2.5-14B")
SHAPES = ((900, 200), (2000, 40), (300, 400))  # mean prompt and output tokens
GBPS = (5.0, 25.0, 100.0)


def drawn(seed: int, most: int = 8, kinds: tuple[str, ...] = KINDS) -> Drawn:
    """A random inventory of up to `most` accelerators on one to three nodes, a model and a workload."""
    rng = Random(seed)
    left, nodes = rng.randint(2, most), {}
    for at in range(rng.randint(1, 3)):
        count = min(left, rng.choice((1, 2, 2, 4)))
        if count:
            nodes[f"n{at}"] = (rng.choice(kinds), count)
            left -= count
    inventory = cluster(nodes, rng.choice(GBPS))
    prompt, output = rng.choice(SHAPES)
    workload = synthetic(1000, prompt, output, prompt_cv=0.8, output_cv=0.8, longest_tokens=4096, seed=seed)
    model = rng.choice(MODELS)
    words = f"{model}, {prompt}+{output} tokens on {', '.join(map(str, inventory.pools))}"
    return Drawn(problem_of(inventory, model, workload, Slo(ttft_s=2.0, tpot_s=0.1)), words)
