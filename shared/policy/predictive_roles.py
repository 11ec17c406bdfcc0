"""Role flips by what the fleet would do to what clients ask for, with the roles as they are and with others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from shared.domain.demand import Demand, RolesWanted
from shared.domain.instance import ClusterView, InstanceView, Role
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.role_flip import NOTHING, FlipDecision, FlipState, Seen, draining, load_share, ready_by_role
from shared.policy.role_harm import Counts, Outlook, Roles, Sort, outlook, roles_of, sorted_out

STEPS = 8  # assignments that are looked at in either direction
DRAINS = 2.0  # a drain lasts so many mean answers: the longest one counts


@dataclass(frozen=True, slots=True)
class PredictiveFlip:
    """The roles that would serve the demand best, one flip at a time.

    Along either direction (more instances for prefill, or for decode) the harm of the roles is predicted, each time
    with the sort of instance that helps most (`role_harm`). The first flip towards the best of them is decided when it
    is better than now by `gain`, and that for `for_s`; harm counts the share of requests that miss a target. What the
    drains cost is spread over `horizon_s`, for which the new roles are taken to stay. At most `most` flips in `per_s`,
    `cooldown_s` apart; back to what it came from, without a shift since, only after `turn_s`. Never the last ready
    instance of a role, never while another drains, never against a person.
    Source: ours, after ThunderServe 3.4 (only roles are rescheduled, no model is loaded again, when a shift is seen).
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

    def start(self) -> FlipState:
        """See `RoleFlip`."""
        return FlipState()

    def step(
        self, state: FlipState, view: ClusterView, now: float, seen: Seen = NOTHING
    ) -> tuple[FlipState, FlipDecision | None]:
        """See `RoleFlip`."""
        demand, held = seen.demand, FlipState({}, state.made)
        if demand is None:
            return held, None
        if draining(view):
            return state, None
        fleet = _Fleet(view, seen)
        if not all(fleet.ready.values()):
            return held, None
        today = outlook(demand, fleet.sorts, fleet.roles)
        plan = self._best(demand, fleet, today) if today.harm > self.gain else None
        if plan is None or not self._allowed(state, plan.to, demand, now):
            return held, None
        since = {plan.to.value: state.since.get(plan.to.value, now)}
        if now - since[plan.to.value] < self.for_s:
            return FlipState(since, state.made), None
        chosen = fleet.least_loaded(plan.to, plan.first)
        reasons = (*_reasons(demand, today, plan), Reason("considered", fleet.considered(demand, plan.to)))
        return state.flipped(plan.to, now, {}), FlipDecision(chosen.instance_id, plan.to, reasons)

    def wanted(self, view: ClusterView, seen: Seen) -> RolesWanted | None:
        """The roles that it would go for, whatever its budget and its patience; None while it cannot tell."""
        fleet = _Fleet(view, seen)
        if seen.demand is None or not all(fleet.ready.values()):
            return None
        today = outlook(seen.demand, fleet.sorts, fleet.roles)
        plan = self._best(seen.demand, fleet, today) if today.harm > self.gain else None
        more = 0 if plan is None else plan.flips if plan.to is Role.PREFILL else -plan.flips
        prefill, decode = (len(fleet.ready[role]) for role in Role)
        return RolesWanted(prefill + more, decode - more, today.harm, (plan.then if plan else today).harm)

    def _best(self, demand: Demand, fleet: "_Fleet", today: Outlook) -> "_Plan | None":
        """The plan with the least harm, if it is better than now by enough, its drains included."""
        found: _Plan | None = None
        for to in Role:
            for plan in fleet.plans(demand, to, today):
                if found is None or plan.harm(self.horizon_s, today) < found.harm(self.horizon_s, today):
                    found = plan
        return found if found is not None and today.harm - found.harm(self.horizon_s, today) > self.gain else None

    def _allowed(self, state: FlipState, to: Role, demand: Demand, now: float) -> bool:
        """Budget, cool-down, and no turning back without a reason."""
        if not state.made:
            return True
        last_s, last_to = state.made[-1]
        if now - last_s < self.cooldown_s or sum(now - at < self.per_s for at, _ in state.made) >= self.most:
            return False
        shifted = demand.shift is not None and now - demand.age_s > last_s
        return to is last_to or shifted or now - last_s >= self.turn_s


class _Plan(NamedTuple):
    """`flips` flips towards a role, the first of them of the sort `first`; what it would be then, and what the first
    drain makes of it meanwhile.
    """

    to: Role
    flips: int
    first: int
    then: Outlook
    meanwhile: Outlook
    drain_s: float

    def harm(self, horizon_s: float, today: Outlook) -> float:
        """Of the roles then, and of what the drains do until then."""
        worse = max(0.0, self.meanwhile.harm - today.harm)
        return self.then.harm + worse * min(1.0, self.flips * self.drain_s / horizon_s)


