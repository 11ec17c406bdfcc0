"""Room that is kept for jobs which have been held for long: no later job takes it while it becomes free.

A job is held in its gateway while its KV finds no room. One that needs much would wait for ever where small jobs of
other classes or gateways take each bit of room as soon as an answer ends. So once it has been held for `KEEP_S`, what
becomes free at the decode instance that it was to go to counts as taken for all who ask later, until it fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.domain.job import JobView

KEEP_S = 2.0  # held so long, a job has room kept for it; before jobs of a heavier class, longer by the weights' ratio
MOST = 32  # claims that a decision counts, the oldest; of each gateway process and class only one job asks
FORGET_S = 1.0  # one that has not asked for so long is gone, or placed by another scheduler

Kept = Sequence[tuple[int, int]]  # tokens of KV that a job takes when it starts, and those of its answer


@dataclass(slots=True)
class _Claim:
    instance_id: str
    tokens: int
    answer: int
    weight: float
    since_s: float
    asked_s: float


class Claims:
    """The jobs that are held, oldest first. Times are on the driver's clock."""

    def __init__(self) -> None:
        self._held: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, job: JobView, instance_id: str, tokens: int, answer: int, now: float) -> None:
        """The job is held: it may start at that instance when there is room, or wherever there is room before."""
        known = self._held.get(job.job_id)
        if known is None:
            self._forget(now)
            self._held[job.job_id] = _Claim(instance_id, tokens, answer, job.slo.weight, now, now)
            return
        known.asked_s, known.tokens, known.answer = now, tokens, answer
        if now - known.since_s < KEEP_S:
            known.instance_id = instance_id  # later it stays: what has become free there is for this job

    def move(self, job_id: str, instance_id: str) -> None:
        """Its instance takes no jobs any more."""
        self._held[job_id].instance_id = instance_id

    def drop(self, job_id: str) -> None:
        """It is placed, or over."""
        self._held.pop(job_id, None)

    def held_s(self, job_id: str, now: float) -> float:
        """How long it has been held."""
        known = self._held.get(job_id)
        return now - known.since_s if known is not None else 0.0

    def instance_of(self, job_id: str) -> str:
        """Where room is to become free for it; empty where it is not held."""
        known = self._held.get(job_id)
        return known.instance_id if known is not None else ""

    def before(self, job: JobView, now: float) -> dict[str, list[tuple[int, int]]]:
        """By instance, the room that is kept for others when this job asks. One that has begun takes what it needs."""
        found: dict[str, list[tuple[int, int]]] = {}
        if not self._held or job.begun:
            return found
        left = MOST
        for job_id, one in self._held.items():
            if job_id == job.job_id:
                break  # the others have been held for less long
            if now - one.asked_s > FORGET_S or now - one.since_s < KEEP_S * max(1.0, job.slo.weight / one.weight):
                continue
            found.setdefault(one.instance_id, []).append((one.tokens, one.answer))
            left -= 1
            if not left:
                break
        return found

    def _forget(self, now: float) -> None:
        for job_id in [job_id for job_id, one in self._held.items() if now - one.asked_s > FORGET_S]:
            del self._held[job_id]
