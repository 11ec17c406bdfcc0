"""The index over a stream of broadcasts: what its owner assigned since a load was taken counts, too.

Loads are up to 200 ms old when a decision uses them. Without this every job of that time would go to one
instance.
"""

from collections import deque
from dataclasses import replace
from random import Random

from shared.domain.instance import ClusterView
from shared.errors import Unavailable
from shared.policy.assignment import Assignment
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.prefix_index import PrefixIndex

REACH_S = 0.03  # time a job takes from the decision into the instance's load
FORGET_S = 1.0  # an assignment older than this is in every load, whatever the clocks of the hosts say
STALE_S = 1.0  # without a broadcast for so long the loads are old
HOLD_S = 30.0  # then an assignment counts until its job ends, or for so long
_AGAIN_S = 0.5  # between two looks at which of them are over


class LoadTracker:
    """The newest broadcast and the own assignments that it does not show yet. Times are unix seconds.

    While no broadcast comes, assignments count on top of the last one until their jobs end, or for HOLD_S: else they
    would add up for ever. `ledger` lives as long as this does: add each placement to it and complete it when its job
    ends. So does `prefixes`: apply to it what instances tell of theirs.
    """

    def __init__(self) -> None:
        self.ledger = WorkloadLedger()
        self.prefixes = PrefixIndex()
        self._index: ClusterIndex | None = None
        self._recent: deque[Assignment] = deque()
        self._over: set[str] = set()
        self._rng = Random()
        self._updated_s = 0.0
        self._built_s = 0.0

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

    def stale_s(self, now: float) -> float:
        """How old the newest broadcast is, if that is too old; else 0."""
        age_s = now - self._updated_s
        return age_s if self.known and age_s > STALE_S else 0.0

    def update(self, view: ClusterView, now: float, rng: Random) -> None:
        """Take a new broadcast; assignments that its loads cannot show yet are counted on top."""
        taken_s = {v.instance_id: min(v.load.time_s, now) for v in view.instances}
        self._recent = deque(
            a
            for a in self._recent
            if now - a.time_s < FORGET_S and a.time_s + REACH_S > taken_s.get(a.instance_id, 0.0)
        )
        self._rng, self._updated_s = rng, now
        self.ledger.settle(view, now)
        self._build(view, now)

    def book(self, assignment: Assignment) -> None:
        """Count a decision until a load shows it; what is still to come counts as long as the ledger knows it."""
        self._drop_old(assignment.time_s)
        if not assignment.coming:
            self._recent.append(assignment)
        self.current.book(assignment)

    def arrived(self, job_id: str, now: float) -> None:
        """A job's decode has come to its instance: it counts until a load shows it."""
        assignment = self.ledger.arrived(job_id)
        if assignment is not None:
            self._recent.append(replace(assignment, time_s=now, coming=False))

    def ended(self, job_id: str) -> None:
        """A job is over: with old loads, what it was assigned to counts no more."""
        self._over.add(job_id)

    def _drop_old(self, now: float) -> None:
        if self._index is None or not self.stale_s(now) or now - self._built_s < _AGAIN_S:
            return
        self._recent = deque(a for a in self._recent if now - a.time_s < HOLD_S and a.job_id not in self._over)
        self._build(self._index.view, now)

    def _build(self, view: ClusterView, now: float) -> None:
        turn = self._index.turn if self._index else 0
        self._over.clear()
        self._built_s = now
        self._index = ClusterIndex(
            view,
            (*self._recent, *self.ledger.coming),
            rng=self._rng,
            turn=turn,
            ledger=self.ledger,
            prefixes=self.prefixes,
        )
