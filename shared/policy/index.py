"""The ready instances of one broadcast, kept in the order in which policies ask for them.

Built once a broadcast, O(n log n); a decision then looks at a few entries, and booking it costs O(log n)
comparisons. Pure: no clock, no I/O; the driver says when to build and what to book.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from random import Random
from typing import Any, TypeVar, cast

from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.policy.backlog import Backlog
from shared.policy.ledger import WorkloadLedger
from shared.policy.ready import Assignment, ReadySet
from shared.policy.speeds import chunked_rate, prefill_rate

__all__ = ["Assignment", "ClusterIndex"]
Made = TypeVar("Made")


class ClusterIndex:
    """One broadcast, indexed, plus the assignments that it cannot know yet.

    coupled: no instance has the prefill role, so each computes whole jobs, and placement chooses among those with the
    decode role. turn: decisions booked so far, over all broadcasts: what round-robin counts by. ledger: what the
    driver remembers of its placements.
    """

    def __init__(
        self,
        view: ClusterView,
        pending: Iterable[Assignment] = (),
        *,
        rng: Random,
        turn: int = 0,
        ledger: WorkloadLedger | None = None,
    ) -> None:
        self.view = view
        self.turn = turn
        self.ledger = WorkloadLedger() if ledger is None else ledger
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
        self._made: dict[Hashable, Any] = {}
        for assignment in pending:
            self._apply(assignment)

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
    def states(self) -> "Counter[tuple[Role, InstanceState]]":
        """How many instances are in which state."""
        return Counter((v.role, v.state) for v in self.view.instances)

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, once a broadcast and key. It may only rest on what bookings do not change."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return cast(Made, found)

    def book(self, assignment: Assignment) -> None:
        """Let later decisions see this one."""
        self.turn += 1
        self._apply(assignment)

    def for_dispatch(self) -> "ClusterIndex":
        """The same broadcast for one more dispatcher: decode jobs booked on either do not show on the other.

        Cheap: one copy of a list. Only dispatch may use it; it shares everything else.
        """
        twin = copy(self)
        twin.decode = self.decode.copy()
        twin._backlog = None
        return twin

    def _apply(self, assignment: Assignment) -> None:
        placed = self.candidates.book(assignment)
        if placed is None:
            if not self.coupled:
                self.decode.book(assignment)
        elif self._backlog is not None:
            self._backlog.refresh(placed)


def _prefill_rate(view: InstanceView) -> tuple[float, float]:
    return prefill_rate(view.info.rates)
