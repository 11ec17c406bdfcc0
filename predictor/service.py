"""Predicts output lengths with the checkpoint's classifier, or with observed lengths while the classifier is absent or
measurably worse. A rolling window of finished requests compares the classifier with the baselines.

Micro-batches follow TetriInfer 5.2.2: prompts are computed together, padded to the longest of them, and a prompt
beyond 512 tokens runs alone. Beyond the paper, a batch has at most `batch_tokens` with padding, because on a busy
processor more tokens take longer in proportion, and fewer where the oldest prompt would otherwise be late.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf
from pathlib import Path
from time import monotonic
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from predictor.buckets import SOURCE as OBSERVED
from predictor.buckets import Buckets, ObservedLengths, predict
from predictor.checkpoint import BrokenCheckpoint
from predictor.loading import Loaded, Query, load_from_disk
from predictor.settings import PredictorSettings
from shared.domain.job import LengthPrediction
from shared.errors import Busy, DeadlineExceeded, Unavailable
from shared.runtime.logs import get_log
from shared.wire.api.predictor import CheckpointStatus, LengthSource, Observation, RollingAccuracy
from shared.wire.api.predictor import Reality as RealityStatus

SOURCE = "classifier"
WINDOW = 500  # answers that the classifier is judged by
MIN_ANSWERS = 200  # with fewer the classifier is not judged
MARGIN = 0.02  # the gain over the commonest bucket from which on a rejected classifier is used again
RECENT = 200  # pairs of predicted and actual length that are kept for display
SHADOW = 4  # a rejected classifier still computes one prediction in so many, to be judged
CUTTING_TOKENS = 512  # a longer prompt is a batch of its own
BATCH_TOKENS = 512
NEWEST_WEIGHT = 0.2  # of the newest batch in the running means of batches' times and sizes
Q = TypeVar("Q")
Q_in = TypeVar("Q_in", contravariant=True)
Use = Literal["auto", "classifier", "observed"]
log = get_log(__name__)


class _Score(NamedTuple):
    """Whether each prediction of one answer was right (0 or 1), and the error of the one that was sent; or sums."""

    classifier: float
    commonest: float
    prompt_length: float
    error_tokens: float

    def plus(self, other: "_Score", sign: int = 1) -> "_Score":
        return _Score(*(own + sign * more for own, more in zip(self, other, strict=True)))


class Reality:
    """Judges one classifier by finished answers. believed: whether it is used; why: the reason if it is not."""

    def __init__(self, model: str, buckets: Buckets, half_life: float) -> None:
        self.model = model
        self.believed, self.why = True, ""
        self._buckets = buckets
        self._lengths = ObservedLengths(buckets, half_life)
        self._scores: deque[_Score] = deque()
        self._sums = _Score(0.0, 0.0, 0.0, 0.0)
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def doubt(self, why: str) -> None:
        self.believed, self.why = False, why

    def observe(self, answer: Observation) -> bool:
        """Count an answer; returns whether `believed` has changed."""
        if answer.expected_tokens is not None:
            self._recent.append((answer.expected_tokens, answer.output_tokens))
        if answer.model == self.model and answer.classified >= 0 and self._lengths.observations:
            score = self._score(answer)
            self._scores.append(score)
            self._sums = self._sums.plus(score)
            if len(self._scores) > WINDOW:
                self._sums = self._sums.plus(self._scores.popleft(), -1)
        self._lengths.observe(answer.prompt_tokens, answer.output_tokens, cut=answer.cut)
        return self._judge()

    @property
    def accuracy(self) -> RollingAccuracy:
        """Shares that were right, of the classifier and of both baselines; None before the first answer."""
        count = len(self._scores)
        if not count:
            return RollingAccuracy()
        return RollingAccuracy(*(total / count for total in self._sums[:3]))

    def describe(self) -> RealityStatus:
        count = len(self._scores)
        return RealityStatus(
            model=self.model,
            answers=count,
            accuracy=self.accuracy,
            mean_error_tokens=self._sums.error_tokens / count if count else None,
            believed=self.believed,
            recent=list(self._recent),
        )

    def _score(self, answer: Observation) -> _Score:
        actual = self._buckets.of(answer.output_tokens)
        commonest = predict(self._lengths.overall(), self._buckets, answer.max_tokens, "")
        by_length = self._lengths.predict(answer.prompt_tokens, answer.max_tokens)
        error = abs((answer.expected_tokens or 0.0) - answer.output_tokens)
        return _Score(answer.classified == actual, commonest.bucket == actual, by_length.bucket == actual, error)

    def _judge(self) -> bool:
        if len(self._scores) < MIN_ANSWERS:
            return False
        accuracy, before = self.accuracy, self.believed
        own, base = accuracy.classifier or 0.0, accuracy.commonest or 0.0
        if self.believed and own <= base:
            self.doubt(
                f"right for {own:.0%} of the last {len(self._scores)} answers, no better than the commonest bucket, "
                f"which is right for {base:.0%}"
            )
        elif not self.believed and own >= base + MARGIN:
            self.believed, self.why = True, ""
        return self.believed is not before


class Batchable(Protocol[Q_in]):
    """A model. The batcher's thread makes one call at a time."""

    def encode(self, query: Q_in) -> list[int]:
        """The token ids of a query, at least one."""
        ...

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """The probabilities of each row."""
        ...


