"""Claims: KV memory that is kept for jobs which have been held for long.

A job is held in its gateway while its KV finds no room. A large one would wait for ever where small jobs of other
classes or gateways use each bit of memory as soon as an answer ends. So once a job has been held for `KEEP_S`, the
memory that becomes free at its decode instance counts as used for all later jobs, until the held job fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.domain.job import JobView

KEEP_S = 2.0  # held for this long, a job has a claim; against jobs of a heavier class after the weights' ratio as long
MOST = 32  # claims that a decision counts, the oldest; of each gateway process and class only one job asks
FORGET_S = 1.0  # a job that has not asked again for this long is gone, or placed by another scheduler

Kept = Sequence[tuple[int, int]]  # tokens of KV that a job needs when it starts, and tokens of its answer


@dataclass(slots=True)
class _Claim:
    instance_id: str
    tokens: int
    answer: int
    weight: float
    since_s: float
    asked_s: float


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
            for job_id in [one for one, claim in self._held.items() if now - claim.asked_s > FORGET_S]:
                del self._held[job_id]
            self._held[job.job_id] = _Claim(instance_id, tokens, answer, job.slo.weight, now, now)
            return
        known.asked_s, known.tokens, known.answer = now, tokens, answer
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
        left = MOST
        for job_id, claim in self._held.items():
            if job_id == job.job_id:
                break  # the others have been held for less long
            if now - claim.asked_s > FORGET_S:
                continue
            if now - claim.since_s < KEEP_S * max(1.0, job.slo.weight / claim.weight):
                continue
            found.setdefault(claim.instance_id, []).append((claim.tokens, claim.answer))
            left -= 1
            if not left:
                break
        return found
