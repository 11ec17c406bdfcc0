"""Who answers: the checkpoint's classifier while it can and is to be believed, else what was observed."""

import asyncio
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec

from predictor.batcher import Batcher
from predictor.buckets import predict
from predictor.checkpoint import BrokenCheckpoint
from predictor.loading import Loaded, load_from_disk
from predictor.observed import SOURCE as OBSERVED
from predictor.observed import ObservedLengths
from predictor.query import Query
from predictor.reality import Answer, Reality
from predictor.settings import PredictorSettings
from shared.domain.job import LengthPrediction
from shared.errors import Busy, DeadlineExceeded, Unavailable
from shared.runtime.logs import get_log

SOURCE = "classifier"
SHADOW = 4  # while the classifier is not believed it is asked once in so many times, to see whether it has got better
Use = Literal["auto", "classifier", "observed"]
log = get_log(__name__)


class CheckpointState(StrEnum):
    """What is known of the checkpoint on disk."""

    MISSING = "missing"
    LOADING = "loading"
    LOADED = "loaded"
    BROKEN = "broken"


class Predictor:
    """Answers predictions, learns from finished answers, and follows the checkpoint on disk when told to.

    `run` computes for the classifier, and has to be under way.
    """

    def __init__(self, settings: PredictorSettings, load: Callable[[PredictorSettings], Loaded] | None = None) -> None:
        self.observed = ObservedLengths(settings.buckets, settings.half_life_observations)
        self.batcher: Batcher[Query] = Batcher(settings.queue_depth, settings.batch_tokens)
        self.state = CheckpointState.MISSING
        self.error = ""
        self.use: Use = settings.use
        self.reality: Reality | None = None
        self.fallbacks: Counter[str] = Counter()  # answers of observed lengths in a classifier's place, by cause
        self._settings = settings
        self._load = load or load_from_disk
        self._loaded: Loaded | None = None
        self._reloading = asyncio.Lock()
        self._doubted = 0  # predictions asked for since the classifier is not believed

    async def predict(self, query: Query) -> LengthPrediction:
        """Predict one length by the query's deadline: where the classifier cannot, by observed lengths."""
        loaded, known = self._loaded, self.observed.predict
        if loaded is None or (query.text is None and loaded.served is None) or not self._to_be_asked():
            return known(query.length, query.max_tokens)
        try:
            probabilities = await self.batcher.ask(loaded, query, query.timeout_s)
        except (Busy, DeadlineExceeded, Unavailable) as error:
            self.fallbacks[error.code] += 1
            return known(query.length, query.max_tokens)
        said = predict(probabilities, loaded.classifier.meta.buckets, query.max_tokens, SOURCE)
        answer = said if self._believed else known(query.length, query.max_tokens)
        return msgspec.structs.replace(answer, model=loaded.model, classified=said.bucket)

    def observe(self, answer: Answer) -> None:
        """Learn from a finished answer, and judge the classifier by it."""
        self.observed.observe(answer.prompt_tokens, answer.output_tokens, cut=answer.cut)
        if self.reality is not None and self.reality.observe(answer):
            say = log.info if self.reality.believed else log.warning
            say(
                "length classifier is believed"
                if self.reality.believed
                else "observed lengths answer in the place of the length classifier",
                why=self.reality.why or None,
                **_rounded(self.reality.accuracy),
            )

    async def reload(self) -> None:
        """Take what is on disk now; the previous classifier answers meanwhile, and further where that is broken.

        Without a checkpoint observed lengths answer. Raises BrokenCheckpoint.
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
                self._become(CheckpointState.BROKEN, self._loaded, error.message)
                raise
            for batch in loaded.warm_up:
                await self.batcher.warm_up(loaded, batch)
            self._become(CheckpointState.LOADED, loaded, loaded.served_error)

    async def start(self) -> None:
        """The first load, beside serving: a broken checkpoint is logged, and observed lengths answer."""
        try:
            await self.reload()
        except BrokenCheckpoint:
            return

    @property
    def source(self) -> str:
        """Who answers now."""
        return SOURCE if self._loaded and self._believed else OBSERVED

    @property
    def why(self) -> str:
        """Why the loaded classifier does not answer; empty where it does, or there is none."""
        if self._loaded is None or self._believed:
            return ""
        return "switched off" if self.use == OBSERVED or self.reality is None else self.reality.why

    def describe(self) -> dict[str, Any]:
        """Who answers, what it rests on, and how right it was."""
        loaded, folder = self._loaded, self._settings.checkpoint
        return {
            "source": self.source,
            "use": self.use,
            "why": self.why,
            "checkpoint": {
                "path": str(folder) if folder else None,
                "state": self.state,
                "error": self.error or None,
                "metadata": msgspec.to_builtins(loaded.classifier.meta) if loaded else None,
                "runs": loaded.runs if loaded else None,
            },
            "reads_token_ids": bool(loaded and loaded.served),
            "pending": self.batcher.pending,
            "largest_batch": self.batcher.largest,
            "fallbacks": dict(self.fallbacks),
            "reality": self.reality.describe() if self.reality else {},
            "observed": self.observed.describe(),
        }

    @property
    def _believed(self) -> bool:
        return self.use == SOURCE or (self.use == "auto" and self.reality is not None and self.reality.believed)

    def _to_be_asked(self) -> bool:
        if self._believed or self.use == OBSERVED:
            return self._believed
        self._doubted += 1
        return self._doubted % SHADOW == 0

    def _become(self, state: CheckpointState, loaded: Loaded | None, error: str = "") -> None:
        if loaded is None:
            self.reality = None
        elif self.reality is None or self.reality.model != loaded.model:
            meta = loaded.classifier.meta
            self.reality = Reality(loaded.model, meta.buckets, self._settings.half_life_observations)
            if meta.scores.accuracy <= (base := meta.baselines.get("majority", 0.0)):
                self.reality.doubt(
                    f"right for {meta.scores.accuracy:.0%} of its own test split, no better than the commonest bucket, "
                    f"which is for {base:.0%}"
                )
        self.state, self._loaded, self.error = state, loaded, error
        say = log.error if error else log.info
        runs = loaded.runs if loaded else None
        told = {"checkpoint": str(self._settings.checkpoint), "error": error or None, "runs": runs}
        say("length classifier", state=state.value, why=self.why or None, **told)


def _absent(folder: Path) -> bool:
    """Nothing there yet, as opposed to something unusable."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _rounded(accuracy: dict[str, float | None]) -> dict[str, float]:
    return {name: round(share, 3) for name, share in accuracy.items() if share is not None}
