"""How long answers turn out: learned from those that ended, by what was predicted of them."""

from math import ceil, log
from typing import NamedTuple

from shared.domain.job import JobView, LengthPrediction

FIRST_TOKENS = 200.0  # of an answer, on average, before the first has ended
RECENT = 256  # answers that a mean rests on, the newest most
FEWEST = 16  # answers before their lengths say how long one may be
UNSEEN_TOKENS = 1024  # before that, at most; a client that names no max_tokens has asked for all of the context
DOUBT = 16  # answers that a prediction counts for, against what is seen of answers predicted alike


class Lengths(NamedTuple):
    """Tokens of answers of one sort. brief: the harmonic mean, over which a delay of one of them is spread."""

    mean: float
    brief: float


UNKNOWN_LENGTHS = Lengths(FIRST_TOKENS, FIRST_TOKENS / 4.0)


class _Guess(NamedTuple):
    """Of a job's answer: what is predicted, what is expected, and mean lengths by the ways to guess them."""

    said: Lengths | None
    expected: Lengths
    by_way: dict[str, float]


class _Seen:
    """Running means of lengths and of their inverses; they begin with what was expected, worth `count` answers."""

    __slots__ = ("_count", "_inverse", "_mean", "lengths")

    def __init__(self, first: Lengths, count: int) -> None:
        self._mean, self._inverse, self._count = first.mean, 1.0 / first.brief, count
        self.lengths = first

    def add(self, tokens: int) -> None:
        self.mix(Lengths(tokens, tokens))

    def mix(self, lengths: Lengths) -> None:
        self._count += 1
        weight = 1.0 / min(self._count, RECENT)
        self._mean += (lengths.mean - self._mean) * weight
        self._inverse += (1.0 / lengths.brief - self._inverse) * weight
        self.lengths = Lengths(self._mean, 1.0 / self._inverse)


class _Error:
    """By how much guesses of one way were off, in tokens, on average over the last answers."""

    __slots__ = ("_count", "mean")

    def __init__(self) -> None:
        self.mean, self._count = 0.0, 0

    def add(self, off: float) -> None:
        self._count += 1
        self.mean += (off - self.mean) / min(self._count, RECENT)


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
        self._asked = 0.5  # of max_tokens, what an answer comes to on average
        self._ended = 0
        self._guesses: dict[str, tuple[int, dict[str, float]]] = {}  # of jobs under way: max_tokens, and tokens by way
        self._errors = {way: _Error() for way in ("all", "asked", "predicted")}
        self._of: dict[int, _Alike] = {}  # by bucket
        self._said: dict[str, tuple[int, Lengths] | None] = {}  # of jobs under way
        self._newest: tuple[JobView, _Guess] | None = None  # of the last job: one decision needs it several times

    def begun(self, job: JobView) -> None:
        """A job was placed."""
        guess = self._guess(job)
        self._guesses[job.job_id] = job.max_tokens, guess.by_way
        said = guess.said
        if job.prediction is None or said is None:
            self._said[job.job_id] = None
            return
        self._said[job.job_id] = job.prediction.bucket, said
        if job.prediction.bucket not in self._of:
            self._of[job.prediction.bucket] = _Alike(said)

    def ended(self, job_id: str, tokens: int) -> None:
        """It gave so many tokens; none when it failed or nobody knows."""
        self._newest = None
        said = self._said.pop(job_id, None)
        most, guesses = self._guesses.pop(job_id, (0, dict[str, float]()))
        if tokens > 0:
            for way, guess in guesses.items():
                self._errors[way].add(abs(tokens - guess))
            self._ended += 1
            if most > 0:
                self._asked += (min(1.0, tokens / most) - self._asked) / min(self._ended, RECENT)
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
        return self._guess(job).expected

    def bound(self, job: JobView) -> int:
        """Tokens of this job's answer for which room is kept, at most its max_tokens.

        Of the ways to guess (what is predicted, the usual length, the usual share of max_tokens) the one that was off
        least of late: what many answers come to together counts. Before a few have ended what is predicted, or
        max_tokens.
        """
        guesses = self._guess(job).by_way
        if self._ended < FEWEST:
            found = guesses.get("predicted", float(UNSEEN_TOKENS))
        else:
            way = min(guesses, key=lambda one: self._errors[one].mean)
            found = guesses[way]
        return max(1, min(job.max_tokens, ceil(found)))

    def _guess(self, job: JobView) -> "_Guess":
        if self._newest is not None and self._newest[0] is job:
            return self._newest[1]
        most, usual, said = float(max(1, job.max_tokens)), self._all.lengths, None
        found = usual
        if job.prediction is not None:
            alike, said = self._of.get(job.prediction.bucket), within(job.prediction)
            found = alike.corrected(said) if alike is not None else said
        expected = Lengths(min(most, found.mean), min(most, found.brief))
        by_way = {"all": min(most, usual.mean), "asked": self._asked * most}
        if job.prediction is not None and job.prediction.confidence > 0.0:
            by_way["predicted"] = expected.mean
        guess = _Guess(said, expected, by_way)
        self._newest = job, guess
        return guess


def within(prediction: LengthPrediction) -> Lengths:
    """Of a length that is spread as predicted, evenly within a bucket; an open end counts as twice the lower one."""
    mean = inverse = 0.0
    for lower, upper, part in prediction.spread():
        mean += part * (lower + upper) / 2.0
        inverse += part * log(upper / lower) / (upper - lower)
    return Lengths(mean, 1.0 / inverse)
