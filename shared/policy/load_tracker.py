"""The index over a stream of broadcasts: what its owner assigned since a load was taken counts, too.

Loads are up to 200 ms old when a decision uses them. Without this every job of that time would go to one
instance.
"""

from collections import deque
from random import Random

from shared.domain.instance import ClusterView
from shared.errors import Unavailable
from shared.policy.index import Assignment, ClusterIndex
from shared.policy.ledger import WorkloadLedger

REACH_S = 0.03  # time a job takes from the decision into the instance's load
FORGET_S = 1.0  # an assignment older than this is in every load, whatever the clocks of the hosts say


class LoadTracker:
    """The newest broadcast and the own assignments that it does not show yet. Times are unix seconds.

    `ledger` lives as long as this does: add each placement to it and complete it when its job ends.
    """

    def __init__(self) -> None:
        self.ledger = WorkloadLedger()
        self._index: ClusterIndex | None = None
        self._recent: deque[Assignment] = deque()

    @property
    def current(self) -> ClusterIndex:
        """The index to decide on. Raises Unavailable before the first broadcast."""
        if self._index is None:
            raise Unavailable("no broadcast from the cluster monitor yet", retry_after_s=1.0)
        return self._index

    @property
    def known(self) -> bool:
        """Whether there was a broadcast."""
        return self._index is not None

    def update(self, view: ClusterView, now: float, rng: Random) -> None:
        """Take a new broadcast; assignments that its loads cannot show yet are counted on top."""
        taken_s = {v.instance_id: min(v.load.time_s, now) for v in view.instances}
        self._recent = deque(
            a
            for a in self._recent
            if now - a.time_s < FORGET_S and a.time_s + REACH_S > taken_s.get(a.instance_id, 0.0)
        )
        turn = self._index.turn if self._index else 0
        self.ledger.settle(view, now)
        self._index = ClusterIndex(view, self._recent, rng=rng, turn=turn, ledger=self.ledger)

    def book(self, assignment: Assignment) -> None:
        """Count a decision until a load shows it."""
        self._recent.append(assignment)
        self.current.book(assignment)
