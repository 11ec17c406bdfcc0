"""A scheduler's memory of its own placements, over all broadcasts: unfinished work, decodes on their way, held jobs and
turns.

The caller adds each placement and completes it when the job ends; policies only read it.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from shared.domain.instance import ClusterView, InstanceState, Promised
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.class_demand import ClassDemand
from shared.policy.decode_admission import is_heavy
from shared.policy.output_lengths import OutputLengths
from shared.policy.sessions import Sessions
from shared.policy.truth import EstimateErrors

SETTLE_S = 1.0  # a job that was placed this long ago shows in the load of its instance
FORGET_S = 3600.0  # no job takes longer: its completion was lost


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work given to an instance at `time_s` (unix seconds), perhaps not yet in the instance's load.

    coming: a decode that reaches the instance only after (a part of) its prompt was computed on another one.
    answer_tokens: of a decode, for which room is kept from `lead_steps` steps of its instance on, beside the prompt's
    tokens less the `saved_tokens` that the instance holds.
    """

    instance_id: str
    time_s: float
    prefill_tokens: int = 0  # prompt tokens that the instance has to compute
    decode_tokens: int = 0  # prompt tokens of a decode; 0 when it is none
    heavy: bool = False
    job_id: str = ""
    coming: bool = False
    import_tokens: int = 0  # of KV that comes from another instance
    export_tokens: int = 0  # of KV in its prefix cache that another instance pulls
    answer_tokens: int = 0
    lead_steps: int = 0
    saved_tokens: int = 0


def mark_of(job_id: str) -> int:
    """A short mark of a job's id for loads: two jobs of one instance and second share it once in billions."""
    return crc32(job_id.encode())


def promise_of(bound: Assignment) -> Promised:
    """A decode on its way as the instance's load shows it to schedulers that did not place it."""
    return Promised(
        mark_of(bound.job_id),
        bound.decode_tokens,
        bound.answer_tokens,
        bound.lead_steps,
        bound.saved_tokens,
        bound.import_tokens,
        bound.prefill_tokens,
        bound.heavy,
    )


def promised_to(instance_id: str, promised: Promised, now: float) -> Assignment:
    """The assignment that such a load shows; the inverse of `promise_of`."""
    return Assignment(
        instance_id,
        now,
        promised.prefill_tokens,
        promised.decode_tokens,
        promised.heavy,
        coming=True,
        import_tokens=promised.import_tokens,
        answer_tokens=promised.answer_tokens,
        lead_steps=promised.lead_steps,
        saved_tokens=promised.saved_tokens,
    )


def assignments(job: JobView, route: Route, now: float) -> tuple[Assignment, ...]:
    """The assignments of a route, to be booked so that later decisions count them."""
    booked = []
    pulled = route.pull.tokens if route.pull is not None else 0
    if route.prefill is not None:
        held = max(route.prefill_saved, pulled)
        booked.append(
            Assignment(
                route.prefill.instance_id,
                now,
                prefill_tokens=route.split - held,
                job_id=job.job_id,
                import_tokens=held - route.prefill_saved,
            )
        )
    if route.decode is not None:
        saved, coming = route.decode_saved, route.prefill is not None or job.leaves
        held = saved if coming else max(saved, pulled)
        moved = job.prompt_tokens if job.leaves else route.split  # whose KV comes from another instance
        booked.append(
            Assignment(
                route.decode.instance_id,
                now,
                prefill_tokens=0 if job.leaves else job.prompt_tokens - max(route.split, held),
                decode_tokens=job.prompt_tokens,
                heavy=is_heavy(job),
                job_id=job.job_id,
                coming=coming,
                import_tokens=max(0, moved - saved) if coming else held - saved,
                answer_tokens=route.answer_tokens or job.max_tokens,
                lead_steps=route.lead_steps if coming else 0,
                saved_tokens=saved,
            )
        )
    if route.pull is not None:
        exported = route.pulled_tokens
        booked.append(Assignment(route.pull.holder.instance_id, now, job_id=job.job_id, export_tokens=exported))
    return tuple(booked)


# Claims: KV memory that is kept for jobs which have been held for long. A job is held in its gateway while its KV finds
# no room. A large one would wait for ever where small jobs of other classes or gateways use each bit of memory as soon
# as an answer ends. So once a job has been held for `KEEP_S`, the memory that becomes free at its decode instance
# counts as used for all later jobs, until the held job fits.

