"""The index over a stream of broadcasts: what its owner assigned since a load was taken counts, too.

Loads are up to 200 ms old when a decision uses them. Without this every job of that time would go to one
instance. The assignments of other schedulers are in the loads themselves: jobs that have come to an instance, and
decodes that are bound to it and still to come (`InstanceLoad.promised`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from random import Random

from shared.domain.cluster import ClusterDelta, ClusterState
from shared.domain.instance import ClusterView, InstanceLoad, InstanceView
from shared.errors import Unavailable
from shared.policy.assignment import Assignment, mark_of, promised_to
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.prefix_index import MAX_BLOCKS, PrefixIndex

REACH_S = 0.03  # time a job takes from the decision into the instance's load
FORGET_S = 1.0  # an assignment older than this is in every load, whatever the clocks of the hosts say
SHOWN_S = 2.0  # for so long a load says that a job has come, so that no broadcast with it is missed
STALE_S = 1.0  # without a broadcast for so long the loads are old
HOLD_S = 30.0  # then an assignment counts until its job ends, or for so long
_AGAIN_S = 0.5  # between two looks at which of them are over, and at who has forgotten what
CACHED_S = 0.1  # for so long what is made of all loads stands


class LoadTracker:
    """What broadcasts come to, and the own assignments that they do not show yet. Times are unix seconds.

    While no broadcast comes, assignments count on top of the last one until their jobs end, or for HOLD_S: else they
    would add up for ever. `ledger` lives as long as this does: add each placement to it and complete it when its job
    ends. So does `prefixes`: apply to it what instances tell of theirs. `moves` rises when somebody comes, goes, or has
    another role or state.
    """

    def __init__(self, prefix_blocks: int = MAX_BLOCKS) -> None:
        self.ledger = WorkloadLedger()
        self.prefixes = PrefixIndex(max_blocks=prefix_blocks)
        self.moves = 0
        self._state = ClusterState()
        self._index: ClusterIndex | None = None
        self._recent: dict[str, list[Assignment]] = {}  # by instance
        self._over: set[str] = set()
        self._rng = Random()
        self._now = self._updated_s = self._looked_s = self._cached_s = 0.0

    @property
    def current(self) -> ClusterIndex:
        """The index to decide on. Raises Unavailable before the first broadcast."""
        if self._index is None:
            raise Unavailable("no broadcast from the cluster monitor yet", retry_after_s=1.0)
        return self._index

    @property
    def known(self) -> bool:
        """Whether there was a broadcast."""
        return self._state.known

    @property
    def view(self) -> ClusterView:
        """What broadcasts have come to, without own assignments; O(instances)."""
        return self._state.view()

    def stale_s(self, now: float) -> float:
        """How old the newest broadcast is, if that is too old; else 0."""
        age_s = now - self._updated_s
        return age_s if self.known and age_s > STALE_S else 0.0

    def update(self, view: ClusterView, now: float, rng: Random) -> None:
        """Take in a broadcast of all there is."""
        self.hear(ClusterDelta.of(view), now, rng)

    def hear(self, delta: ClusterDelta, now: float, rng: Random) -> bool:
        """Take in a broadcast; assignments that loads cannot show yet are counted on top of them.

        False, and nothing is changed, where a broadcast before it is missing. O(log instances) for each load.
        """
        moved = self._state.moved(delta)
        if not self._state.apply(delta):
            return False
        self._rng, self._now, self._updated_s = rng, now, now
        self._over.clear()
        self.moves += moved
        if delta.whole or now - self._looked_s >= _AGAIN_S:
            self._looked_s = now
            self.ledger.settle(self._state.view(), now)
        if moved or delta.policies is not None:  # what the index rests on
            self._rebuild()
            return True
        for view in delta.changed:
            self._renew(view.info.instance_id)
        for instance_id in delta.loads:
            self._renew(instance_id)
        if now - self._cached_s >= CACHED_S:
            self._cached_s = now
            self.current.forget_cached()
        return True

    def book(self, assignment: Assignment) -> None:
        """Count a decision until a load shows it; what is still to come counts as long as the ledger knows it."""
        self._drop_old(assignment.time_s)
        if not assignment.coming:
            self._remember(assignment)
        self.current.book(assignment)

    def arrived(self, job_id: str, now: float) -> None:
        """A job's decode has come to its instance: it counts until a load shows it."""
        assignment = self.ledger.arrived(job_id)
        if assignment is not None:
            self._remember(replace(assignment, time_s=now, coming=False))

    def ended(self, job_id: str) -> None:
        """A job is over: with old loads, what it was assigned to counts no more."""
        self._over.add(job_id)

    def _remember(self, assignment: Assignment) -> None:
        self._recent.setdefault(assignment.instance_id, []).append(assignment)

    def _renew(self, instance_id: str) -> None:
        """Its load was told."""
        view = self._state.get(instance_id)
        if view is None:
            return
        recent, coming = self._unseen(instance_id, view.load), self.ledger.coming_to(instance_id)
        if coming and view.load.accepted:
            came = frozenset(view.load.accepted)
            coming = [one for one in coming if mark_of(one.job_id) not in came]  # its report is still under way
        self.current.renew(view, (*recent, *coming, *self._of_others(view)))

    def _of_others(self, view: InstanceView) -> Iterable[Assignment]:
        """Decodes that other schedulers have bound to the instance and that are still to come, as its load says."""
        promised = view.load.promised
        if not promised:
            return ()
        instance_id = view.info.instance_id
        own = {mark_of(one.job_id) for one in (*self._recent.get(instance_id, ()), *self.ledger.coming_to(instance_id))}
        return [promised_to(instance_id, one, self._now) for one in promised if one.mark not in own]

    def _unseen(self, instance_id: str, load: InstanceLoad) -> Iterable[Assignment]:
        """Assignments that a load does not show; the others are forgotten.

        A load that names the jobs which came lately shows those, however long they took to come there. Of one that
        does not, its time has to tell.
        """
        recent, now = self._recent.get(instance_id), self._now
        if not recent:
            return ()
        if load.accepted is not None:
            came = frozenset(load.accepted)
            recent = [a for a in recent if a.time_s > now - FORGET_S and mark_of(a.job_id) not in came]
        else:
            since_s = max(min(load.time_s, now) - REACH_S, now - FORGET_S)
            recent = [a for a in recent if a.time_s > since_s]
        if recent:
            self._recent[instance_id] = recent
        else:
            del self._recent[instance_id]
        return recent

    def _drop_old(self, now: float) -> None:
        if not self.stale_s(now) or now - self._looked_s < _AGAIN_S:
            return
        self._looked_s = now
        kept = [a for a in self._pending() if now - a.time_s < HOLD_S and a.job_id not in self._over]
        self._recent = {}
        for assignment in kept:
            self._remember(assignment)
        self._over.clear()
        self._build()

    def _rebuild(self) -> None:
        for instance_id in list(self._recent):
            view = self._state.get(instance_id)
            self._unseen(instance_id, InstanceLoad() if view is None else view.load)
        self._cached_s = self._now
        self._build()

    def _build(self) -> None:
        view = self._state.view()
        of_others = chain.from_iterable(self._of_others(one) for one in view.instances if one.load.promised)
        self._index = ClusterIndex(
            view,
            (*self._pending(), *self.ledger.coming, *of_others),
            rng=self._rng,
            turn=self._index.turn if self._index is not None else 0,
            ledger=self.ledger,
            prefixes=self.prefixes,
            live=self._state,
        )

    def _pending(self) -> Iterator[Assignment]:
        for assignments in self._recent.values():
            yield from assignments
