"""The micro-batches of the classifier's queries."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from predictor.service import BATCH_TOKENS, CUTTING_TOKENS, Batcher
from shared.errors import Busy, DeadlineExceeded, Unavailable
from shared.runtime.tasks import background


class Lengths:
    """A model whose query is a number of tokens, and whose answer is that number. It waits while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate, self.started = threading.Event(), threading.Event()
        self.gate.set()
        self.fails = False

    def encode(self, query: int) -> list[int]:
        return [0] * query

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        self.started.set()
        assert self.gate.wait(20)
        if self.fails:
            raise RuntimeError("numbers ran out")
        self.batches.append([len(row) for row in rows])
        return [[float(len(row))] for row in rows]


@asynccontextmanager
async def running(depth: int = 1000, batch_tokens: int = BATCH_TOKENS) -> AsyncIterator[Batcher[int]]:
    batcher: Batcher[int] = Batcher(depth, batch_tokens)
    async with background() as tasks:
        tasks.start("batches", batcher.run())
        try:
            yield batcher
        finally:
            await batcher.close()


async def hold(batcher: Batcher[int], model: Lengths, query: int = 1) -> "asyncio.Task[list[float]]":
    """A query that occupies the batcher's thread until the gate opens."""
    model.gate.clear()
    model.started.clear()
    held = asyncio.create_task(batcher.compute(model, query, 20))
    assert await asyncio.to_thread(model.started.wait, 20)
    return held


async def computed(model: Lengths, queries: Sequence[int], batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
    """The answers of queries that wait together.

    The clock stands still: the time of a batch would limit the size of the next, and here includes the closed gate.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("predictor.service.monotonic", lambda: 0.0)
        return await _computed(model, queries, batch_tokens)


async def _computed(model: Lengths, queries: Sequence[int], batch_tokens: int) -> list[list[float]]:
    async with running(batch_tokens=batch_tokens) as batcher:
        first = await hold(batcher, model)
        rest = [asyncio.create_task(batcher.compute(model, query, 20)) for query in queries]
        await asyncio.sleep(0)
        model.gate.set()
        await first
        return await asyncio.gather(*rest)


async def test_short_queries_are_one_batch_with_an_answer_for_each() -> None:
    model = Lengths()
    assert await computed(model, [20, 30, 10]) == [[20.0], [30.0], [10.0]]
    assert model.batches == [[1], [20, 30, 10]]


async def test_a_batch_has_at_most_512_tokens_with_padding_and_a_longer_query_is_alone() -> None:
    model = Lengths()
    queries = [600, 100, 100, 300, 100, 100, 100, 256, 256, 2]
    assert await computed(model, queries) == [[float(query)] for query in queries]
    assert [600] in model.batches
    for batch in model.batches:
        assert len(batch) == 1 or max(batch) * len(batch) <= BATCH_TOKENS
    assert len(model.batches) < len(queries)


async def test_without_a_limit_only_queries_beyond_the_cutting_limit_are_alone() -> None:
    # TetriInfer 5.2.2: "Requests higher than the limit will run alone. The default is 512 tokens."
    model = Lengths()
    queries = [300, 513, *[200] * 20, CUTTING_TOKENS, 900]
    assert await computed(model, queries, batch_tokens=0) == [[float(query)] for query in queries]
    assert model.batches == [[1], [300, *[200] * 20, 512], [513], [900]]


async def test_the_oldest_query_is_in_the_next_batch() -> None:
    model = Lengths()
    await computed(model, [500, *[10] * 200])
    assert model.batches[1] == [500]


async def test_a_batch_is_small_enough_for_the_deadline_of_its_oldest_query() -> None:
    model = Lengths()
    async with running() as batcher:
        await batcher.compute(model, 1, 20)
        first = await hold(batcher, model)
        rest = [asyncio.create_task(batcher.compute(model, 50, 20)) for _ in range(8)]
        await asyncio.sleep(0)
        batcher._token_s = 0.1  # measured time of a token: 200 of them take 20 s
        model.gate.set()
        await asyncio.gather(first, *rest)
    assert 1 <= len(model.batches[2]) <= 5  # 400 tokens are less than BATCH_TOKENS
    assert sum(map(len, model.batches)) == 10


async def test_queries_after_their_deadline_or_cancelled_are_not_computed() -> None:
    model = Lengths()
    async with running() as batcher:
        first = await hold(batcher, model)
        with pytest.raises(DeadlineExceeded):
            await batcher.compute(model, 77, 0.02)
        gone = asyncio.create_task(batcher.compute(model, 78, 20))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        model.gate.set()
        await first
        assert await batcher.compute(model, 5, 20) == [5.0]
        assert batcher.pending == 0
    assert model.batches == [[1], [5]]


async def test_a_full_queue_and_a_query_that_would_be_late_are_busy() -> None:
    model = Lengths()
    async with running(depth=1) as batcher:
        slow = await hold(batcher, model, 600)
        waiting = asyncio.create_task(batcher.compute(model, 600, 20))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await batcher.compute(model, 1, 20)
        batcher._mean_s = 30.0  # measured time of a batch
        waiting.cancel()
        await asyncio.wait([waiting])
        with pytest.raises(Busy) as refused:
            await batcher.compute(model, 1, 20)
        assert refused.value.retry_after_s == 60.0
        model.gate.set()
        await slow
        assert await batcher.compute(model, 3, 20) == [3.0], "an idle batcher accepts it"


async def test_an_error_is_the_answer_of_its_batch_alone() -> None:
    model = Lengths()
    async with running() as batcher:
        model.fails = True
        with pytest.raises(Unavailable, match="numbers ran out"):
            await batcher.compute(model, 1, 20)
        model.fails = False
        assert await batcher.compute(model, 1, 20) == [1.0]


async def test_queries_are_computed_by_the_model_that_they_were_submitted_to() -> None:
    old, new = Lengths(), Lengths()
    async with running() as batcher:
        first = await hold(batcher, old)
        rest = [asyncio.create_task(batcher.compute(model, at, 20)) for at, model in enumerate((old, new, old, new), 2)]
        await asyncio.sleep(0)
        old.gate.set()
        assert await asyncio.gather(first, *rest) == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    assert old.batches == [[1], [2, 4]]
    assert new.batches == [[3, 5]]


async def test_warming_up_is_not_measured() -> None:
    model = Lengths()
    async with running() as batcher:
        await batcher.warm_up(model, [7, 7])
        assert model.batches == [[7, 7]]
        assert (batcher.pending, batcher.largest, batcher._mean_s) == (0, 0, 0.0)
        model.fails = True
        await batcher.warm_up(model, [7])  # the error is logged
        model.fails = False
        assert await batcher.compute(model, 3, 20) == [3.0]
    await batcher.warm_up(model, [7])  # closed: nothing happens
    assert model.batches == [[7, 7], [3]]
