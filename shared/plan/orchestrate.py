"""Routes for given groups: the linear programme and the simulator in turn, a few damped rounds.

Source: ThunderServe 3.3. F: D depends on the load, so what a run shows of a route is its worth in the next programme.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shared.plan.estimate import Estimate
from shared.plan.group import Group
from shared.plan.judge import Ask
from shared.plan.plan import Plan, routes_of
from shared.plan.routes import Route
from shared.plan.search import Found, Search
from shared.sim.outcomes import SimResult

ROUNDS = 3
_DAMPING = 0.5  # of the new routes in the mixture with the old
_UNSEEN = 0.95  # worth of a route that no request took


def orchestrated(search: Search, groups: Sequence[Group]) -> Iterator[Found]:
    """The groups under routes, the first and those after each round."""
    estimate = search.estimator.of(groups, local=False)
    plan = _along(search, groups, routes_of(estimate))
    if plan is None:
        return
    goodput = search.judge.goodput(plan, estimate.goodput or 0.3 * estimate.most)
    yield plan, goodput
    for _ in range(ROUNDS - 1):
        if search.over() or goodput <= 0.0:
            return
        worth = _worth(search, search.judge.result(Ask(plan, goodput)), estimate)
        better = search.estimator.of(groups, local=False, worth=worth)
        mixed = _mixed(plan.routes, routes_of(better))
        following = _along(search, groups, mixed)
        if following is None or following.routes == plan.routes:
            return
        plan = following
        goodput = search.judge.goodput(plan, goodput)
        yield plan, goodput


def _along(search: Search, groups: Sequence[Group], routes: tuple[Route, ...]) -> Plan | None:
    if not routes:
        return None
    plan = Plan(tuple(groups), routes)
    return replace(plan, policies=plan.routed(search.problem))


def _worth(search: Search, result: SimResult, estimate: Estimate) -> NDArray[np.float64]:
    """The share of each pair's requests within the SLO in a run: D, shape [p + 1, d]."""
    out = result.outcomes
    met = out.met(search.problem.slo)
    worth = np.full((len(estimate.prefill) + 1, len(estimate.decode)), _UNSEEN)
    for i, prefill in enumerate(estimate.prefill):
        for j, decode in enumerate(estimate.decode):
            went = (out.prefill_instance == prefill) & (out.decode_instance == decode)
            if went.any():
                worth[i, j] = max(0.01, float(met[went].mean()))
    return worth


def _mixed(old: tuple[Route, ...], new: tuple[Route, ...]) -> tuple[Route, ...]:
    shares: dict[tuple[int | None, int], float] = {}
    for routes, part in ((old, 1.0 - _DAMPING), (new, _DAMPING)):
        for route in routes:
            key = (route.prefill, route.decode)
            shares[key] = shares.get(key, 0.0) + part * route.share
    return tuple(Route(prefill, decode, share) for (prefill, decode), share in shares.items())
