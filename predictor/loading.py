"""Loads a checkpoint into service: device, precision, and how much of a prompt the classifier can read within the
deadline. torch is imported when a checkpoint is loaded. `Query` is one prediction to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from predictor.checkpoint import BrokenCheckpoint, CheckpointMeta
from predictor.served import ServedTokenizer, estimate_tokens, load_served
from predictor.settings import PredictorSettings
from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from predictor.model import LengthClassifier


@dataclass(frozen=True, slots=True)
class Query:
    """Either `text` or token ids of the served model's prompt, or of its ends."""

    timeout_s: float
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    max_tokens: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the whole prompt, estimated if the caller did not count them."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        return len(self.token_ids) if self.text is None else estimate_tokens(self.text)


TRIES = 3
SHARE = 0.5  # of the deadline that one full prompt may take: the rest is for those before it
FEWEST_TOKENS = 32
_PROMPT = Query(inf, text="How long will the answer to this question be? " * 8)
WARM_UP = ((_PROMPT,), (_PROMPT,) * 4)


class TextClassifier(Protocol):
    """What the service needs of a classifier."""

    meta: CheckpointMeta

    def encode(self, text: str) -> list[int]:
        """The token ids that it looks at."""
        ...

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Probabilities of the buckets, for each row."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A classifier, and the means to turn token ids into its input; without these, ids are not for it.

    runs: device, dtype, input tokens, and milliseconds for a full prompt.
    warm_up: batches to compute before the first query.
    """

    classifier: TextClassifier
    served: ServedTokenizer | None
    served_error: str = ""
    runs: dict[str, Any] | None = None
    warm_up: Sequence[Sequence[Query]] = ()

    @property
    def model(self) -> str:
        """Which classifier it is, alike for all who load it."""
        return blake2b(msgspec.json.encode(self.classifier.meta), digest_size=6).hexdigest()

    def encode(self, query: Query) -> list[int]:
        """See `Batchable`."""
        if query.text is not None:
            return self.classifier.encode(query.text)
        assert self.served is not None
        return self.classifier.encode(self.served.seen_text(list(query.token_ids)))

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """See `Batchable`."""
        return self.classifier.batch(rows)


def load_from_disk(settings: PredictorSettings) -> Loaded:
    """Load the checkpoint and the served model's tokenizer. Raises BrokenCheckpoint."""
    classifier, runs = _load_classifier(settings)
    served, error = None, "no served model is set: token ids are answered from observed lengths"
    if settings.model:
        try:
            served, error = load_served(settings.model), ""
        except InvalidRequest as refused:
            error = refused.message
    return Loaded(classifier, served, error, runs, WARM_UP)


def has_cuda() -> bool:
    """Whether torch sees a CUDA device here."""
    import torch

    return torch.cuda.is_available()


def _load_classifier(settings: PredictorSettings) -> tuple[TextClassifier, dict[str, Any]]:
    folder = settings.checkpoint
    assert folder is not None
    try:
        from predictor.model import load_classifier  # torch: only where there is a checkpoint
    except ImportError as error:
        raise BrokenCheckpoint(f"{folder}: torch and transformers are needed: {error}") from error
    device = settings.device
    if device == "auto":
        device = "cuda" if has_cuda() else "cpu"
    elif device.startswith("cuda") and not has_cuda():
        raise BrokenCheckpoint(f"device {device!r}: torch sees no such device here")
    dtype = settings.dtype if settings.dtype == "bfloat16" else "float32"
    whole = load_classifier(folder, settings.threads, dtype, device)
    if settings.input_tokens:
        whole = whole.looking_at(settings.input_tokens)
    if settings.dtype == "int8":
        if device != "cpu":
            raise BrokenCheckpoint(f"dtype int8 is for a CPU, not for {device!r}")
        whole, dtype = whole.quantised(), "int8"
    elif settings.dtype == "auto" and device == "cpu":
        whole, dtype = _quick_enough(whole, SHARE * settings.timeout_ms)
    told = {"device": device, "dtype": dtype, "input_tokens": whole.input_tokens, "full_prompt_ms": _takes_ms(whole)}
    return whole, told


def _quick_enough(whole: "LengthClassifier", most_ms: float) -> "tuple[LengthClassifier, str]":
    """As it is, else in int8, else with fewer tokens: the first that computes a full prompt within `most_ms`."""
    before_ms = _takes_ms(whole)
    if before_ms <= most_ms:
        return whole, "float32"
    quantised = whole.quantised()
    after_ms = _takes_ms(quantised)
    best, dtype = (quantised, "int8") if after_ms < before_ms else (whole, "float32")
    taken_ms = min(before_ms, after_ms)
    while taken_ms > most_ms and best.input_tokens > FEWEST_TOKENS:
        best = best.looking_at(max(FEWEST_TOKENS, best.input_tokens // 2))
        taken_ms = _takes_ms(best)
    return best, dtype


def _takes_ms(classifier: "LengthClassifier") -> float:
    """For one prompt as long as it looks at."""
    row, took = (classifier.encode("how long will this be? ") * classifier.input_tokens)[: classifier.input_tokens], []
    for _ in range(TRIES):
        began_s = monotonic()
        classifier.batch([row])
        took.append((monotonic() - began_s) * 1000)
    return median(took)
