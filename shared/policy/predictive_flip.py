"""The policy `predictive`: it compares the outlooks of a few assignments of roles. Seconds and tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from shared.domain.demand import Demand, RolesWanted
from shared.domain.instance import ClusterView, InstanceView, Role
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.outlook import Outlook, RoleCounts, classify, outlook
from shared.policy.role_flip import FlipContext, FlipDecision, FlipHistory, draining, load_share, ready_by_role

STEPS = 8  # assignments that are tried in either direction
DRAINS = 2.0  # mean answers that a drain lasts: the longest answer counts


@dataclass(frozen=True, slots=True)
class PredictiveFlip:
    """The roles that would serve the demand best, one flip at a time.

    In either direction (more instances for prefill, or for decode), outlooks are predicted for ever more flips, each of
    the class that helps most. The first flip towards the best of them is decided when its SLO cost has been less than
    now by `gain` for `for_s`. The cost of the drains is spread over `horizon_s`, for which the new roles are expected
    to stay. There are at most `most` flips in `per_s`, `cooldown_s` apart; without a shift of the demand, a flip in the
    opposite direction waits for `turn_s`. No instance flips while another drains.
    Source: ours, after ThunderServe 3.4 (when a shift is seen, roles change but no model is loaded again).
    """

    name: ClassVar[str] = "predictive"
    gain: float = 0.1
    for_s: float = 2.0
    horizon_s: float = 60.0
    most: int = 4
    per_s: float = 60.0
    cooldown_s: float = 2.0
    turn_s: float = 120.0

    def __post_init__(self) -> None:
        if self.gain <= 0.0 or self.horizon_s <= 0.0 or self.most < 1:
            raise InvalidRequest("predictive: gain and horizon_s must be positive, most at least 1")
        if min(self.for_s, self.per_s, self.cooldown_s, self.turn_s) < 0.0:
            raise InvalidRequest("predictive: for_s, per_s, cooldown_s and turn_s must not be negative")

    def propose(self, view: ClusterView, now: float, history: FlipHistory, context: FlipContext) -> FlipDecision | None:
        if context.demand is not None and draining(view):
            return None  # conditions that held before the drain go on holding
        fleet = _Fleet.from_view(view, context)
        today = fleet.outlook() if fleet is not None else None
        plan = self._best(fleet, today) if fleet is not None and today is not None else None
        if fleet is None or today is None or plan is None or not self._allowed(history, plan.to, fleet.demand, now):
            history.hold((), now)
            return None
        to = plan.to
        if now - history.hold((to.value,), now)[to.value] < self.for_s:
            return None
        history.hold((), now)
        history.flips.append((now, to))
        reasons = (*_reasons(fleet.demand, today, plan), Reason("considered", fleet.considered(to)))
        return FlipDecision(fleet.least_loaded(to, plan.first).instance_id, to, reasons)

    def wanted(self, view: ClusterView, context: FlipContext) -> RolesWanted | None:
        """The roles that it would choose without limits on flips and time; None while that is not known."""
        fleet = _Fleet.from_view(view, context)
        if fleet is None:
            return None
        today = fleet.outlook()
        plan = self._best(fleet, today)
        more = 0 if plan is None else plan.flips if plan.to is Role.PREFILL else -plan.flips
        prefill, decode = (len(fleet.ready[role]) for role in Role)
        return RolesWanted(prefill + more, decode - more, today.slo_cost, (plan.then if plan else today).slo_cost)

    def _best(self, fleet: "_Fleet", today: Outlook) -> "_Plan | None":
        """The plan with the least SLO cost, its drains included, if that is less than now by more than `gain`."""
        if today.slo_cost <= self.gain:
            return None
        plans = (plan for to in Role for plan in fleet.plans(to, today))
        best = min(plans, key=lambda plan: plan.slo_cost(self.horizon_s, today), default=None)
        return best if best is not None and today.slo_cost - best.slo_cost(self.horizon_s, today) > self.gain else None

    def _allowed(self, history: FlipHistory, to: Role, demand: Demand, now: float) -> bool:
        """Whether the number of flips, the cool-down and the direction of the last flip allow one."""
        if not history.flips:
            return True
        last_s, last_to = history.flips[-1]
        if now - last_s < self.cooldown_s or sum(now - at < self.per_s for at, _ in history.flips) >= self.most:
            return False
        shifted = demand.shift is not None and now - demand.age_s > last_s
        return to is last_to or shifted or now - last_s >= self.turn_s


class _Plan(NamedTuple):
    """`flips` flips towards a role, the first of them of the class `first`; the outlook then, and during the first
    drain.
    """

    to: Role
    flips: int
    first: int
    then: Outlook
    during_drain: Outlook
    drain_s: float

    def slo_cost(self, horizon_s: float, today: Outlook) -> float:
        """Of the roles then, and of the drains until then."""
        worse = max(0.0, self.during_drain.slo_cost - today.slo_cost)
        return self.then.slo_cost + worse * min(1.0, self.flips * self.drain_s / horizon_s)


class _Fleet:
    """Ready instances by class, those of them that may be flipped, and the demand that they serve."""

    def __init__(self, demand: Demand, ready: Mapping[Role, Sequence[InstanceView]], context: FlipContext) -> None:
        self.demand, self.ready = demand, ready
        views = [view for of_role in ready.values() for view in of_role]
        self._classes, self._class_of = classify(views)
        self._roles = RoleCounts.from_views(views, self._class_of, len(self._classes))
        self._candidates = context.candidates(ready)

    @classmethod
    def from_view(cls, view: ClusterView, context: FlipContext) -> "_Fleet | None":
        """None while the demand is not known or a role has no ready instance."""
        ready = ready_by_role(view)
        return cls(context.demand, ready, context) if context.demand is not None and all(ready.values()) else None

    def outlook(self, roles: RoleCounts | None = None) -> Outlook:
        return outlook(self.demand, self._classes, roles or self._roles)

    def plans(self, to: Role, today: Outlook) -> Iterator[_Plan]:
        """Plans of ever more flips towards a role, each of the class that helps most."""
        free, giver = self._free_by_class(to), to.other
        size = max(1, -(-min(sum(free), len(self.ready[giver]) - 1) // STEPS))
        roles, first, flips, during_drain = self._roles, -1, 0, today
        drain_s = DRAINS * self.demand.output_tokens * today.tpot_s if giver is Role.DECODE else today.ttft_s
        while sum(free) and sum(roles.counts(giver)) > 1:
            moved = {
                number: self._moved(roles, to, number, size, free)
                for number, n in enumerate(free)
                if n and roles.counts(giver)[number]
            }
            if not moved:
                return
            outlooks = {number: self.outlook(after) for number, (after, _) in moved.items()}
            best = min(outlooks, key=lambda number: outlooks[number].slo_cost)
            roles, count = moved[best]
            free[best] -= count
            if first < 0:
                first = best
                during_drain = self.outlook(self._roles.plus(giver, best, -1))
            flips += count
            yield _Plan(to, flips, first, outlooks[best], during_drain, drain_s)

    def least_loaded(self, to: Role, number: int) -> InstanceView:
        """The candidate of a class with the least load."""
        free = [view for view in self._candidates[to.other] if self._class_of[view.instance_id] == number]
        return min(free, key=lambda view: (load_share(view), view.load.inflight, view.instance_id))

    def considered(self, to: Role) -> dict[str, float | str]:
        """Of each class that may flip, an instance, and the SLO cost with it in the other role."""
        found: dict[str, float | str] = {}
        free = self._free_by_class(to)
        for number in (number for number, n in enumerate(free) if n):
            roles, _ = self._moved(self._roles, to, number, 1, free)
            found[self.least_loaded(to, number).instance_id] = round(self.outlook(roles).slo_cost, 4)
        return found

    def _moved(
        self, roles: RoleCounts, to: Role, number: int, size: int, free: Sequence[int]
    ) -> tuple[RoleCounts, int]:
        """The roles with up to `size` more of a class in the role, at least one left in the other; and their number."""
        giving = roles.counts(to.other)
        count = min(size, free[number], giving[number], sum(giving) - 1)
        return roles.plus(to.other, number, -count).plus(to, number, count), count

    def _free_by_class(self, to: Role) -> list[int]:
        counts = [0] * len(self._classes)
        for view in self._candidates[to.other]:
            counts[self._class_of[view.instance_id]] += 1
        return counts


def _reasons(demand: Demand, today: Outlook, plan: _Plan) -> tuple[Reason, ...]:
    """The demand, its last shift, and the outlooks."""
    predicted: dict[str, float | str] = {
        "harm": round(today.slo_cost, 4),
        "harm_then": round(plan.then.slo_cost, 4),
        "flips_planned": plan.flips,
        "ttft_s": round(today.ttft_s, 3),
        "ttft_then_s": round(plan.then.ttft_s, 3),
        "tpot_s": round(today.tpot_s, 4),
        "tpot_then_s": round(plan.then.tpot_s, 4),
        "prefill_use": round(today.prefill_use, 3),
        "decode_use": round(today.decode_use, 3),
    }
    requests: dict[str, float | str] = {
        "rate_per_s": round(demand.rate, 3),
        "prompt_tokens": round(demand.prompt_tokens, 1),
        "output_tokens": round(demand.output_tokens, 1),
        "requests": demand.requests,
    }
    reasons = (Reason("role_flip:predictive", predicted), Reason("demand", requests))
    shift = demand.shift
    if shift is None:
        return reasons
    shifted: dict[str, float | str] = {
        "what": shift.what,
        "before": round(shift.before, 2),
        "after": round(shift.after, 2),
        "noticed_after_s": shift.noticed_s,
    }
    return (*reasons, Reason("shift", shifted))
