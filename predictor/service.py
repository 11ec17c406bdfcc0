"""Which source answers: the checkpoint's classifier, or what was observed. Torch comes in with the former."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from predictor.buckets import predict
from predictor.checkpoint import BrokenCheckpoint, CheckpointMeta
from predictor.lane import Lane
from predictor.observed import SOURCE as OBSERVED
from predictor.observed import ObservedLengths
from predictor.served import ServedTokenizer, estimate_tokens, load_served
from predictor.settings import PredictorSettings
from shared.domain.job import LengthPrediction
from shared.errors import InvalidRequest
from shared.runtime.logs import get_log

SOURCE = "classifier"
log = get_log(__name__)


class TextClassifier(Protocol):
    """What the service needs of a classifier."""

    meta: CheckpointMeta

    def probabilities(self, text: str) -> list[float]:
        """One per bucket; runs in the lane's thread."""
        ...


class CheckpointState(StrEnum):
    """What is known of the checkpoint on disk."""

    MISSING = "missing"
    LOADING = "loading"
    LOADED = "loaded"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Query:
    """One prediction to make. Either `text` or token ids of the served model's prompt, or of its ends."""

    timeout_s: float
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A classifier, and the means to turn token ids into its input; without these, ids are not for it."""

    classifier: TextClassifier
    served: ServedTokenizer | None
    served_error: str = ""

    def probabilities(self, query: Query) -> list[float]:
        """Runs in the lane's thread."""
        if query.text is not None:
            return self.classifier.probabilities(query.text)
        assert self.served is not None
        return self.classifier.probabilities(self.served.seen_text(list(query.token_ids)))


class Predictor:
    """Answers predictions, learns from observations, and follows the checkpoint on disk when told to."""

    def __init__(self, settings: PredictorSettings, load: Callable[[PredictorSettings], Loaded] | None = None) -> None:
        self.observed = ObservedLengths(settings.buckets, settings.half_life_observations)
        self.lane = Lane(settings.queue_depth)
        self.state = CheckpointState.MISSING
        self.error = ""
        self._settings = settings
        self._load = load or load_from_disk
        self._loaded: Loaded | None = None
        self._reloading = asyncio.Lock()

    async def predict(self, query: Query) -> LengthPrediction:
        """Predict one length. Raises Busy and DeadlineExceeded when the classifier cannot answer in time."""
        loaded = self._loaded
        if loaded is None or (query.text is None and loaded.served is None):
            return self.observed.predict(_prompt_tokens(query), query.max_tokens)
        probabilities = await self.lane.run(lambda: loaded.probabilities(query), query.timeout_s)
        return predict(probabilities, loaded.classifier.meta.buckets, query.max_tokens, SOURCE)

    async def reload(self) -> None:
        """Take what is on disk now; the previous classifier answers meanwhile.

        Without a checkpoint, observed lengths answer; with a broken one too, and BrokenCheckpoint is raised.
        """
        async with self._reloading:
            folder = self._settings.checkpoint
            if folder is None or _absent(folder):
                self._become(CheckpointState.MISSING, None)
                return
            self.state = CheckpointState.LOADING
            try:
                loaded = await asyncio.to_thread(self._load, self._settings)
            except BrokenCheckpoint as error:
                self._become(CheckpointState.BROKEN, None, error.message)
                raise
            self._become(CheckpointState.LOADED, loaded, loaded.served_error)

    async def start(self) -> None:
        """The first load, beside serving: a broken checkpoint is logged, and observed lengths answer."""
        try:
            await self.reload()
        except BrokenCheckpoint:
            return

    @property
    def source(self) -> str:
        """Which of the two answers now."""
        return SOURCE if self._loaded else OBSERVED

    def describe(self) -> dict[str, Any]:
        """Which source answers, and what it rests on."""
        meta = self._loaded.classifier.meta if self._loaded else None
        folder = self._settings.checkpoint
        return {
            "source": self.source,
            "checkpoint": {
                "path": str(folder) if folder else None,
                "state": self.state,
                "error": self.error or None,
                "metadata": msgspec.to_builtins(meta) if meta else None,
            },
            "reads_token_ids": bool(self._loaded and self._loaded.served),
            "pending": self.lane.pending,
            "observed": self.observed.describe(),
        }

    def _become(self, state: CheckpointState, loaded: Loaded | None, error: str = "") -> None:
        self.state, self._loaded, self.error = state, loaded, error
        say = log.error if error else log.info
        say("length classifier", state=state.value, checkpoint=str(self._settings.checkpoint), error=error or None)


def load_from_disk(settings: PredictorSettings) -> Loaded:
    """Load the checkpoint and the served model's tokenizer. Raises BrokenCheckpoint."""
    assert settings.checkpoint is not None
    classifier = _load_classifier(settings.checkpoint, settings)
    if not settings.model:
        return Loaded(classifier, None, "no served model is set: token ids are answered from observed lengths")
    try:
        return Loaded(classifier, load_served(settings.model))
    except InvalidRequest as error:
        return Loaded(classifier, None, error.message)


def _load_classifier(folder: Path, settings: PredictorSettings) -> TextClassifier:
    try:
        from predictor.model import load_classifier  # torch: only where there is a checkpoint
    except ImportError as error:
        raise BrokenCheckpoint(f"{folder}: torch and transformers are needed: {error}") from error
    return load_classifier(folder, settings.threads, settings.dtype)


def _absent(folder: Path) -> bool:
    """Nothing there yet, as opposed to something unusable."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _prompt_tokens(query: Query) -> int:
    if query.prompt_tokens is not None:
        return query.prompt_tokens
    return len(query.token_ids) if query.text is None else estimate_tokens(query.text)
