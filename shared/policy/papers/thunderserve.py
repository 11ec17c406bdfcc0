"""ThunderServe (heterogeneous GPUs in the cloud): requests by the shares of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, ClassVar, NamedTuple

from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.dispatch import Choice, Figures
from shared.policy.index import ClusterIndex, InstanceIds, context_of, usable
from shared.policy.ledger import pair_key
from shared.policy.placement import LeastLoad


class PlanRoute(NamedTuple):
    """A pair of instances and its share of the jobs, relative to the other pairs' shares. Without `prefill` the decode
    instance computes whole jobs.
    """

    prefill: str
    decode: str
    share: float


@dataclass(frozen=True, slots=True)
class PlanRoutes:
    """The pair whose turn it is by the shares of the plan; the decode instance is fixed, too.

    Pairs that are not ready have no turn, and their share goes to the others in proportion. While no pair can take the
    job, the least loaded candidate does.
    Source: ThunderServe 3.3 for routes as shares of pairs. Ours: the order of the turns (`ledger.Rotation`).
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

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice | None:
        ready, weights = index.cached(self, lambda: self._ready(index))
        for key in index.ledger.rotation(self.name, weights).order():
            route = ready[key]
            prefill, decode = index.prefill.get(route.prefill), index.decode.get(route.decode)
            if decode is None or not usable(decode, context_of(job, Role.DECODE), exclude):
                continue
            figures: Figures = {"prefill": route.prefill, "decode": route.decode, "share": route.share}
            reasons = (Reason("placement:plan", figures),)
            if not route.prefill:
                return Choice(decode, reasons)
            if prefill is not None and usable(prefill, context_of(job, Role.PREFILL), exclude):
                return Choice(prefill, reasons, decode)
        instead = LeastLoad().choose(job, index, exclude, now, rng)
        if instead is None:
            return None
        why = Reason("placement:plan, none of its routes can take the job", {"ready_routes": len(ready)})
        return Choice(instead.instance, (why, *instead.reasons))

    def _ready(self, index: ClusterIndex) -> tuple[Mapping[str, PlanRoute], Mapping[str, float]]:
        """The routes whose instances are ready, and their shares, by pair."""
        ready = {
            pair_key(route.prefill, route.decode): route
            for route in self.routes
            if index.decode.get(route.decode) and (not route.prefill or index.prefill.get(route.prefill))
        }
        return ready, {key: route.share for key, route in ready.items()}


def parse_routes(where: str, value: Any) -> tuple[PlanRoute, ...]:
    """Routes from JSON: a list of [prefill id or "", decode id, share]. Raises InvalidRequest."""
    routes = []
    for row in value if isinstance(value, list | tuple) else [value]:
        match row:
            case [str(prefill), str(decode), int() | float() as share] if not isinstance(share, bool):
                routes.append(PlanRoute(prefill, decode, float(share)))
            case _:
                raise InvalidRequest(f"{where} must list [prefill, decode, share], not {row!r}")
    return tuple(routes)
