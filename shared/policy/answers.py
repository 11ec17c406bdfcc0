"""How long answers turn out: learned from those that ended, by what was predicted of them."""

from collections import deque
from math import ceil, log
from typing import NamedTuple

from shared.domain.job import JobView, LengthPrediction

FIRST_TOKENS = 200.0  # of an answer, on average, before the first has ended
RECENT = 256  # answers that a mean rests on, the newest most
BOUND_SHARE = 0.9  # of answers are no longer than what is reckoned with for their room
FEWEST = 16  # answers before their lengths say how long one may be
UNSEEN_TOKENS = 1024  # before that, at most; a client that names no max_tokens has asked for all of the context
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


class _Spread:
    """How long answers of one kind have been, for a bound that most of them keep."""

    __slots__ = ("_bound", "_lengths")

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=RECENT)
        self._bound: float | None = None

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)
        self._bound = None

    def bound(self) -> float | None:
        """The length that `BOUND_SHARE` of the last ones did not exceed; None before `FEWEST` have ended."""
        if len(self._lengths) < FEWEST:
            return None
        if self._bound is None:
            ordered = sorted(self._lengths)
            self._bound = float(ordered[min(len(ordered) - 1, int(BOUND_SHARE * len(ordered)))])
        return self._bound


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
        self._spread = _Spread()
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
            self._spread.add(tokens)
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

    def bound(self, job: JobView) -> int:
        """Tokens of this job's answer for which room is kept: nine in ten are no longer. At most its max_tokens."""
        if job.prediction is not None and job.prediction.confidence > 0.0:
            found = job.prediction.quantile(BOUND_SHARE)
        else:
            seen = self._spread.bound()
            found = UNSEEN_TOKENS if seen is None else seen
        return max(1, min(job.max_tokens, ceil(found)))


def within(prediction: LengthPrediction) -> Lengths:
    """Of a length that is spread as predicted, evenly within a bucket; an open end counts as twice the lower one."""
    spread = prediction.spread()
    inverse = sum(part * log(upper / lower) / (upper - lower) for lower, upper, part in spread)
    return Lengths(prediction.mean, 1.0 / inverse)
