"""Placement by a plan: pairs of instances, each with its share of the jobs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, ClassVar, NamedTuple

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.choice import Choice, context_of, usable
from shared.policy.index import ClusterIndex
from shared.policy.ledger import pair_key
from shared.policy.placement import LeastLoad


class PlanRoute(NamedTuple):
    """A pair and its share of the jobs, relative to the others'. Without `prefill` the decode instance does it all."""

    prefill: str
    decode: str
    share: float


@dataclass(frozen=True, slots=True)
class PlanRoutes:
    """The pair whose turn it is by the shares of the plan; the decode instance is bound, too.

    Pairs that are not ready have no turn, and their share goes to the others in proportion. While no pair can take the
    job, the least loaded candidate does.
    Source: ThunderServe 3.3 for routes as shares of pairs. F: the order of the turns (see `ledger.Rotation`).
    """

    name: ClassVar[str] = "plan"
    routes: tuple[PlanRoute, ...] = ()

    def __post_init__(self) -> None:
        keys = {pair_key(route.prefill, route.decode) for route in self.routes}
        if len(keys) < len(self.routes):
            raise InvalidRequest("plan: a pair of instances is listed twice")
        for route in self.routes:
            if not (0.0 < route.share < inf and route.decode):
                raise InvalidRequest(f"plan: a route needs a decode instance and a positive share: {list(route)}")

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        ready, weights = index.cached(self, lambda: _ready(self.routes, index))
        for key in index.ledger.rotation(self.name, weights).order():
            chosen = _choice(ready[key], job, index, exclude)
            if chosen is not None:
                return chosen
        instead = LeastLoad().choose(job, index, exclude, now, rng)
        if instead is None:
            return None
        why = Reason("placement:plan, none of its routes can take the job", {"ready_routes": len(ready)})
        return Choice(instead.instance, (why, *instead.reasons))


def parse_routes(where: str, value: Any) -> tuple[PlanRoute, ...]:
    """Routes from JSON: a list of [prefill id or "", decode id, share]. Raises InvalidRequest."""
    rows = value if isinstance(value, list | tuple) else [value]
    routes = []
    for row in rows:
        if not (isinstance(row, list | tuple) and len(row) == 3):
            raise InvalidRequest(f"{where} must list [prefill, decode, share], not {row!r}")
        prefill, decode, share = row
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not (isinstance(prefill, str) and isinstance(decode, str) and number):
            raise InvalidRequest(f"{where} must list [prefill, decode, share], not {row!r}")
        routes.append(PlanRoute(prefill, decode, float(share)))
    return tuple(routes)


def _ready(routes: tuple[PlanRoute, ...], index: ClusterIndex) -> tuple[Mapping[str, PlanRoute], Mapping[str, float]]:
    """Routes whose instances are ready, and their shares, by pair."""
    ready = {
        pair_key(route.prefill, route.decode): route
        for route in routes
        if index.decode.get(route.decode) and (not route.prefill or index.prefill.get(route.prefill))
    }
    return ready, {key: route.share for key, route in ready.items()}


def _choice(route: PlanRoute, job: JobView, index: ClusterIndex, exclude: Collection[str]) -> Choice | None:
    decode = _usable(index.decode.get(route.decode), job, Role.DECODE, exclude)
    if decode is None:
        return None
    figures: dict[str, float | str] = {"prefill": route.prefill, "decode": route.decode, "share": route.share}
    reasons = (Reason("placement:plan", figures),)
    if not route.prefill:
        return Choice(decode, reasons)
    prefill = _usable(index.prefill.get(route.prefill), job, Role.PREFILL, exclude)
    return Choice(prefill, reasons, decode) if prefill else None


def _usable(view: InstanceView | None, job: JobView, role: Role, exclude: Collection[str]) -> InstanceView | None:
    return view if view is not None and usable(view, context_of(job, role), exclude) else None
