"""Role flips: what a policy that proposes them may know, remember and must respect; and the policy `off`.

The caller calls a policy at regular intervals and carries a decision out: drain, then flip. A decision counts as a flip
whether or not it succeeds; after a failure, the conditions of a flip have to hold again for their full time. `idle` is
in `shared.policy.papers.tetriinfer`, `predictive` in `shared.policy.predictive_flip`. Times are seconds.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from shared.domain.demand import Demand
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.domain.route import Reason

MAX_FLIPS = 32  # in the history


@dataclass(slots=True)
class FlipHistory:
    """What a policy remembers from call to call. Times are on the clock of `now`.

    since: when each condition that holds began to hold, by its name. flips: the time and the new role of the last ones,
    newest last.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    flips: deque[tuple[float, Role]] = field(default_factory=lambda: deque(maxlen=MAX_FLIPS))

    def hold(self, conditions: Iterable[str], now: float) -> Mapping[str, float]:
        """Note which conditions hold now; returns since when each of them holds."""
        self.since = {name: self.since.get(name, now) for name in conditions}
        return self.since


@dataclass(frozen=True, slots=True)
class FlipContext:
    """What a policy may know besides the loads.

    demand: the clients' requests; None while it is not known. kept: instances whose role an operator has set. barred:
    roles that no instance may be given, because an operator has just done the opposite.
    """

    demand: Demand | None = None
    kept: frozenset[str] = frozenset()
    barred: frozenset[Role] = frozenset()

    @classmethod
    def after_flips(
        cls, demand: Demand | None, by_operators: Iterable[tuple[float, str, Role]], now: float, hold_s: float
    ) -> "FlipContext":
        """With the flips of operators (time, instance, new role), each of which takes precedence for `hold_s`."""
        recent = [(instance_id, to) for at, instance_id, to in by_operators if now - at < hold_s]
        kept = frozenset(instance_id for instance_id, _ in recent)
        return cls(demand, kept, frozenset(to.other for _, to in recent))

    def may_flip(self, view: InstanceView) -> bool:
        """Whether operators' flips allow the instance to be flipped."""
        return view.instance_id not in self.kept and view.role.other not in self.barred

    def candidates(self, ready: Mapping[Role, Sequence[InstanceView]]) -> dict[Role, list[InstanceView]]:
        """The ready instances of each role of which one may leave it: none of a role that has one instance only."""
        several = {role for role, views in ready.items() if len({view.info.whole for view in views}) > 1}
        return {
            role: [view for view in views if role in several and self.may_flip(view)] for role, views in ready.items()
        }


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
