"""The ready instances of the cluster, kept in the order in which policies ask for them.

Built when somebody comes, goes or changes, O(n log n). A decision then looks at a few entries; booking it, and taking
in another load, cost O(log n) comparisons each. Pure: no clock, no I/O; the driver says when to build and what to book.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from operator import attrgetter
from random import Random
from typing import Any, TypeVar, cast

from shared.domain.cluster import ClusterState
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.policy.assignment import Assignment
from shared.policy.backlog import Backlog, chunked_rate, prefill_rate
from shared.policy.kv_ahead import takes_tokens, with_job
from shared.policy.ledger import WorkloadLedger
from shared.policy.prefix_index import PrefixIndex
from shared.policy.pressure import Pressures
from shared.policy.step_budget import TpotBudget

Made = TypeVar("Made")
_by_id = attrgetter("info.instance_id")


class ReadySet:
    """Ready instances of one role, by id. Booked work shows in the loads of `views`."""

    __slots__ = ("_at", "_views")

    def __init__(self, views: Iterable[InstanceView]) -> None:
        self._views = sorted(views, key=_by_id)
        self._at = {view.info.instance_id: at for at, view in enumerate(self._views)}

    def __len__(self) -> int:
        return len(self._views)

    @property
    def views(self) -> Sequence[InstanceView]:
        """All of them, by id."""
        return self._views

    def get(self, instance_id: str) -> InstanceView | None:
        """The instance of that id, if it is one of them."""
        at = self._at.get(instance_id)
        return None if at is None else self._views[at]

    def copy(self) -> "ReadySet":
        """The same instances; what is booked on one copy does not show in the other."""
        twin = object.__new__(ReadySet)
        twin._at, twin._views = self._at, self._views.copy()
        return twin

    def put(self, view: InstanceView) -> bool:
        """The instance as it is now; False, and nothing is done, where it is none of these."""
        at = self._at.get(view.info.instance_id)
        if at is not None:
            self._views[at] = view
        return at is not None

    def book(self, assignment: Assignment) -> InstanceView | None:
        """Count work on its instance and give back the instance as it is now; None for unknown ids."""
        at = self._at.get(assignment.instance_id)
        if at is None:
            return None
        raised = self._views[at] = _booked(self._views[at], assignment)
        return raised


class ClusterIndex:
    """The cluster as broadcasts tell of it, indexed, plus the assignments that they cannot know yet.

    coupled: no instance has the prefill role, so each computes whole jobs, and placement chooses among those with the
    decode role. turn: decisions booked so far, over all broadcasts: what round-robin counts by. ledger: what the
    driver remembers of its placements. prefixes: what instances have told of the prompts whose KV they hold.
    limited: steps keep to the TPOT targets of those that decode. `live`: where `view` comes from and goes on.
    """

    def __init__(
        self,
        view: ClusterView,
        pending: Iterable[Assignment] = (),
        *,
        rng: Random,
        turn: int = 0,
        ledger: WorkloadLedger | None = None,
        prefixes: PrefixIndex | None = None,
        live: ClusterState | None = None,
    ) -> None:
        self._view, self._live = view, live
        self.turn = turn
        self.limited = view.policies.step_budget.name == TpotBudget.name
        self.ledger = WorkloadLedger() if ledger is None else ledger
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        prefills: list[InstanceView] = []
        decodes: list[InstanceView] = []
        self.coupled = True
        prefill, ready = Role.PREFILL, InstanceState.READY
        for one in view.instances:
            if one.role is prefill:
                self.coupled = False
                if one.state is ready:
                    prefills.append(one)
            elif one.state is ready:
                decodes.append(one)
        self.prefill = ReadySet(prefills)
        self.decode = ReadySet(decodes)
        self._rng = rng
        self._backlog: Backlog | None = None
        self._pressures: Pressures | None = None
        self._made: dict[Hashable, Any] = {}
        for assignment in pending:
            self._apply(assignment)

    @property
    def view(self) -> ClusterView:
        """The cluster without what was booked; O(instances)."""
        return self._view if self._live is None else self._live.view()

    @property
    def sequence(self) -> int:
        """Of the newest broadcast."""
        return self._view.sequence if self._live is None else self._live.sequence

    @property
    def size(self) -> int:
        """Instances, ready or not."""
        return len(self._view.instances) if self._live is None else len(self._live)

    @property
    def placing(self) -> Role:
        """The role among whose instances placement chooses."""
        return Role.DECODE if self.coupled else Role.PREFILL

    @property
    def candidates(self) -> ReadySet:
        """The instances among which placement chooses."""
        return self.decode if self.coupled else self.prefill

    @property
    def backlog(self) -> Backlog:
        """The candidates by what waits at them. Built when first asked for: dispatchers never do."""
        if self._backlog is None:
            speed = chunked_rate if self.coupled else _prefill_rate
            self._backlog = Backlog(self.candidates.views, self._rng, speed)
        return self._backlog

    @property
    def pressures(self) -> Pressures:
        """The decode instances by what one more job would meet there. Built when first asked for."""
        if self._pressures is None:
            self._pressures = Pressures(self.decode.views, self._rng)
        return self._pressures

    @property
    def states(self) -> "Counter[tuple[Role, InstanceState]]":
        """How many instances are in which state."""
        return Counter((v.role, v.state) for v in self.view.instances)

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, once a key and broadcast, or a tenth of a second of them. It may not rest on bookings."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return cast(Made, found)

    def book(self, assignment: Assignment) -> None:
        """Let later decisions see this one."""
        self.turn += 1
        self._apply(assignment)

    def forget_cached(self) -> None:
        """What was made for `cached` is old by now."""
        self._made = {}

    def renew(self, view: InstanceView, pending: Iterable[Assignment]) -> None:
        """An instance has another load or other rates, in the same role and state; `pending`: what is to be counted on
        top of that.
        """
        for assignment in pending:
            view = _booked(view, assignment)
        if not (self.prefill.put(view) or self.decode.put(view)):
            return
        if self._backlog is not None and not self._backlog.refresh(view, self._rng.random()):
            self._backlog = None
        if self._pressures is not None:
            self._pressures.refresh(view, self._rng.random())

    def for_dispatch(self) -> "ClusterIndex":
        """The same broadcast for one more dispatcher: decode jobs booked on either do not show on the other.

        Cheap: one copy of a list. Only dispatch may use it; it shares everything else.
        """
        twin = copy(self)
        twin.decode = self.decode.copy()
        twin._backlog = twin._pressures = None  # the same broadcast: it is not renewed
        return twin

    def _apply(self, assignment: Assignment) -> None:
        placed = self.candidates.book(assignment)
        if placed is not None and self._backlog is not None:
            self._backlog.refresh(placed)
        if placed is None and not self.coupled:
            placed = self.decode.book(assignment)
        if placed is not None and self._pressures is not None:
            self._pressures.refresh(placed)


def _prefill_rate(view: InstanceView) -> tuple[float, float]:
    return prefill_rate(view.info.rates)


def _booked(view: InstanceView, more: Assignment) -> InstanceView:
    return InstanceView(view.info, view.role, view.state, _with(view, more))


def _with(view: InstanceView, more: Assignment) -> InstanceLoad:
    load, block_size = view.load, max(1, view.info.block_size)
    inbound_bytes = int(more.import_tokens * view.info.kv_bytes_per_token) if more.import_tokens else 0
    decodes = more.decode_tokens > 0
    free_blocks, ahead = load.free_blocks, load.kv_ahead
    if decodes:
        takes = takes_tokens(view, more.decode_tokens, more.saved_tokens)
        free_blocks -= -(-takes // block_size)
        ahead = with_job(ahead, takes, more.answer_tokens, block_size, more.lead_steps)
    return InstanceLoad(
        time_s=load.time_s,
        queued_prefill=load.queued_prefill + (more.prefill_tokens > 0),
        queued_prefill_tokens=load.queued_prefill_tokens + more.prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        decoding=load.decoding + decodes,
        heavy_decodes=load.heavy_decodes + (decodes and more.heavy),
        context_tokens=load.context_tokens + more.decode_tokens,
        coming=load.coming + more.coming,
        coming_tokens=load.coming_tokens + (more.decode_tokens if more.coming else 0),
        waiting_tokens=load.waiting_tokens + max(0, -free_blocks) * block_size,
        free_blocks=max(0, free_blocks),
        staged_bytes=load.staged_bytes,
        inbound_bytes=load.inbound_bytes + inbound_bytes,
        inflight=load.inflight,
        prefill_share=load.prefill_share,
        kv_ahead=ahead,
    )
