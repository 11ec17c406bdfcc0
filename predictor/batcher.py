"""Micro-batches of prompts for the classifier: an answer by the deadline or an error, never a late answer.

Source: TetriInfer 5.2.2: prompts are computed together, padded to the longest of them; one beyond the cutting limit of
512 tokens runs alone. Ours: a batch has at most `batch_tokens` with padding, because on a processor that is busy with
one prompt more tokens take longer in proportion; and fewer where the oldest would come too late otherwise.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil, inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from shared.errors import Busy, DeadlineExceeded, Unavailable
from shared.runtime.logs import get_log

log = get_log(__name__)
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
