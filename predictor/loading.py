"""Loads a checkpoint into service: device, precision, and how much of a prompt the classifier can read within the
deadline. torch is imported when a checkpoint is loaded. `Query` is one prediction to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import msgspec

from predictor.checkpoint import BrokenCheckpoint, CheckpointMeta
from predictor.examples import ServedTokenizer, estimate_tokens, load_served
from predictor.settings import PredictorSettings
from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from predictor.model import LengthClassifier


@dataclass(frozen=True, slots=True)
class Query:
    """A prediction to make, of a `text` or of the served model's token ids of a prompt or its ends."""

    timeout_s: float
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    max_tokens: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the whole prompt, estimated if the caller sent no count."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        return len(self.token_ids) if self.text is None else estimate_tokens(self.text)


TRIES = 3
DEADLINE_SHARE = 0.5  # of the deadline for one full prompt; the rest is for the prompts before it
MIN_INPUT_TOKENS = 32
_PROMPT = Query(inf, text="How long will the answer to this question be? " * 8)
WARM_UP = ((_PROMPT,), (_PROMPT,) * 4)


class TextClassifier(Protocol):
    """What the service needs of a classifier."""

    meta: CheckpointMeta

    def encode(self, text: str) -> list[int]:
        """The token ids that it reads."""
        ...

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Probabilities of the buckets, for each row."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A classifier and the served model's tokenizer, without which queries by token ids cannot be classified.

    runs: device, dtype, input tokens, and milliseconds for a full prompt. warm_up: batches to compute before the first
    query.
    """

    classifier: TextClassifier
    served: ServedTokenizer | None
    served_error: str = ""
    runs: dict[str, object] | None = None
    warm_up: Sequence[Sequence[Query]] = ()

    @property
    def model(self) -> str:
        """An identifier of the classifier, the same in all processes."""
        return blake2b(msgspec.json.encode(self.classifier.meta), digest_size=6).hexdigest()

    def encode(self, query: Query) -> list[int]:
        if query.text is not None:
            return self.classifier.encode(query.text)
        assert self.served is not None
        return self.classifier.encode(self.served.seen_text(list(query.token_ids)))

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        return self.classifier.batch(rows)


def load_from_disk(settings: PredictorSettings) -> Loaded:
    """Load the checkpoint and the served model's tokenizer. Raises BrokenCheckpoint."""
    classifier, runs = _load_classifier(settings)
    served, error = None, "no served model is set: predictions by token ids use observed lengths"
    if settings.model:
        try:
            served, error = load_served(settings.model, trust_remote_code=settings.trust_remote_code), ""
        except InvalidRequest as refused:
            error = refused.message
    return Loaded(classifier, served, error, runs, WARM_UP)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _load_classifier(settings: PredictorSettings) -> tuple[TextClassifier, dict[str, object]]:
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
        raise BrokenCheckpoint(f"device {device!r}: torch finds no such device")
    dtype = settings.dtype if settings.dtype == "bfloat16" else "float32"
    whole = load_classifier(folder, settings.threads, dtype, device)
    if settings.input_tokens:
        whole = whole.with_input_tokens(settings.input_tokens)
    if settings.dtype == "int8":
        if device != "cpu":
            raise BrokenCheckpoint(f"dtype int8 requires a CPU, got {device!r}")
        whole, dtype = whole.quantised(), "int8"
    elif settings.dtype == "auto" and device == "cpu":
        whole, dtype = _within_limit(whole, DEADLINE_SHARE * settings.timeout_ms)
    runs = {"device": device, "dtype": dtype, "input_tokens": whole.input_tokens, "full_prompt_ms": _prompt_ms(whole)}
    return whole, runs


def _within_limit(whole: "LengthClassifier", limit_ms: float) -> "tuple[LengthClassifier, str]":
    """In float32, in int8, or with fewer tokens: the first way that computes a full prompt within `limit_ms`."""
    before_ms = _prompt_ms(whole)
    if before_ms <= limit_ms:
        return whole, "float32"
    quantised = whole.quantised()
    after_ms = _prompt_ms(quantised)
    best, dtype = (quantised, "int8") if after_ms < before_ms else (whole, "float32")
    taken_ms = min(before_ms, after_ms)
    while taken_ms > limit_ms and best.input_tokens > MIN_INPUT_TOKENS:
        best = best.with_input_tokens(max(MIN_INPUT_TOKENS, best.input_tokens // 2))
        taken_ms = _prompt_ms(best)
    return best, dtype


def _prompt_ms(classifier: "LengthClassifier") -> float:
    """The median time of a prompt with all input tokens."""
    row, times_ms = (
        (classifier.encode("how long will this be? ") * classifier.input_tokens)[: classifier.input_tokens],
        [],
    )
    for _ in range(TRIES):
        began_mono = monotonic()
        classifier.batch([row])
        times_ms.append((monotonic() - began_mono) * 1000)
    return median(times_ms)
