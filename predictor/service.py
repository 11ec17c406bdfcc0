"""Answers predictions with the checkpoint's classifier, or with the observed lengths while the classifier is absent
or measurably worse. Prompts are batched and answered by their deadline; a rolling window of finished requests
compares the classifier with the baselines.

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
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from predictor.buckets import SOURCE as OBSERVED
from predictor.buckets import Buckets, ObservedLengths, predict
from predictor.checkpoint import BrokenCheckpoint
from predictor.loading import Loaded, Query, load_from_disk
from predictor.settings import PredictorSettings
from shared.domain.job import LengthPrediction
from shared.errors import Busy, DeadlineExceeded, Unavailable
from shared.runtime.logs import get_log

WINDOW = 500  # answers that it is judged by
FEWEST = 200  # answers, before which the classifier is not judged
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


CUTTING_TOKENS = 512
BATCH_TOKENS = 512
NEWEST = 0.2  # weight of the newest batch in the running means of how long batches take, and how many are in one
Q = TypeVar("Q")
Q_in = TypeVar("Q_in", contravariant=True)


class Batchable(Protocol[Q_in]):
    """What computes. Called in the batcher's thread, one call at a time."""

    def encode(self, query: Q_in) -> list[int]:
        """A query's token ids, at least one."""
        ...

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Probabilities of each row."""
        ...


@dataclass(slots=True, eq=False)
class _Item(Generic[Q]):
    model: Batchable[Q]
    query: Q
    deadline_s: float
    answer: "asyncio.Future[list[float]]"
    ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Computed(Generic[Q]):
    items: tuple[_Item[Q], ...]
    answers: tuple[list[float] | Exception, ...]
    padded_tokens: int
    took_s: float


class Batcher(Generic[Q]):
    """Queries of one event loop, computed in one thread, the oldest first; at most `depth` wait.

    batch_tokens: padded tokens of a batch of several; 0 sets no such bound.
    `run` has to be under way. Queries to a model that was replaced meanwhile are still its own.
    """

    def __init__(self, depth: int, batch_tokens: int = BATCH_TOKENS) -> None:
        self.largest = 0  # queries in one batch so far
        self._depth = depth
        self._batch_tokens = batch_tokens or inf
        self._waiting: deque[_Item[Q]] = deque()
        self._computing = False
        self._closed = False
        self._some = asyncio.Event()
        self._mean_s, self._mean_items = 0.0, 1.0  # of a batch; 0 s before the first
        self._token_s = 0.0  # a padded token takes in a batch; 0 before the first
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="length-classifier")

    async def ask(self, model: Batchable[Q], query: Q, timeout_s: float) -> list[float]:
        """Probabilities. Raises Busy when too many wait for the deadline, DeadlineExceeded after `timeout_s`.

        An idle batcher takes every query, however slow batches were: else it would never learn better. What waits when
        its time is over is not computed.
        """
        needed_s = ceil((self.pending + 1) / self._mean_items) * self._mean_s
        if self.pending > self._depth or (self._computing and needed_s > timeout_s):
            raise Busy(f"{self.pending} predictions are before this one", retry_after_s=needed_s)
        deadline_s = monotonic() + timeout_s
        item = _Item(model, query, deadline_s, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._some.set()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await item.answer
        except TimeoutError:
            answer = None
        if answer is None or monotonic() > deadline_s:  # or the loop was held up: its reader is too late
            raise DeadlineExceeded(f"no prediction within {timeout_s * 1000:.0f} ms")
        return answer

    async def run(self) -> None:
        """Compute for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._some.wait()
            batch = self._of_one_model()
            if not batch:
                self._some.clear()
                continue
            self._computing = True
            try:
                done = await loop.run_in_executor(self._pool, _compute, batch, self._most_tokens(batch[0]))
            finally:
                self._computing = False
            self._deliver(done)

    async def warm_up(self, model: Batchable[Q], queries: Sequence[Q]) -> None:
        """Compute a batch in the batcher's thread without a deadline and without counting its time.

        The first batch of a model takes several times as long as later ones: torch starts the thread's workers, picks
        kernels and reads the weights. As a query's batch it would miss its deadline and, as the only measurement of how
        long batches take, turn the queries behind it away.
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
        """Wait for what is computed."""
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    def _of_one_model(self) -> list[_Item[Q]]:
        """Those that may be computed together, in their order; who gave up is forgotten."""
        self._waiting = deque(item for item in self._waiting if not item.answer.done())
        return [item for item in self._waiting if item.model is self._waiting[0].model]

    def _most_tokens(self, oldest: _Item[Q]) -> float:
        """Padded tokens of a batch that is ready by the oldest query's deadline, so far as earlier ones tell."""
        if not self._token_s:
            return self._batch_tokens
        return min(self._batch_tokens, max(1.0, (oldest.deadline_s - monotonic()) / self._token_s))

    def _deliver(self, done: _Computed[Q]) -> None:
        count = len(done.items)
        weight = NEWEST if self._mean_s else 1.0
        self._mean_s += weight * (done.took_s - self._mean_s)
        if done.padded_tokens:
            self._token_s += weight * (done.took_s / done.padded_tokens - self._token_s)
        self._mean_items += weight * (count - self._mean_items)
        self.largest = max(self.largest, count)
        computed = set(map(id, done.items))
        self._waiting = deque(item for item in self._waiting if id(item) not in computed)
        for item, answer in zip(done.items, done.answers, strict=True):
            if item.answer.done():
                continue
            if isinstance(answer, Exception):
                item.answer.set_exception(answer)
            else:
                item.answer.set_result(answer)


def _compute(items: list[_Item[Q]], most_tokens: float) -> _Computed[Q]:
    """In the thread: the oldest, with those after it that fit beside it; an error is the error of all of them."""
    began_s = monotonic()
    chosen = [items[0]]
    answers: Sequence[list[float] | Exception]
    try:
        chosen = _fitting(items, most_tokens)
        answers = items[0].model.batch([item.ids or [] for item in chosen])
    except Exception as error:  # whatever a network makes of it: its callers do without
        log.exception("a batch failed", queries=len(chosen))
        answers = [Unavailable(f"the length classifier failed: {error}")] * len(chosen)
    padded = len(chosen) * max(len(item.ids or []) for item in chosen)
    return _Computed(tuple(chosen), tuple(answers), padded, monotonic() - began_s)


def _fitting(items: list[_Item[Q]], most_tokens: float) -> list[_Item[Q]]:
    chosen: list[_Item[Q]] = []
    longest = 0
    for item in items:
        if chosen and longest * (len(chosen) + 1) > most_tokens:
            break
        item.ids = item.ids or item.model.encode(item.query)
        padded = max(longest, len(item.ids))
        if chosen and (len(item.ids) > CUTTING_TOKENS or padded * (len(chosen) + 1) > most_tokens):
            continue
        chosen.append(item)
        longest = padded
        if longest > CUTTING_TOKENS:
            break
    return chosen


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
