"""What is possible where what was asked is not: the memory that is missing, the tightest SLO that can be reached."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from shared.cost.catalogue import bytes_of
from shared.domain.instance import Role
from shared.domain.job import default_itl_s
from shared.plan.compose import Composer
from shared.plan.group import Group
from shared.plan.plan import Plan
from shared.plan.problem import Clock, Problem
from shared.plan.search import Search

_LOOSER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)  # than a request that is alone


def nearest(problem: Problem, clock: Clock) -> str:
    """In words. Looks at memory first, then at targets, one at a time and both together."""
    missing = missing_memory(problem)
    return missing or tightest_slo(problem, clock) or "no deployment of it serves any request in time"


def missing_memory(problem: Problem) -> str:
    """Why the model fits nowhere; empty where it fits somewhere."""
    search = Search(problem, lambda: 0.0)
    if next(_holding(search), None) is not None:
        return ""
    inventory, geometry = problem.inventory, problem.shop.geometry
    weights = geometry.weight_bytes(bytes_of(problem.dtype or geometry.dtype))
    kv = problem.longest * search.estimator.costs.kv_bytes
    nodes = dict.fromkeys(inventory.nodes, 0.0)
    for pool in inventory.pools:
        nodes[pool.node] += pool.count * pool.accelerator.memory_bytes
    largest = max(nodes, key=lambda node: nodes[node])
    room = nodes[largest] if problem.one_node else sum(nodes.values())
    where = f"the largest node, {largest}, has" if problem.one_node else "all accelerators together have"
    need = (weights + kv) / 0.9
    if need <= room:
        return (
            f"{geometry.name} would fit the {room / 1e9:.1f} GB that {where}, but no group of one type, or of two that "
            f"give as many, holds it: give a node more accelerators of one type"
        )
    return (
        f"{geometry.name} needs {weights / 1e9:.1f} GB of weights and {kv / 1e9:.2f} GB of KV for a request of "
        f"{problem.longest} tokens; {where} {room / 1e9:.1f} GB, of which nine tenths are usable: "
        f"{(need - room) / 1e9:.1f} GB are missing"
    )


def tightest_slo(problem: Problem, clock: Clock) -> str:
    """The tightest targets that a deployment keeps: what the fastest groups take alone, and then by steps more."""
    fastest = _fastest(Search(problem, clock))
    if fastest is None:
        return ""
    slo = problem.slo
    for looser in _LOOSER:
        ttft_s, tpot_s = max(slo.ttft_s, looser * fastest[0]), max(slo.tpot_s, looser * fastest[1])
        wider = msgspec.structs.replace(slo, ttft_s=ttft_s, tpot_s=tpot_s, itl_s=max(slo.itl_s, default_itl_s(tpot_s)))
        found = _served(replace(problem, slo=wider, rate=0.0), clock)
        if found > 0.0:
            return (
                f"the nearest that is possible here: TTFT {ttft_s:.3g} s and TPOT {tpot_s:.3g} s, at up to "
                f"{found:.2g} requests/s"
            )
    return ""


def _fastest(search: Search) -> tuple[float, float] | None:
    """Seconds of a long prompt, and of a token, on the fastest group of each role with nothing else to do."""
    layouts, share = search.estimator.layouts, search.problem.target
    costs = [layouts.cost(group) for group in _holding(search)]
    if not costs:
        return None
    return min(float(np.quantile(c.prefill_s, share)) for c in costs), min(c.decode_s(1.0) for c in costs)


def _served(problem: Problem, clock: Clock) -> float:
    """Goodput of the most promising deployment, by the estimate, checked by a run at half of it."""
    search = Search(problem, clock)
    best = max(
        ((search.estimator.of(groups).goodput, groups) for groups in Composer(search.estimator).candidates()),
        key=lambda one: one[0],
        default=(0.0, ()),
    )
    goodput, groups = best
    if goodput <= 0.0:
        return 0.0
    return goodput / 2.0 if search.judge.attained(Plan(groups), goodput / 2.0) >= problem.target else 0.0


def _holding(search: Search) -> Iterator[Group]:
    """Layouts that hold the model: of single pools, then of pairs."""
    pools, layouts = search.problem.inventory.pools, search.estimator.layouts
    for one, entry in enumerate(pools):
        for size in range(1, entry.count + 1):
            yield from layouts.all({one: size}, Role.DECODE)
    for one, first in enumerate(pools):
        for other in range(one + 1, len(pools)):
            if search.problem.one_node and first.node != pools[other].node:
                continue
            for size in range(1, min(first.count, pools[other].count) + 1):
                yield from layouts.all({one: size, other: size}, Role.DECODE)
