"""A scheduler's memory of its own placements, over all broadcasts: unfinished work, decodes on their way, and turns.

The caller adds each placement and completes it when the job ends; policies only read it.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.domain.instance import ClusterView, InstanceState
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.answers import Answers
from shared.policy.assignment import Assignment, assignments
from shared.policy.claims import Claims
from shared.policy.class_needs import ClassNeeds

SETTLE_S = 1.0  # a job that was placed this long ago shows in the load of its instance
FORGET_S = 3600.0  # no job takes longer: its completion was lost


class Rotation:
    """Keys in turn, each as often as its weight says; with equal weights, plain round-robin.

    The next key is the one with the least (served + 1/2) / weight (Webster's order), so that weights of 4 and 1 give
    the turns a a b a a. Keys with a weight of 0 or less have no turn.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights
        self._next = {key: 0.5 / weight for key, weight in weights.items() if weight > 0}
        self._order = sorted((turn, key) for key, turn in self._next.items())

    def order(self) -> Iterator[str]:
        """The key whose turn it is, then the key whose turn it would be without that one, and so on."""
        return (key for _, key in self._order)

    def took(self, key: str) -> None:
        """Count a turn; unknown keys are ignored."""
        turn = self._next.get(key)
        if turn is None:
            return
        del self._order[bisect_left(self._order, (turn, key))]
        self._next[key] = turn + 1.0 / self.weights[key]
        insort(self._order, (self._next[key], key))


class _Work(NamedTuple):
    """An unfinished job's work, at an instance's slot."""

    slot: int
    score: float
    tokens: int
    time_s: float


class WorkloadLedger:
    """Work of unfinished jobs by instance, and the turns of rotations. Times are on the caller's clock.

    An instance has a slot, its position in `scores` and `tokens`. Source: Huawei 4.2, the mapper's list of workloads
    and its hook at completion.
    """

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}  # by job
        self._slots: dict[str, int] = {}
        self._jobs: list[dict[str, _Work]] = []  # the same by slot, oldest first
        self._free_slots: list[int] = []  # of instances that are gone
        self.scores: NDArray[np.float64] = np.zeros(16)  # by slot: Q of the paper
        self.tokens: NDArray[np.float64] = np.zeros(16)  # by slot: prompt and predicted tokens of unfinished jobs
        self._rotations: dict[str, Rotation] = {}
        self._coming: dict[str, Assignment] = {}
        self._coming_to: dict[str, dict[str, Assignment]] = {}  # the same by instance and job
        self.claims = Claims()
        self.answers = Answers()
        self.needs = ClassNeeds()

    def __len__(self) -> int:
        return len(self._work)

    def add(self, job: JobView, route: Route, now: float = 0.0) -> None:
        """Count a placement. A job that is placed again leaves its former place."""
        job_id = job.job_id
        prefill = route.prefill.instance_id if route.prefill else ""
        decode = route.decode.instance_id if route.decode else ""
        for rotation in self._rotations.values():
            rotation.took(prefill or decode)
            rotation.took(pair_key(prefill, decode))
        self._remove(job_id)
        self.claims.drop(job_id)
        self.answers.begun(job)
        self.needs.placed(job, now)
        for assignment in assignments(job, route, now):
            if assignment.coming:
                self._coming[job_id] = assignment
                self._coming_to.setdefault(assignment.instance_id, {})[job_id] = assignment
        if route.work is None:
            return
        slot = self.slot(prefill or decode)
        self._work[job_id] = self._jobs[slot][job_id] = _Work(slot, route.work.score, route.work.tokens, now)
        self.scores[slot] += route.work.score
        self.tokens[slot] += route.work.tokens

    def complete(self, job_id: str, output_tokens: int = 0, met: bool | None = None, now: float = 0.0) -> None:
        """Remove what was added for a job; jobs without an entry are ignored.

        output_tokens: of a whole answer. met: whether it met its targets, None where that is not known.
        """
        self.claims.drop(job_id)
        self.answers.ended(job_id, output_tokens)
        self.needs.ended(job_id, met, now)
        self._remove(job_id)

    def _remove(self, job_id: str) -> None:
        self.arrived(job_id)
        work = self._work.pop(job_id, None)
        if work is None:
            return
        slot = work.slot
        del self._jobs[slot][job_id]
        # Without jobs, an instance's sums are exactly 0: rounding errors do not add up over its life.
        busy = bool(self._jobs[slot])
        self.scores[slot] = max(0.0, self.scores[slot] - work.score) if busy else 0.0
        self.tokens[slot] = max(0.0, self.tokens[slot] - work.tokens) if busy else 0.0

    @property
    def coming(self) -> Collection[Assignment]:
        """Decodes that are bound to an instance and have not reached it yet."""
        return self._coming.values()

    def coming_to(self, instance_id: str) -> Collection[Assignment]:
        """The decodes of `coming` that are bound to that instance."""
        return self._coming_to[instance_id].values() if instance_id in self._coming_to else ()

    def arrived(self, job_id: str) -> Assignment | None:
        """Report that a job's decode has reached an instance, whose loads show it from now on."""
        assignment = self._coming.pop(job_id, None)
        if assignment is not None:
            there = self._coming_to[assignment.instance_id]
            del there[job_id]
            if not there:
                del self._coming_to[assignment.instance_id]
        return assignment

    def settle(self, view: ClusterView, now: float) -> None:
        """Forget work whose completion was missed: on instances that are gone or idle, or older than `FORGET_S`.

        For every broadcast of a whole cluster: O(instances + forgotten jobs). The slots of instances that are not in
        `view` are reused.
        """
        if not self._work and len(self._slots) <= len(view.instances):
            return
        busy = {v.info.instance_id: v.load.inflight > 0 for v in view.instances if v.state is not InstanceState.DEAD}
        for instance_id, slot in self._slots.items():
            jobs, is_busy = self._jobs[slot], busy.get(instance_id)
            kept_s = -inf if is_busy is None else FORGET_S if is_busy else SETTLE_S
            while jobs:
                job_id, work = next(iter(jobs.items()))
                if now - work.time_s <= kept_s:
                    break
                self.complete(job_id)
        known = {v.info.instance_id for v in view.instances}
        for instance_id in [one for one in self._slots if one not in known]:
            self._free_slots.append(self._slots.pop(instance_id))  # it has no jobs, so its sums are 0

    def score(self, instance_id: str) -> float:
        """Sum of the unfinished jobs' scores on the instance."""
        slot = self._slots.get(instance_id)
        return 0.0 if slot is None else float(self.scores[slot])

    def tokens_at(self, instance_id: str) -> int:
        """Sum of the unfinished jobs' prompt and predicted tokens on the instance."""
        slot = self._slots.get(instance_id)
        return 0 if slot is None else int(self.tokens[slot])

    def slot(self, instance_id: str) -> int:
        """Position of an instance in `scores` and `tokens`."""
        slot = self._slots.get(instance_id)
        if slot is None:
            slot = self._slots[instance_id] = self._free_slots.pop() if self._free_slots else len(self._jobs)
        if slot == len(self._jobs):
            self._jobs.append({})
            if slot >= len(self.scores):
                self.scores = np.concatenate((self.scores, np.zeros(len(self.scores))))
                self.tokens = np.concatenate((self.tokens, np.zeros(len(self.tokens))))
        return slot

    def slots(self, instance_ids: Sequence[str]) -> NDArray[np.intp]:
        return np.fromiter((self.slot(one) for one in instance_ids), np.intp, len(instance_ids))

    def rotation(self, name: str, weights: Mapping[str, float]) -> Rotation:
        """The rotation of that name. When keys or weights have changed, its turns are counted anew."""
        known = self._rotations.get(name)
        if known is None or (known.weights is not weights and known.weights != weights):
            known = self._rotations[name] = Rotation(weights)
        known.weights = weights
        return known


def pair_key(prefill: str, decode: str) -> str:
    """A pair of instances as a key of a rotation; either id may be empty."""
    return f"{prefill}>{decode}"