@dataclass(slots=True, eq=False)
class _Item(Generic[Q]):
    """A waiting query. ids: once they are encoded."""

    model: Batchable[Q]
    query: Q
    deadline_mono: float
    answer: "asyncio.Future[list[float]]"
    ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Batch(Generic[Q]):
    """A computed batch."""

    items: tuple[_Item[Q], ...]
    answers: tuple[list[float] | Exception, ...]
    padded_tokens: int
    took_s: float


class Batcher(Generic[Q]):
    """Computes queries in batches in one thread, the oldest first; at most `depth` queries wait. `run` must be running.

    batch_tokens: padded tokens of a batch of several queries; 0: no limit. A query is computed by the model that it was
    submitted to, even if that model has been replaced.
    """

    def __init__(self, depth: int, batch_tokens: int = BATCH_TOKENS) -> None:
        self.largest = 0  # queries in one batch so far
        self._depth = depth
        self._batch_tokens = batch_tokens or inf
        self._waiting: deque[_Item[Q]] = deque()
        self._computing = False
        self._closed = False
        self._not_empty = asyncio.Event()
        self._mean_s, self._mean_items = 0.0, 1.0  # of a batch; 0 s before the first
        self._token_s = 0.0  # per padded token; 0 before the first batch
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="length-classifier")

    async def compute(self, model: Batchable[Q], query: Q, timeout_s: float) -> list[float]:
        """The probabilities. Raises Busy when too many queries wait for the deadline to be met, DeadlineExceeded after
        `timeout_s`, Unavailable when the model fails.

        An idle batcher accepts a query however slow earlier batches were; otherwise its measurements would never
        improve. A query whose deadline passes while it waits is not computed.
        """
        needed_s = ceil((self.pending + 1) / self._mean_items) * self._mean_s
        if self.pending > self._depth or (self._computing and needed_s > timeout_s):
            raise Busy(f"{self.pending} predictions are before this one", retry_after_s=needed_s)
        deadline_mono = monotonic() + timeout_s
        item = _Item(model, query, deadline_mono, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._not_empty.set()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await item.answer
        except TimeoutError:
            answer = None
        if answer is None or monotonic() > deadline_mono:  # the event loop may have been blocked past the deadline
            raise DeadlineExceeded(f"no prediction within {timeout_s * 1000:.0f} ms")
        return answer

    async def run(self) -> None:
        """Compute until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._not_empty.wait()
            self._waiting = deque(item for item in self._waiting if not item.answer.done())
            if not self._waiting:
                self._not_empty.clear()
                continue
            of_one_model = [item for item in self._waiting if item.model is self._waiting[0].model]
            limit = self._token_limit(of_one_model[0])
            self._computing = True
            try:
                batch = await loop.run_in_executor(self._pool, _compute, of_one_model, limit)
            finally:
                self._computing = False
            self._deliver(batch)

    async def warm_up(self, model: Batchable[Q], queries: Sequence[Q]) -> None:
        """Compute a batch in the batcher's thread without a deadline and without counting its time.

        The first batch of a model takes several times as long as later ones: torch starts the thread's workers, selects
        kernels and reads the weights. As a query's batch it would miss its deadline and, as the only measurement of the
        time of a batch, cause the queries behind it to be rejected.
        """
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        items = [_Item(model, query, inf, loop.create_future()) for query in queries]
        await loop.run_in_executor(self._pool, _compute, items, inf)

    @property
    def pending(self) -> int:
        """Queries that wait or are computed."""
        return sum(not item.answer.done() for item in self._waiting)

    async def close(self) -> None:
        """Wait for the running batch."""
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    def _token_limit(self, oldest: _Item[Q]) -> float:
        """Padded tokens of a batch that is computed by the deadline of the oldest query, judged by earlier batches."""
        if not self._token_s:
            return self._batch_tokens
        return min(self._batch_tokens, max(1.0, (oldest.deadline_mono - monotonic()) / self._token_s))

    def _deliver(self, batch: _Batch[Q]) -> None:
        count, weight = len(batch.items), NEWEST_WEIGHT if self._mean_s else 1.0
        self._mean_s += weight * (batch.took_s - self._mean_s)
        if batch.padded_tokens:
            self._token_s += weight * (batch.took_s / batch.padded_tokens - self._token_s)
        self._mean_items += weight * (count - self._mean_items)
        self.largest = max(self.largest, count)
        computed = set(map(id, batch.items))
        self._waiting = deque(item for item in self._waiting if id(item) not in computed)
        for item, answer in zip(batch.items, batch.answers, strict=True):
            if item.answer.done():
                continue
            if isinstance(answer, Exception):
                item.answer.set_exception(answer)
            else:
                item.answer.set_result(answer)


def _compute(items: list[_Item[Q]], token_limit: float) -> _Batch[Q]:
    """In the thread: the oldest item and those that fit beside it. An error is the answer of the whole batch."""
    began_mono = monotonic()
    chosen = [items[0]]
    answers: Sequence[list[float] | Exception]
    try:
        chosen = _fitting(items, token_limit)
        answers = items[0].model.batch([item.ids or [] for item in chosen])
    except Exception as error:  # of torch; the callers use observed lengths
        log.exception("a batch failed", queries=len(chosen))
        answers = [Unavailable(f"the length classifier failed: {error}")] * len(chosen)
    padded = len(chosen) * max(len(item.ids or []) for item in chosen)
    return _Batch(tuple(chosen), tuple(answers), padded, monotonic() - began_mono)


def _fitting(items: list[_Item[Q]], token_limit: float) -> list[_Item[Q]]:
    chosen: list[_Item[Q]] = []
    longest = 0
    for item in items:
        if chosen and longest * (len(chosen) + 1) > token_limit:
            break
        item.ids = item.ids or item.model.encode(item.query)
        padded = max(longest, len(item.ids))
        if chosen and (len(item.ids) > CUTTING_TOKENS or padded * (len(chosen) + 1) > token_limit):
            continue
        chosen.append(item)
        longest = padded
        if longest > CUTTING_TOKENS:
            break
    return chosen


class CheckpointState(StrEnum):
    """The state of the checkpoint on disk."""

    MISSING = "missing"
    LOADING = "loading"
    LOADED = "loaded"
    BROKEN = "broken"


class Predictor:
    """Predicts lengths, learns from finished answers, and loads the checkpoint. `batcher.run` must be running."""

    def __init__(self, settings: PredictorSettings, load: Callable[[PredictorSettings], Loaded] | None = None) -> None:
        self.observed = ObservedLengths(settings.buckets, settings.half_life_observations)
        self.batcher: Batcher[Query] = Batcher(settings.queue_depth, settings.batch_tokens)
        self.state = CheckpointState.MISSING
        self.error = ""
        self.use: Use = settings.use
        self.reality: Reality | None = None
        self.fallbacks: Counter[str] = Counter()  # predictions without a loaded classifier's answer, by error code
        self._settings = settings
        self._load = load or load_from_disk
        self._loaded: Loaded | None = None
        self._reloading = asyncio.Lock()
        self._doubted = 0  # predictions requested since the classifier is rejected

    async def predict(self, query: Query) -> LengthPrediction:
        """A prediction by the query's deadline, from observed lengths where the classifier has none."""
        loaded = self._loaded
        if loaded is None or (query.text is None and loaded.served is None) or not self._runs_classifier():
            return self.observed.predict(query.length, query.max_tokens)
        try:
            probabilities = await self.batcher.compute(loaded, query, query.timeout_s)
        except (Busy, DeadlineExceeded, Unavailable) as error:
            self.fallbacks[error.code] += 1
            return self.observed.predict(query.length, query.max_tokens)
        classified = predict(probabilities, loaded.classifier.meta.buckets, query.max_tokens, SOURCE)
        sent = classified if self._believed else self.observed.predict(query.length, query.max_tokens)
        return msgspec.structs.replace(sent, model=loaded.model, classified=classified.bucket)

    def observe(self, answer: Observation) -> None:
        """Learn from a finished answer, and judge the classifier by it."""
        self.observed.observe(answer.prompt_tokens, answer.output_tokens, cut=answer.cut)
        reality = self.reality
        if reality is None or not reality.observe(answer):
            return
        accuracy = {name: round(share, 3) for name, share in reality.accuracy.known().items()}
        if reality.believed:
            log.info("the length classifier is used", **accuracy)
        else:
            log.warning("observed lengths are used instead of the length classifier", why=reality.why, **accuracy)

    async def reload(self) -> None:
        """Load the checkpoint that is on disk now. The present classifier is used meanwhile, and afterwards if the new
        one is broken; without a checkpoint observed lengths are used. Raises BrokenCheckpoint.
        """
        async with self._reloading:
            folder = self._settings.checkpoint
            if folder is None or _is_empty(folder):
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
        """The first load; a broken checkpoint is logged."""
        try:
            await self.reload()
        except BrokenCheckpoint:
            return

    @property
    def source(self) -> str:
        return SOURCE if self._loaded and self._believed else OBSERVED

    @property
    def why(self) -> str:
        """Why the loaded classifier is not used; empty if it is, or if there is none."""
        if self._loaded is None or self._believed:
            return ""
        return "switched off" if self.use == OBSERVED or self.reality is None else self.reality.why

    def describe(self) -> LengthSource:
        """`GET /v1/model`."""
        loaded, folder = self._loaded, self._settings.checkpoint
        return LengthSource(
            source=self.source,
            use=self.use,
            why=self.why,
            checkpoint=CheckpointStatus(
                path=str(folder) if folder else None,
                state=self.state,
                error=self.error or None,
                metadata=msgspec.to_builtins(loaded.classifier.meta) if loaded else None,
                runs=loaded.runs if loaded else None,
            ),
            reads_token_ids=bool(loaded and loaded.served),
            pending=self.batcher.pending,
            largest_batch=self.batcher.largest,
            fallbacks=dict(self.fallbacks),
            reality=self.reality.describe() if self.reality else RealityStatus(),
            observed=self.observed.describe(),
        )

    @property
    def _believed(self) -> bool:
        return self.use == SOURCE or (self.use == "auto" and self.reality is not None and self.reality.believed)

    def _runs_classifier(self) -> bool:
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
                    f"which is right for {base:.0%}"
                )
        self.state, self._loaded, self.error = state, loaded, error
        (log.error if error else log.info)(
            "length classifier",
            state=state.value,
            why=self.why or None,
            checkpoint=str(self._settings.checkpoint),
            error=error or None,
            runs=loaded.runs if loaded else None,
        )


def _is_empty(folder: Path) -> bool:
    """Whether there is nothing yet, as opposed to something unusable."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
