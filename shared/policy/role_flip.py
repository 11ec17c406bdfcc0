"""Role flips: which instance changes its role, and when.

The caller asks a policy at regular intervals and carries a decision out: drain, then flip. A decision counts as a flip
whether or not it succeeds; after a failure, the conditions of a flip have to hold again for their full time.

`outlook` predicts how a fleet with given roles serves a demand, by queueing formulas over learned step times. Instances
that are about alike make a sort, and roles are counts of each sort, so that the cost does not grow with the fleet.
Prefill instances are one queue with several servers of unlike speed; a decode instance shares its time among its
decodes and the prompts that it computes beside them. `PredictiveFlip` compares the outlooks of a few assignments of
roles. Seconds and tokens.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2, sqrt
from typing import ClassVar, NamedTuple, Protocol

from shared.domain.demand import Demand, RolesWanted
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.domain.rates import UNKNOWN_STEPS, StepRates
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.estimate import ENDLESS, miss_probability
from shared.policy.index import speed_class

REMEMBERED = 32  # flips


@dataclass(slots=True)
class FlipHistory:
    """What a policy has seen before. since: when each condition that holds began to hold, by its name. flips: the last
    ones, newest last, with the role that each led to. Times are on the clock of `now`.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    flips: deque[tuple[float, Role]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def hold(self, conditions: Iterable[str], now: float) -> Mapping[str, float]:
        """Note which conditions hold now; returns since when each of them holds."""
        self.since = {name: self.since.get(name, now) for name in conditions}
        return self.since


@dataclass(frozen=True, slots=True)
class FlipContext:
    """What a policy may know besides the loads.

    demand: the clients' requests; None while it is not known. kept: instances whose role an operator has set and which
    policies may not flip yet. barred: roles that policies may not give yet, because an operator has just done the
    opposite.
    """

    demand: Demand | None = None
    kept: frozenset[str] = frozenset()
    barred: frozenset[Role] = frozenset()

    @classmethod
    def after_orders(
        cls, demand: Demand | None, ordered: Iterable[tuple[float, str, Role]], now: float, hold_s: float
    ) -> "FlipContext":
        """With the flips of operators (time, instance and new role), each of which binds policies for `hold_s`."""
        held = [(instance_id, to) for at, instance_id, to in ordered if now - at < hold_s]
        return cls(demand, frozenset(one for one, _ in held), frozenset(to.other for _, to in held))

    def may_flip(self, view: InstanceView) -> bool:
        """Whether no flip of an operator forbids it."""
        return view.instance_id not in self.kept and view.role.other not in self.barred


@dataclass(frozen=True, slots=True)
class FlipDecision:
    """An instance, its new role, and why."""

    instance_id: str
    to: Role
    reasons: tuple[Reason, ...] = ()


class RoleFlip(Protocol):
    """Proposes at most one flip at a time. `now` is in seconds and does not decrease from call to call.

    The policy updates `history`, which belongs to the caller: one for each cluster that the policy watches.
    """

    name: ClassVar[str]

    def propose(
        self, view: ClusterView, now: float, history: FlipHistory, context: FlipContext
    ) -> FlipDecision | None: ...


@dataclass(frozen=True, slots=True)
class NoFlip:
    """Only operators flip roles."""

    name: ClassVar[str] = "off"

    def propose(self, view: ClusterView, now: float, history: FlipHistory, context: FlipContext) -> FlipDecision | None:
        return None


def load_share(view: InstanceView) -> float:
    """The used share of an instance, 0..1: of its KV; on a prefill instance also of one chunk by queued prompt tokens,
    whichever is more.
    """
    load, info = view.load, view.info
    # The numbers come from another process: a wrong count of blocks must not lead to a share outside 0..1.
    used = min(1.0, max(0.0, load.kv_used_share(info.total_blocks)))
    if view.role is Role.DECODE:
        return used
    return max(used, min(1.0, load.queued_prefill_tokens / max(1, info.chunk_size)))


def ready_by_role(view: ClusterView) -> dict[Role, tuple[InstanceView, ...]]:
    return {role: view.ready(role) for role in Role}


def draining(view: ClusterView) -> bool:
    return any(v.state is InstanceState.DRAINING for v in view.instances)


HORIZON_S = 30.0  # work beyond the capacity waits as if it had accumulated for this long
SLOWNESS = 0.02  # cost of each target's length of time; small, so that roles change only for requests that miss
FULL = 0.97  # utilisation beyond which a queue grows without bound
TRIED = 5  # shares of the prompts computed by prefill instances that are tried, least and most included
HALVINGS = 14
# Gauss-Laguerre with two points: the mean of a function over exponential waits.
WAITS = ((2.0 - sqrt(2.0), (2.0 + sqrt(2.0)) / 4.0), (2.0 + sqrt(2.0), (2.0 - sqrt(2.0)) / 4.0))

Counts = tuple[int, ...]  # of each sort


class Sort(NamedTuple):
    """Instances that are about alike; the figures are those of one of them."""

    rates: StepRates
    chunk: int
    seats: int
    kv_tokens: int
    token_move_s: float  # KV of a token over its link


class Roles(NamedTuple):
    """How many of each sort compute prompts, and how many decode."""

    prefills: Counts
    decodes: Counts

    @classmethod
    def from_views(cls, views: Iterable[InstanceView], sort_of: Mapping[str, int], sorts: int) -> "Roles":
        counts = {role: [0] * sorts for role in Role}
        for view in views:
            counts[view.role][sort_of[view.instance_id]] += 1
        return cls(tuple(counts[Role.PREFILL]), tuple(counts[Role.DECODE]))

    def of(self, role: Role) -> Counts:
        return self.prefills if role is Role.PREFILL else self.decodes

    def plus(self, role: Role, sort: int, count: int) -> "Roles":
        """With `count` more instances of a sort in a role."""
        counts = tuple(n + count * (at == sort) for at, n in enumerate(self.of(role)))
        return self._replace(prefills=counts) if role is Role.PREFILL else self._replace(decodes=counts)


class Outlook(NamedTuple):
    """How a demand would be served. slo_cost: the expected share of requests that miss a target, and a little for being
    slow.

    ttft_s, tpot_s: means. prefill_use, decode_use: utilisation of either role. share: of the prompts, computed by
    prefill instances.
    """

    slo_cost: float
    ttft_s: float
    tpot_s: float
    prefill_use: float
    decode_use: float
    share: float


def sorted_out(views: Iterable[InstanceView]) -> tuple[list[Sort], dict[str, int]]:
    """The sorts, and the sort of each instance by its id. Speeds within about ten per cent count as alike."""
    sorts: list[Sort] = []
    keys: dict[tuple[float, ...], int] = {}
    of: dict[str, int] = {}
    for view in views:
        info = view.info
        steps, chunk, link = info.rates.step or UNKNOWN_STEPS, max(1, info.chunk_size), info.rates.link
        seats, kv_tokens = info.max_seqs or ENDLESS, max(1, info.total_blocks * info.block_size)
        speeds = steps.prefill_s(chunk, 0) / chunk, steps.decode_s(1, 0), steps.decode_s(64, 64_000)
        key = (*(speed_class(max(1e-12, one)) for one in speeds), chunk, seats, round(4 * log2(kv_tokens)))
        if key not in keys:
            keys[key] = len(sorts)
            moves_s = info.kv_bytes_per_token / link.bytes_s if link is not None else 0.0
            sorts.append(Sort(steps, chunk, seats, kv_tokens, moves_s))
        of[info.instance_id] = keys[key]
    return sorts, of


def outlook(demand: Demand, sorts: Sequence[Sort], roles: Roles) -> Outlook:
    """The best outlook over the shares of prompts on prefill instances that the split policy in force allows."""
    least, most = demand.split_least, demand.split_most
    tried = 1 if most - least < 1e-6 else TRIED
    shares = [least + (most - least) * at / max(1, tried - 1) for at in range(tried)]
    prefill = _PrefillSide.of(demand, sorts, roles.prefills)
    outlooks = (_with_share(demand, sorts, roles.decodes, prefill, share) for share in shares)
    return min(outlooks, key=lambda one: one.slo_cost)


class _PrefillSide(NamedTuple):
    """servers: prefill instances. capacity: prompts a second of all. service_s: of one prompt, on average."""

    servers: int
    capacity: float
    service_s: float

    @classmethod
    def of(cls, demand: Demand, sorts: Sequence[Sort], counts: Counts) -> "_PrefillSide":
        servers = sum(counts)
        capacity = sum(n / _alone_s(demand, sort) for sort, n in zip(sorts, counts, strict=True) if n)
        return cls(servers, capacity, servers / capacity if servers else 0.0)


def _alone_s(demand: Demand, sort: Sort) -> float:
    """Seconds of a prompt on a prefill instance; one below half a chunk shares its step with others."""
    form, fresh = sort.rates.prefill, demand.fresh_tokens
    steps = max(fresh / sort.chunk, 0.5)
    return form.fixed_s * steps + fresh * form.token_s + form.position_s * demand.fresh_squares / 2.0


def _with_share(demand: Demand, sorts: Sequence[Sort], decodes: Counts, prefill: _PrefillSide, share: float) -> Outlook:
    first_cost = first_s = use = 0.0
    if share > 0.0:
        use = share * demand.rate / prefill.capacity if prefill.servers else 2.0
        wait_s = _wait_s(use, prefill.servers, prefill.service_s, demand)
        first_cost = share * _first_token_cost(demand, wait_s, prefill.service_s)
        first_s = share * (wait_s + prefill.service_s)
    decode = _decode(demand, sorts, decodes, share)
    if share < 1.0:
        first_cost += (1.0 - share) * _first_token_cost(demand, decode.wait_s, decode.service_s)
        first_s += (1.0 - share) * (decode.wait_s + decode.service_s)
    cost = first_cost + decode.slo_cost
    return Outlook(cost, first_s, decode.tpot_s, use, decode.use, share)


def _first_token_cost(demand: Demand, wait_s: float, service_s: float) -> float:
    """Cost of TTFT, over exponential waits and prompts one standard deviation shorter and longer than the mean."""
    spread = _variation(demand)
    return sum(
        weight / 2.0 * _cost((wait_s * wait + service_s * max(0.0, 1.0 + side * spread)) / demand.ttft_s)
        for wait, weight in WAITS
        for side in (-1.0, 1.0)
    )


def _cost(share: float) -> float:
    return miss_probability(share) + SLOWNESS * share


def _variation(demand: Demand) -> float:
    """Of prompt lengths: standard deviation over mean."""
    return sqrt(max(0.0, demand.fresh_squares / max(1.0, demand.fresh_tokens) ** 2 - 1.0))


def _wait_s(use: float, servers: int, service_s: float, demand: Demand) -> float:
    """Mean wait in a queue with several servers; beyond `FULL` it grows with time.

    Source: Sakasegawa's approximation for M/M/c, with Kingman's factor for arrivals and services that are not
    exponential ((C_a^2 + C_s^2)/2); service times are taken to vary as prompt lengths do.
    """
    if not servers:
        return HORIZON_S
    settled = min(use, FULL)
    varies = (demand.burstiness + _variation(demand) ** 2) / 2.0
    wait_s = varies * settled ** (sqrt(2.0 * (servers + 1.0)) - 1.0) / (servers * (1.0 - settled)) * service_s
    return wait_s + max(0.0, use - FULL) / use * HORIZON_S if use > 0.0 else 0.0


class _Decode(NamedTuple):
    slo_cost: float
    tpot_s: float
    use: float
    wait_s: float  # of a prompt that a decode instance computes
    service_s: float


class _Shared(NamedTuple):
    """One sort of decode instances beside which prompts are computed: a step takes (fixed_s + each_s * b) / left."""

    instances: int
    fixed_s: float
    each_s: float
    left: float  # the share of its time that prompts leave
    most: float  # decodes at once, by seats and KV room
    prompt_s: float  # the prompt itself, beside the decodes: what its tokens add
    chunks: float  # steps that it takes

    def rate(self, step_s: float, output: float) -> float:
        """Requests a second of one instance whose steps take so long, as far as seats and memory allow."""
        batch = min(self.most, max(0.0, (step_s * self.left - self.fixed_s) / self.each_s))
        longest_s = (self.fixed_s + self.each_s * batch) / self.left
        return batch / (output * longest_s)


def _decode(demand: Demand, sorts: Sequence[Sort], counts: Counts, share: float) -> _Decode:
    """All decode instances, each with as many requests as make their steps equally long (Little's law)."""
    local = (1.0 - share) * demand.rate
    sides = [_shared(demand, sort, n) for sort, n in zip(sorts, counts, strict=True) if n]
    speed = sum(one.instances / one.prompt_s for one in sides)  # prompts a second, if they did nothing else
    taken = local / speed if sides else 1.0
    if taken >= FULL:
        over = taken / FULL
        return _Decode(1.0 + _cost(over), HORIZON_S / demand.output_tokens * over, over, HORIZON_S, HORIZON_S)
    sides = [one._replace(left=1.0 - taken) for one in sides]
    output = demand.output_tokens
    capacity = sum(one.instances * one.rate(1e3, output) for one in sides)
    # The number of requests that decode at once varies as arrivals do over the time of an answer.
    stays_s = output * min(demand.tpot_s, _step_s(sides, min(demand.rate, FULL * capacity), output))
    spread = min(0.5, sqrt(demand.burstiness / max(1.0, demand.rate * stays_s)))
    moves_s = share * demand.prompt_tokens * max(sort.token_move_s for sort, n in zip(sorts, counts, strict=True) if n)
    cost = tpot_s = 0.0
    for side in (-spread, spread):
        rate = demand.rate * (1.0 + side)
        step_s = _step_s(sides, min(rate, FULL * capacity), output)
        late_s = max(0.0, rate / capacity - FULL) * HORIZON_S
        token_s = step_s + (late_s + moves_s) / output
        cost += _cost(token_s / demand.tpot_s) / 2.0
        tpot_s += token_s / 2.0
    busy = sum(one.instances * one.chunks / one.prompt_s for one in sides) / speed  # steps a prompt
    service_s = busy * tpot_s + speed**-1 * sum(one.instances for one in sides)
    servers = sum(one.instances for one in sides)
    wait_s = _wait_s(local * service_s / servers, servers, service_s, demand) if local > 0.0 else 0.0
    return _Decode(cost, tpot_s, demand.rate / capacity, wait_s, service_s)


def _shared(demand: Demand, sort: Sort, count: int) -> _Shared:
    rates, fresh = sort.rates, demand.fresh_tokens
    context = demand.prompt_tokens + demand.output_tokens / 2.0
    mixed, decode = rates.mixed, rates.decode
    chunks = max(1.0, fresh / sort.chunk)
    adds_s = chunks * max(0.0, mixed.fixed_s - decode.fixed_s) + fresh * mixed.token_s
    adds_s += mixed.position_s * demand.fresh_squares / 2.0
    each_s = max(1e-9, decode.sequence_s + decode.context_s * context)
    most = max(1.0, min(float(sort.seats), sort.kv_tokens / context))
    return _Shared(count, decode.fixed_s, each_s, 1.0, most, max(1e-9, adds_s), chunks)


def _step_s(sides: Sequence[_Shared], rate: float, output: float) -> float:
    """The length of a step at which all instances together complete `rate` requests a second."""
    low = min(one.fixed_s / one.left for one in sides)
    high = max((one.fixed_s + one.each_s * one.most) / one.left for one in sides)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if sum(one.instances * one.rate(middle, output) for one in sides) < rate:
            low = middle
        else:
            high = middle
    return high


STEPS = 8  # assignments that are tried in either direction
DRAINS = 2.0  # mean answers that a drain lasts: the longest answer counts


@dataclass(frozen=True, slots=True)
class PredictiveFlip:
    """The roles that would serve the demand best, one flip at a time.

    In either direction (more instances for prefill, or for decode), outlooks are predicted for ever more flips, each of
    the sort that helps most. The first flip towards the best of them is decided when its SLO cost has been less than
    now by `gain` for `for_s`. The cost of the drains is spread over `horizon_s`, for which the new roles are expected
    to stay. There are at most `most` flips in `per_s`, `cooldown_s` apart; without a shift of the demand, a flip in the
    opposite direction waits for `turn_s`. The last ready instance of a role does not flip, none flips while another
    drains or against an operator's flip.
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
        fleet = _Fleet.known(view, context)
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
        fleet = _Fleet.known(view, context)
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
    """`flips` flips towards a role, the first of them of the sort `first`; the outlook then, and during the first
    drain.
    """

    to: Role
    flips: int
    first: int
    then: Outlook
    meanwhile: Outlook
    drain_s: float

    def slo_cost(self, horizon_s: float, today: Outlook) -> float:
        """Of the roles then, and of the drains until then."""
        worse = max(0.0, self.meanwhile.slo_cost - today.slo_cost)
        return self.then.slo_cost + worse * min(1.0, self.flips * self.drain_s / horizon_s)


class _Fleet:
    """Ready instances by sort, those of them that may be flipped, and the demand that they serve."""

    def __init__(self, demand: Demand, ready: Mapping[Role, Sequence[InstanceView]], context: FlipContext) -> None:
        self.demand, self.ready = demand, ready
        views = [one for there in ready.values() for one in there]
        self._sorts, self._sort_of = sorted_out(views)
        self._roles = Roles.from_views(views, self._sort_of, len(self._sorts))
        self._free = {to: [one for one in ready[to.other] if context.may_flip(one)] for to in Role}

    @classmethod
    def known(cls, view: ClusterView, context: FlipContext) -> "_Fleet | None":
        """None while the demand is not known or a role has no ready instance."""
        ready = ready_by_role(view)
        return cls(context.demand, ready, context) if context.demand is not None and all(ready.values()) else None

    def outlook(self, roles: Roles | None = None) -> Outlook:
        return outlook(self.demand, self._sorts, roles or self._roles)

    def plans(self, to: Role, today: Outlook) -> Iterator[_Plan]:
        """Plans of ever more flips towards a role, each of the sort that helps most."""
        free, giver = self._free_by_sort(to), to.other
        size = max(1, -(-min(sum(free), len(self.ready[giver]) - 1) // STEPS))
        roles, first, flips, meanwhile = self._roles, -1, 0, today
        drain_s = DRAINS * self.demand.output_tokens * today.tpot_s if giver is Role.DECODE else today.ttft_s
        while sum(free) and sum(roles.of(giver)) > 1:
            ways = [at for at, n in enumerate(free) if n and roles.of(giver)[at]]
            moved = {at: self._moved(roles, to, at, size, free) for at in ways}
            if not moved:
                return
            outlooks = {at: self.outlook(after) for at, (after, _) in moved.items()}
            best = min(outlooks, key=lambda at: outlooks[at].slo_cost)
            roles, count = moved[best]
            free[best] -= count
            if first < 0:
                first = best
                meanwhile = self.outlook(self._roles.plus(giver, best, -1))
            flips += count
            yield _Plan(to, flips, first, outlooks[best], meanwhile, drain_s)

    def least_loaded(self, to: Role, sort: int) -> InstanceView:
        """The instance of a sort with the least load."""
        free = [one for one in self._free[to] if self._sort_of[one.instance_id] == sort]
        return min(free, key=lambda one: (load_share(one), one.load.inflight, one.instance_id))

    def considered(self, to: Role) -> dict[str, float | str]:
        """Of each sort that may flip, an instance, and the SLO cost with it in the other role."""
        found: dict[str, float | str] = {}
        free = self._free_by_sort(to)
        for at in (at for at, n in enumerate(free) if n):
            roles, _ = self._moved(self._roles, to, at, 1, free)
            found[self.least_loaded(to, at).instance_id] = round(self.outlook(roles).slo_cost, 4)
        return found

    def _moved(self, roles: Roles, to: Role, sort: int, size: int, free: Sequence[int]) -> tuple[Roles, int]:
        """The roles with up to `size` more of a sort in the role, at least one left in the other; and their number."""
        giving = roles.of(to.other)
        count = min(size, free[sort], giving[sort], sum(giving) - 1)
        return roles.plus(to.other, sort, -count).plus(to, sort, count), count

    def _free_by_sort(self, to: Role) -> list[int]:
        counts = [0] * len(self._sorts)
        for one in self._free[to]:
            counts[self._sort_of[one.instance_id]] += 1
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
