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
        self.mix(Lengths(tokens, tokens))

    def mix(self, lengths: Lengths) -> None:
        self._count += 1
        weight = 1.0 / min(self._count, RECENT)
        self._mean += (lengths.mean - self._mean) * weight
        self._inverse += (1.0 / lengths.brief - self._inverse) * weight

    @property
    def lengths(self) -> Lengths:
        return Lengths(self._mean, 1.0 / self._inverse)


class _Alike:
    """Answers predicted to be in the same bucket: how long they turned out, and what was said of them on average."""

    __slots__ = ("_said", "seen")

    def __init__(self, first: Lengths) -> None:
        self.seen, self._said = _Seen(first, DOUBT), _Seen(first, DOUBT)

    def add(self, tokens: int, said: Lengths) -> None:
        self.seen.add(tokens)
        self._said.mix(said)

    def corrected(self, said: Lengths) -> Lengths:
        seen, usual = self.seen.lengths, self._said.lengths
        return Lengths(said.mean * seen.mean / usual.mean, said.brief * seen.brief / usual.brief)


class Answers:
    """What to expect of an answer, and of the answers of all."""

    def __init__(self) -> None:
        self._all = _Seen(UNKNOWN_LENGTHS, 0)
        self._of: dict[int, _Alike] = {}  # by bucket
        self._said: dict[str, tuple[int, Lengths] | None] = {}  # of jobs under way

    def begun(self, job: JobView) -> None:
        """A job was placed."""
        if job.prediction is None:
            self._said[job.job_id] = None
            return
        said = within(job.prediction)
        self._said[job.job_id] = job.prediction.bucket, said
        if job.prediction.bucket not in self._of:
            self._of[job.prediction.bucket] = _Alike(said)

    def ended(self, job_id: str, tokens: int) -> None:
        """It gave so many tokens; none when it failed or nobody knows."""
        said = self._said.pop(job_id, None)
        if tokens > 0:
            self._all.add(tokens)
            if said is not None:
                self._of[said[0]].add(tokens, said[1])

    @property
    def all(self) -> Lengths:
        """Of any answer."""
        return self._all.lengths

    def expected(self, job: JobView) -> Lengths:
        """Of this job's answer: what is predicted, corrected by how answers predicted alike turned out; never more
        than its max_tokens.
        """
        found = self._all.lengths
        if job.prediction is not None:
            alike, found = self._of.get(job.prediction.bucket), within(job.prediction)
            found = alike.corrected(found) if alike is not None else found
        most = float(max(1, job.max_tokens))
        return Lengths(min(most, found.mean), min(most, found.brief))


def within(prediction: LengthPrediction) -> Lengths:
    """Of a length that is spread as predicted, evenly within a bucket; an open end counts as twice the lower one."""
    spread = prediction.spread()
    inverse = sum(part * log(upper / lower) / (upper - lower) for lower, upper, part in spread)
    return Lengths(prediction.mean, 1.0 / inverse)