KEEP_S = 2.0  # held for this long, a job has a claim; against jobs of a heavier class after the weights' ratio as long
COUNTED = 32  # claims that a decision counts, the oldest; of each gateway process and class only one job asks
SILENT_S = 1.0  # a job without another request for this long is gone, or placed by another scheduler

Kept = Sequence[tuple[int, int]]  # tokens of KV that a job needs when it starts, and tokens of its answer


@dataclass(slots=True)
class _Claim:
    instance_id: str
    tokens: int
    answer: int
    weight: float
    since_s: float
    requested_s: float


class Claims:
    """The held jobs, oldest first. Times are on the caller's clock."""

    def __init__(self) -> None:
        self._held: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, job: JobView, instance_id: str, tokens: int, answer: int, now: float) -> None:
        """Record that a job is held until there is room at that instance, or anywhere before."""
        known = self._held.get(job.job_id)
        if known is None:
            for job_id in [one for one, claim in self._held.items() if now - claim.requested_s > SILENT_S]:
                del self._held[job_id]
            self._held[job.job_id] = _Claim(instance_id, tokens, answer, job.slo.weight, now, now)
            return
        known.requested_s, known.tokens, known.answer = now, tokens, answer
        if now - known.since_s < KEEP_S:
            known.instance_id = instance_id  # later it stays: the memory that has become free there is for this job

    def move(self, job_id: str, instance_id: str) -> None:
        """Give a held job another instance, when its own no longer accepts jobs."""
        self._held[job_id].instance_id = instance_id

    def drop(self, job_id: str) -> None:
        """Report that a job was placed or has ended."""
        self._held.pop(job_id, None)

    def held_s(self, job_id: str, now: float) -> float:
        """For how long a job has been held."""
        known = self._held.get(job_id)
        return now - known.since_s if known is not None else 0.0

    def instance_of(self, job_id: str) -> str:
        """The instance where a job is to find room; empty when the job is not held."""
        known = self._held.get(job_id)
        return known.instance_id if known is not None else ""

    def before(self, job: JobView, now: float) -> dict[str, list[tuple[int, int]]]:
        """By instance, the claims of other jobs that come before this one; none before a job that has begun."""
        found: dict[str, list[tuple[int, int]]] = {}
        if not self._held or job.begun:
            return found
        left = COUNTED
        for job_id, claim in self._held.items():
            if job_id == job.job_id:
                break  # the others have been held for less long
            if now - claim.requested_s > SILENT_S:
                continue
            if now - claim.since_s < KEEP_S * max(1.0, job.slo.weight / claim.weight):
                continue
            found.setdefault(claim.instance_id, []).append((claim.tokens, claim.answer))
            left -= 1
            if not left:
                break
        return found


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
        self.output_lengths = OutputLengths()
        self.class_demand = ClassDemand()
        self.sessions = Sessions()
        self.errors = EstimateErrors()

    def __len__(self) -> int:
        return len(self._work)

    def add(self, job: JobView, route: Route, now: float = 0.0) -> tuple[Assignment, ...]:
        """Count a placement; returns its assignments, to be booked in the index. A job that is placed again leaves its
        former place.
        """
        job_id = job.job_id
        prefill = route.prefill.instance_id if route.prefill else ""
        decode = route.decode.instance_id if route.decode else ""
        for rotation in self._rotations.values():
            rotation.took(prefill or decode)
            rotation.took(pair_key(prefill, decode))
        self._remove(job_id)
        self.claims.drop(job_id)
        self.output_lengths.started(job)
        self.class_demand.placed(job, now)
        if job.session:
            self.sessions.placed(job, route)
        assigned = assignments(job, route, now)
        for assignment in assigned:
            if assignment.coming:
                self._coming[job_id] = assignment
                self._coming_to.setdefault(assignment.instance_id, {})[job_id] = assignment
        if route.work is None:
            return assigned
        slot = self.slot(prefill or decode)
        self._work[job_id] = self._jobs[slot][job_id] = _Work(slot, route.work.score, route.work.tokens, now)
        self.scores[slot] += route.work.score
        self.tokens[slot] += route.work.tokens
        return assigned

    def complete(self, job_id: str, output_tokens: int = 0, met: bool | None = None, now: float = 0.0) -> None:
        """Remove what was added for a job; jobs without an entry are ignored.

        output_tokens: of a whole answer. met: whether it met its targets, None where that is not known.
        """
        self.claims.drop(job_id)
        self.output_lengths.ended(job_id, output_tokens)
        self.class_demand.ended(job_id, met, now)
        if job_id in self.sessions.under_way:
            self.sessions.ended(job_id, output_tokens, now)
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
