"""How long answers turn out: learned from those that ended, by what was predicted of them."""

from math import log
from typing import NamedTuple

from shared.domain.job import JobView, LengthPrediction

FIRST_TOKENS = 200.0  # of an answer, on average, before the first has ended
RECENT = 256  # answers that a mean rests on, the newest most
DOUBT = 16  # answers that a prediction counts for, against what is seen of answers predicted alike


class Lengths(NamedTuple):
    """Tokens of answers of one sort. brief: the harmonic mean, over which a delay of one of them is spread."""

    mean: float
    brief: float


UNKNOWN_LENGTHS = Lengths(FIRST_TOKENS, FIRST_TOKENS / 4.0)


class _Seen:
    """Running means of lengths and of their inverses; they begin with what was expected, worth `count` answers."""

    __slots__ = ("_count", "_inverse", "_mean")

    def __init__(self, first: Lengths, count: int) -> None:
        self._mean, self._inverse, self._count = first.mean, 1.0 / first.brief, count

    def add(self, tokens: int) -> None:
        self._count += 1
        weight = 1.0 / min(self._count, RECENT)
        self._mean += (tokens - self._mean) * weight
        self._inverse += (1.0 / tokens - self._inverse) * weight

    @property
    def lengths(self) -> Lengths:
        return Lengths(self._mean, 1.0 / self._inverse)


class Answers:
    """What to expect of an answer, and of the answers of all."""

    def __init__(self) -> None:
        self._all = _Seen(UNKNOWN_LENGTHS, 0)
        self._of: dict[int, _Seen] = {}  # by bucket
        self._bucket: dict[str, int | None] = {}  # of jobs under way

    def begun(self, job: JobView) -> None:
        """A job was placed."""
        self._bucket[job.job_id] = job.prediction.bucket if job.prediction is not None else None
        if job.prediction is not None and job.prediction.bucket not in self._of:
            self._of[job.prediction.bucket] = _Seen(within(job.prediction), DOUBT)

    def ended(self, job_id: str, tokens: int) -> None:
        """It gave so many tokens; none when it failed or nobody knows."""
        bucket = self._bucket.pop(job_id, None)
        if tokens > 0:
            self._all.add(tokens)
            if bucket is not None:
                self._of[bucket].add(tokens)

    @property
    def all(self) -> Lengths:
        """Of any answer."""
        return self._all.lengths

    def expected(self, job: JobView) -> Lengths:
        """Of this job's answer; never more than its max_tokens."""
        seen = self._of.get(job.prediction.bucket) if job.prediction is not None else self._all
        found = seen.lengths if seen is not None else within(job.prediction) if job.prediction else self._all.lengths
        most = float(max(1, job.max_tokens))
        return Lengths(min(most, found.mean), min(most, found.brief))


def within(prediction: LengthPrediction) -> Lengths:
    """Of a length that may be anywhere in a predicted range; an open end counts as twice the lower one."""
    lower = max(1, prediction.lower_tokens)
    upper = max(lower + 1, min(prediction.upper_tokens, 2 * lower if lower > 1 else prediction.upper_tokens))
    return Lengths((lower + upper) / 2.0, (upper - lower) / log(upper / lower))
