"""Whether the classifier is right: rolling, beside who says the commonest bucket and who looks at the prompt's length.

Pure: no clock; each finished answer comes with what the classifier had said of it, so that several predictors that
hear of the same answers judge alike, and none has to remember whom it told what.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from predictor.buckets import Buckets, predict
from predictor.observed import ObservedLengths

WINDOW = 500  # answers that it is judged by
FEWEST = 200  # before so many, nothing is said against it
MARGIN = 0.02  # by so much it has to be better than the commonest bucket to be believed again
RECENT = 200  # pairs that are shown


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. model, classified: which classifier was asked, and the bucket that it said; "" and -1: none.

    expected_tokens: what was answered to who asked, by whom ever.
    """

    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    model: str = ""
    classified: int = -1
    expected_tokens: float | None = None

    @property
    def cut(self) -> bool:
        """Whether it might have gone on."""
        return self.max_tokens is not None and self.output_tokens >= self.max_tokens


class _Right(NamedTuple):
    classifier: float
    commonest: float
    prompt_length: float
    error_tokens: float

    def plus(self, other: "_Right", sign: int = 1) -> "_Right":
        return _Right(*(mine + sign * more for mine, more in zip(self, other, strict=True)))


class Reality:
    """Judges one classifier. `believed` is whether it answers; `why` says why not."""

    def __init__(self, model: str, buckets: Buckets, half_life: float) -> None:
        self.model = model
        self.believed, self.why = True, ""
        self._buckets = buckets
        self._lengths = ObservedLengths(buckets, half_life)
        self._right: deque[_Right] = deque()
        self._sums = _Right(0.0, 0.0, 0.0, 0.0)  # over them
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def doubt(self, why: str) -> None:
        """Begin without belief in it."""
        self.believed, self.why = False, why

    def observe(self, answer: Answer) -> bool:
        """Judge by one more; whether `believed` has changed."""
        if answer.expected_tokens is not None:
            self._recent.append((answer.expected_tokens, answer.output_tokens))
        if answer.model == self.model and answer.classified >= 0 and self._lengths.observations:
            self._count(self._judged(answer))
        self._lengths.observe(answer.prompt_tokens, answer.output_tokens, cut=answer.cut)
        return self._decide()

    @property
    def accuracy(self) -> dict[str, float | None]:
        """Shares that were right, of the classifier and of either baseline; None before the first answer."""
        names, count = ("classifier", "commonest", "prompt_length"), len(self._right)
        return {name: getattr(self._sums, name) / count if count else None for name in names}

    def describe(self) -> dict[str, Any]:
        """For people."""
        count = len(self._right)
        return {
            "model": self.model,
            "answers": count,
            "accuracy": self.accuracy,
            "mean_error_tokens": self._sums.error_tokens / count if count else None,
            "believed": self.believed,
            "recent": [list(pair) for pair in self._recent],
        }

    def _count(self, one: _Right) -> None:
        self._right.append(one)
        self._sums = self._sums.plus(one)
        if len(self._right) > WINDOW:
            self._sums = self._sums.plus(self._right.popleft(), -1)

    def _judged(self, answer: Answer) -> _Right:
        true = self._buckets.of(answer.output_tokens)
        overall = predict(self._lengths.overall(), self._buckets, answer.max_tokens, "")
        alone = self._lengths.predict(answer.prompt_tokens, answer.max_tokens)
        error = abs((answer.expected_tokens or 0.0) - answer.output_tokens)
        return _Right(answer.classified == true, overall.bucket == true, alone.bucket == true, error)

    def _decide(self) -> bool:
        if len(self._right) < FEWEST:
            return False
        found = self.accuracy
        own, base = found["classifier"] or 0.0, found["commonest"] or 0.0
        before = self.believed
        if self.believed and own <= base:
            self.doubt(
                f"right for {own:.0%} of the last {len(self._right)} answers, no better than the commonest bucket, "
                f"which is for {base:.0%}"
            )
        elif not self.believed and own >= base + MARGIN:
            self.believed, self.why = True, ""
        return self.believed is not before
