"""Role flips: which instance changes its role, and when.

The caller calls `step` at regular intervals with the state that the last step returned, and carries a decision out:
drain, then flip. A decision counts as a flip whether or not it succeeds; after a failure, the conditions of a flip have
to hold anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from shared.domain.demand import Demand
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.index import queued_prefill_s

MADE = 32  # flips that a state remembers


@dataclass(frozen=True, slots=True)
class FlipState:
    """The state of a policy between two steps. Times are on the clock of `now`.

    since: when each condition that holds began to hold, by its name. made: the last flips, newest last, with the role
    that each led to.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    made: tuple[tuple[float, Role], ...] = ()

    @property
    def last_flip_s(self) -> float | None:
        return self.made[-1][0] if self.made else None

    def flipped(self, to: Role, now: float, since: Mapping[str, float]) -> "FlipState":
        """The state after a decision, with the conditions that still hold."""
        return FlipState(since, (*self.made[-(MADE - 1) :], (now, to)))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy may know besides the loads.

    demand: the clients' requests; None while it is not known. kept: instances whose role a person has set and which
    policies may not flip yet. barred: roles that policies may not give yet, because a person has just done the
    opposite.
    """

    demand: Demand | None = None
    kept: frozenset[str] = frozenset()
    barred: frozenset[Role] = frozenset()

    @classmethod
    def of(cls, demand: Demand | None, ordered: Iterable[tuple[float, str, Role]], now: float, hold_s: float) -> "Seen":
        """With the flips of people (time, instance and new role), each of which binds policies for `hold_s`."""
        held = [(instance_id, to) for at, instance_id, to in ordered if now - at < hold_s]
        return cls(demand, frozenset(one for one, _ in held), frozenset(to.other for _, to in held))

    def may_flip(self, view: InstanceView) -> bool:
        """Whether no flip of a person forbids it."""
        return view.instance_id not in self.kept and view.role.other not in self.barred


@dataclass(frozen=True, slots=True)
class FlipDecision:
    """An instance, its new role, and why."""

    instance_id: str
    to: Role
    reasons: tuple[Reason, ...] = ()


NOTHING = Seen()


class RoleFlip(Protocol):
    """Decides on at most one flip at a time. `now` is in seconds and does not decrease from step to step."""

    name: ClassVar[str]

    def start(self) -> FlipState:
        """The state before the first step."""
        ...

    def step(
        self, state: FlipState, view: ClusterView, now: float, seen: Seen = NOTHING
    ) -> tuple[FlipState, FlipDecision | None]: ...


class StartsEmpty:
    """Base of policies whose first state is empty."""

    __slots__ = ()

    def start(self) -> FlipState:
        return FlipState()


@dataclass(frozen=True, slots=True)
class NoFlip(StartsEmpty):
    """Only people flip roles."""

    name: ClassVar[str] = "off"

    def step(
        self, state: FlipState, view: ClusterView, now: float, seen: Seen = NOTHING
    ) -> tuple[FlipState, FlipDecision | None]:
        return state, None


@dataclass(frozen=True, slots=True)
class IdleFlip(StartsEmpty):
    """An instance whose load stayed under `threshold_share` for `for_s` flips, if the other role has work.

    Source: TetriInfer 3.5 (under 10 % for a minute; idle for a minute in 5.1). F: the last ready instance of a role
    does not flip, none flips while another drains or while the other role is idle, too.
    """

    name: ClassVar[str] = "idle"
    threshold_share: float = 0.1
    for_s: float = 60.0

    def __post_init__(self) -> None:
        if not (0.0 < self.threshold_share <= 1.0 and self.for_s >= 0.0):
            raise InvalidRequest("idle: threshold_share must lie in 0..1 and for_s must not be negative")

    def step(
        self, state: FlipState, view: ClusterView, now: float, seen: Seen = NOTHING
    ) -> tuple[FlipState, FlipDecision | None]:
        ready = ready_by_role(view)
        idle = [v for role in Role for v in ready[role] if load_share(v) < self.threshold_share]
        since = _held(state, [_key(v) for v in idle], now)
        held = FlipState(since, state.made)
        if draining(view):
            return held, None
        highest = {role: max(map(load_share, ready[role]), default=0.0) for role in Role}
        for chosen in sorted(idle, key=lambda v: (since[_key(v)], v.instance_id)):
            idle_s, others = now - since[_key(chosen)], highest[chosen.role.other]
            if idle_s < self.for_s:
                break
            if len(ready[chosen.role]) < 2 or others < self.threshold_share or not seen.may_flip(chosen):
                continue
            figures: dict[str, float | str] = {
                "load_share": round(load_share(chosen), 4),
                "idle_s": round(idle_s, 3),
                "threshold_share": self.threshold_share,
                "highest_load_of_other_role": round(others, 4),
            }
            decision = FlipDecision(chosen.instance_id, chosen.role.other, (Reason("role_flip:idle", figures),))
            left = {key: start_s for key, start_s in since.items() if key != _key(chosen)}
            return state.flipped(chosen.role.other, now, left), decision
        return held, None


@dataclass(frozen=True, slots=True)
class PressureFlip(StartsEmpty):
    """The role under `ratio` times as much pressure as the other for `for_s` gets the other's least loaded instance.

    Pressure is demand over capacity, 1 where a role is at its limit. prefill: seconds of queued prefill per ready
    instance, over `queue_s`. decode: the share of its KV that running and waiting jobs need. A flip that would reverse
    the order of the pressures, with all work spread evenly, is not made, so that constant loads do not flip an instance
    back; `cooldown_s` passes between two flips.
    Source: none of the papers; TetriInfer 3.5 leaves the policy open.
    """

    name: ClassVar[str] = "pressure"
    ratio: float = 2.0
    least: float = 0.5  # below this the busier role needs no help
    queue_s: float = 1.0
    for_s: float = 5.0
    cooldown_s: float = 30.0

    def __post_init__(self) -> None:
        if self.ratio < 1.0 or min(self.least, self.for_s, self.cooldown_s) < 0.0 or self.queue_s <= 0.0:
            raise InvalidRequest("pressure: ratio must be at least 1, queue_s positive, the others not negative")

    def step(
        self, state: FlipState, view: ClusterView, now: float, seen: Seen = NOTHING
    ) -> tuple[FlipState, FlipDecision | None]:
        ready = ready_by_role(view)
        pressures = {role: self._pressure(role, ready[role]) for role in Role}
        high = max(Role, key=lambda role: pressures[role])
        unequal = pressures[high] >= self.least and pressures[high] > self.ratio * pressures[high.other]
        since = _held(state, [high.value] if unequal else [], now)
        held = FlipState(since, state.made)
        cooling = state.last_flip_s is not None and now - state.last_flip_s < self.cooldown_s
        if not unequal or now - since[high.value] < self.for_s or cooling or draining(view):
            return held, None
        givers, takers = ready[high.other], ready[high]
        if len(givers) < 2 or not takers or not _stays_in_order(pressures, high, len(givers), len(takers)):
            return held, None
        free = [giver for giver in givers if seen.may_flip(giver)]
        if not free:
            return held, None
        chosen = min(free, key=lambda v: (load_share(v), v.instance_id))
        figures: dict[str, float | str] = {
            "prefill_pressure": round(pressures[Role.PREFILL], 4),
            "decode_pressure": round(pressures[Role.DECODE], 4),
            "held_s": round(now - since[high.value], 3),
            "load_share": round(load_share(chosen), 4),
        }
        decision = FlipDecision(chosen.instance_id, high, (Reason("role_flip:pressure", figures),))
        return state.flipped(high, now, {}), decision

    def _pressure(self, role: Role, views: Sequence[InstanceView]) -> float:
        if not views:
            return 0.0
        if role is Role.PREFILL:
            return sum(queued_prefill_s(v) for v in views) / len(views) / self.queue_s
        return sum(_wanted_share(v) for v in views) / len(views)


def load_share(view: InstanceView) -> float:
    """The used share of an instance, 0..1: of its KV; on a prefill instance also of one chunk by queued prompt tokens,
    whichever is more.
    """
    load, info = view.load, view.info
    used = min(1.0, max(0.0, (info.total_blocks - load.free_blocks) / max(1, info.total_blocks)))
    if view.role is Role.DECODE:
        return used
    return max(used, min(1.0, load.queued_prefill_tokens / max(1, info.chunk_size)))


def _wanted_share(view: InstanceView) -> float:
    """The share of its KV that all its jobs would use, if the waiting ones were like the running ones."""
    load, used = view.load, load_share(view)
    if load.waiting > 0:
        return used * (1.0 + load.waiting / load.running) if load.running > 0 else used + 1.0
    return used


def _stays_in_order(pressures: Mapping[Role, float], high: Role, givers: int, takers: int) -> bool:
    """Whether `high` would still be the role under more pressure after the flip."""
    after_low = pressures[high.other] * givers / (givers - 1)
    return pressures[high] * takers / (takers + 1) >= after_low


def ready_by_role(view: ClusterView) -> dict[Role, tuple[InstanceView, ...]]:
    return {role: view.ready(role) for role in Role}


def draining(view: ClusterView) -> bool:
    return any(v.state is InstanceState.DRAINING for v in view.instances)


def _key(view: InstanceView) -> str:
    return f"{view.instance_id} as {view.role.value}"


def _held(state: FlipState, holding: Sequence[str], now: float) -> dict[str, float]:
    return {key: state.since.get(key, now) for key in holding}