class _Fleet:
    """Ready instances by sort, and those of them that may be flipped."""

    def __init__(self, view: ClusterView, seen: Seen) -> None:
        self.ready = ready_by_role(view)
        everyone = [one for views in self.ready.values() for one in views]
        self.sorts: Sequence[Sort]
        self.sorts, self._of = sorted_out(everyone)
        self.roles = self._counts(self.ready)
        self._free = {to: [one for one in self.ready[to.other] if seen.may_flip(one)] for to in Role}

    def plans(self, demand: Demand, to: Role, today: Outlook) -> Iterator[_Plan]:
        """Ever more flips towards a role, each time of the sort that helps most."""
        free = self._by_sort(self._free[to])
        left, giver = sum(free), to.other
        size = max(1, -(-min(left, len(self.ready[giver]) - 1) // STEPS))
        roles, first, flips, meanwhile = self.roles, -1, 0, today
        drain_s = DRAINS * demand.output_tokens * today.tpot_s if giver is Role.DECODE else today.ttft_s
        while sum(free) and sum(_side(roles, giver)) > 1:
            ways = [at for at, n in enumerate(free) if n and _side(roles, giver)[at]]
            scored = {at: self._moved(roles, to, at, size, free) for at in ways}
            if not scored:
                return
            outlooks = {at: outlook(demand, self.sorts, after) for at, (after, _) in scored.items()}
            best = min(ways, key=lambda at: outlooks[at].harm)
            roles, moved = scored[best]
            free = [n - moved * (at == best) for at, n in enumerate(free)]
            if first < 0:
                first = best
                meanwhile = outlook(demand, self.sorts, _without(self.roles, giver, best))
            flips += moved
            yield _Plan(to, flips, first, outlooks[best], meanwhile, drain_s)

    def least_loaded(self, to: Role, sort: int) -> InstanceView:
        """The instance of a sort that is through with its work first."""
        free = [one for one in self._free[to] if self._of[one.instance_id] == sort]
        return min(free, key=lambda one: (load_share(one), one.load.inflight, one.instance_id))

    def considered(self, demand: Demand, to: Role) -> dict[str, float | str]:
        """Of each sort that could give one, the instance, and the harm with it in the other role."""
        found: dict[str, float | str] = {}
        free = self._by_sort(self._free[to])
        for at in (at for at, n in enumerate(free) if n):
            roles, _ = self._moved(self.roles, to, at, 1, free)
            found[self.least_loaded(to, at).instance_id] = round(outlook(demand, self.sorts, roles).harm, 4)
        return found

    def _moved(self, roles: Roles, to: Role, sort: int, size: int, free: Sequence[int]) -> tuple[Roles, int]:
        """With up to `size` more of a sort in the role, but one left in the other; and how many they are."""
        giving = _side(roles, to.other)
        moved = min(size, free[sort], giving[sort], sum(giving) - 1)
        down, up = _changed(giving, sort, -moved), _changed(_side(roles, to), sort, moved)
        return (Roles(up, down) if to is Role.PREFILL else Roles(down, up)), moved

    def _counts(self, ready: Mapping[Role, Sequence[InstanceView]]) -> Roles:
        views = {True: ready[Role.PREFILL], False: ready[Role.DECODE]}
        return roles_of(views, self._of, len(self.sorts))

    def _by_sort(self, views: Sequence[InstanceView]) -> list[int]:
        counts = [0] * len(self.sorts)
        for one in views:
            counts[self._of[one.instance_id]] += 1
        return counts


def _side(roles: Roles, role: Role) -> Counts:
    return roles.prefills if role is Role.PREFILL else roles.decodes


def _without(roles: Roles, role: Role, sort: int) -> Roles:
    fewer = _changed(_side(roles, role), sort, -1)
    return roles._replace(prefills=fewer) if role is Role.PREFILL else roles._replace(decodes=fewer)


def _changed(counts: Counts, sort: int, by: int) -> Counts:
    return tuple(n + by * (at == sort) for at, n in enumerate(counts))


def _reasons(demand: Demand, today: Outlook, plan: _Plan) -> tuple[Reason, ...]:
    """What is asked for and since when, and what was predicted of it."""
    predicted: dict[str, float | str] = {
        "harm": round(today.harm, 4),
        "harm_then": round(plan.then.harm, 4),
        "flips_planned": plan.flips,
        "ttft_s": round(today.ttft_s, 3),
        "ttft_then_s": round(plan.then.ttft_s, 3),
        "tpot_s": round(today.tpot_s, 4),
        "tpot_then_s": round(plan.then.tpot_s, 4),
        "prefill_use": round(today.prefill_use, 3),
        "decode_use": round(today.decode_use, 3),
    }
    asked: dict[str, float | str] = {
        "rate_per_s": round(demand.rate, 3),
        "prompt_tokens": round(demand.prompt_tokens, 1),
        "output_tokens": round(demand.output_tokens, 1),
        "requests": demand.requests,
    }
    reasons = (Reason("role_flip:predictive", predicted), Reason("demand", asked))
    shift = demand.shift
    if shift is None:
        return reasons
    told: dict[str, float | str] = {
        "what": shift.what,
        "before": round(shift.before, 2),
        "after": round(shift.after, 2),
        "noticed_after_s": shift.noticed_s,
    }
    return (*reasons, Reason("shift", told))
