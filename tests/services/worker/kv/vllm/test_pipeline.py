"""Hand-overs between engines that divide the model into other pipeline stages. float32: across tensor-parallel degrees
only that is exact.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio

from services.worker.kv.rank_links import PullEnded, Release, StagedChunk
from tests.services.worker.kv.rig import prefetch
from tests.services.worker.kv.vllm.engine_client import (
    NEW_TOKENS,
    Engine,
    emptied,
    exporting,
    handed_over,
    identical,
    importing,
    prompts,
)
from tests.tiny_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

COUNT = 25


@dataclass
class Cluster:
    one: Engine
    front: Engine  # as vLLM divides three layers: 2 + 1
    back: Engine  # 1 + 2, block size 64
    prompts: list[list[int]]
    references: list[list[int]]

    async def fresh(self) -> None:
        for engine in (self.one, self.front, self.back):
            await engine.ask("reset")
            await engine.ask("fault", zero=False, corrupt=False)
            engine.events.clear()

    async def hand_over_all(self, source: Engine, target: Engine) -> int:
        """All prompts at once; how many came out identical. Every rank of the target has pulled each."""
        await self.fresh()
        outputs = await asyncio.gather(*(handed_over(source, target, text) for text in self.prompts))
        ranks = len(target.endpoints)
        assert await target.pulls(COUNT * ranks) == {"ok": COUNT * ranks}
        assert by_rank(target) == dict.fromkeys(range(ranks), COUNT)
        await emptied(source)
        return identical(outputs, self.references)


def by_rank(engine: Engine) -> Counter[int]:
    return Counter(event.rank for event in engine.events if isinstance(event, PullEnded))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    engines = [
        Engine("one", model, dtype="float32"),
        Engine("front", model, dtype="float32", pp=2),
        Engine("back", model, dtype="float32", pp=2, layers=(1, 2), block_size=64),
    ]
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.callback(engine.kill)  # also where another one does not start
        for engine in engines:
            await stack.enter_async_context(engine)
        texts = prompts()
        for engine in engines:  # the first forward of two ranks takes seconds
            await engine.generate(texts[-1], 2)
        references = [await engines[0].generate(text, NEW_TOKENS) for text in texts]
        yield Cluster(*engines, prompts=texts, references=references)  # type: ignore[misc]


async def test_stages_are_read_from_the_engine(cluster: Cluster) -> None:
    assert [engine.stages for engine in (cluster.one, cluster.front, cluster.back)] == [(), (2, 1), (1, 2)]


async def test_a_pipeline_alone_computes_the_same(cluster: Cluster) -> None:
    await cluster.fresh()
    for engine in (cluster.front, cluster.back):
        outputs = await asyncio.gather(*(engine.generate(text, NEW_TOKENS) for text in cluster.prompts))
        assert identical(outputs, cluster.references) == COUNT


async def test_one_stage_to_two(cluster: Cluster) -> None:
    assert await cluster.hand_over_all(cluster.one, cluster.back) == COUNT
    staged = {event.rank for event in cluster.one.events if isinstance(event, StagedChunk)}
    assert staged == {0}


async def test_two_stages_to_one(cluster: Cluster) -> None:
    assert await cluster.hand_over_all(cluster.front, cluster.one) == COUNT
    staged = [event.rank for event in cluster.front.events if isinstance(event, StagedChunk)]
    assert staged.count(0) == staged.count(1) > COUNT


async def test_two_stages_to_two_others(cluster: Cluster) -> None:
    assert await cluster.hand_over_all(cluster.front, cluster.back) == COUNT
    assert await cluster.hand_over_all(cluster.back, cluster.front) == COUNT


async def test_two_stages_to_two_alike(cluster: Cluster) -> None:
    """The same engine's: what it holds itself would be found in its cache, so that it forgets it in between."""
    await cluster.fresh()
    outputs = []
    for text in cluster.prompts[-5:]:
        transfer_id = uuid.uuid4().hex
        await cluster.front.generate(text, 1, exporting(transfer_id))
        await cluster.front.ask("reset")
        handle = cluster.front.handle(transfer_id, len(text))
        outputs.append(await cluster.front.generate(text, NEW_TOKENS, importing(handle)))
    assert identical(outputs, cluster.references[-5:]) == 5
    assert await cluster.front.pulls(10) == {"ok": 10}


async def test_any_split_and_a_carried_token(cluster: Cluster) -> None:
    await cluster.fresh()
    texts, references = cluster.prompts[-8:], cluster.references[-8:]
    pairs = [(cluster.front, cluster.back), (cluster.back, cluster.one), (cluster.one, cluster.front)]
    outputs = []
    for index, text in enumerate(texts):
        source, target = pairs[index % 3]
        outputs.append(await handed_over(source, target, text, split=len(text) * (index + 1) // 9))
    assert identical(outputs, references) == len(texts)

    await cluster.fresh()
    outputs = []
    for text in texts:
        transfer_id = uuid.uuid4().hex
        first = await cluster.back.generate(text, 1, exporting(transfer_id))
        handle = cluster.back.handle(transfer_id, len(text))
        outputs.append(first + await cluster.front.generate(text + first, NEW_TOKENS - 1, importing(handle)))
    assert identical(outputs, references) == len(texts)
    assert await cluster.front.pulls(2 * len(texts)) == {"ok": 2 * len(texts)}


@pytest.mark.parametrize("stage", [0, 1])
async def test_zeroed_kv_of_either_stage_would_be_noticed(cluster: Cluster, stage: int) -> None:
    await cluster.fresh()
    await cluster.back.ask("fault", zero=True, corrupt=False, stage=stage)
    outputs = [await handed_over(cluster.front, cluster.back, text) for text in cluster.prompts]
    assert await cluster.back.pulls(2 * COUNT) == {"ok": 2 * COUNT}
    assert identical(outputs, cluster.references) < COUNT / 2


async def test_what_one_stage_cannot_pull_is_recomputed(cluster: Cluster) -> None:
    await cluster.fresh()
    await cluster.front.ask("fault", zero=False, corrupt=True, stage=1)
    outputs = await asyncio.gather(*(handed_over(cluster.front, cluster.back, text) for text in cluster.prompts))
    assert identical(outputs, cluster.references) == COUNT
    assert await cluster.back.pulls(2 * COUNT) == {"ok": COUNT, "checksum": COUNT}
    await emptied(cluster.front)


async def test_a_handle_of_other_stages_is_recomputed(cluster: Cluster) -> None:
    await cluster.fresh()
    text, reference = cluster.prompts[-1], cluster.references[-1]
    for stages in ((1, 2), (2, 2)):
        transfer_id = uuid.uuid4().hex
        await cluster.front.generate(text, 1, exporting(transfer_id))
        handle = msgspec.structs.replace(cluster.front.handle(transfer_id, len(text)), stages=stages)
        assert await cluster.one.generate(text, NEW_TOKENS, importing(handle)) == reference
        await cluster.front.control.call(Release(transfer_id))
    assert await cluster.one.pulls(2) == {"invalid_request": 2}


async def test_only_what_is_not_cached_is_pulled(cluster: Cluster) -> None:
    await cluster.fresh()
    text, reference = cluster.prompts[-1], cluster.references[-1]
    await cluster.back.generate(text[:600], 1)
    assert await handed_over(cluster.front, cluster.back, text) == reference
    assert await handed_over(cluster.front, cluster.back, text, split=500) == reference
    assert await cluster.back.pulls(4) == {"ok": 2, "cached": 2}
    await emptied(cluster.front)


async def test_a_prefetch_is_joined(cluster: Cluster) -> None:
    await cluster.fresh()
    text, reference = cluster.prompts[-1], cluster.references[-1]
    transfer_id = uuid.uuid4().hex
    handle = cluster.front.handle(transfer_id, len(text))
    await cluster.back.control.call(prefetch(handle, keep_s=20))
    await cluster.front.generate(text, 1, exporting(transfer_id))
    assert await cluster.back.generate(text, NEW_TOKENS, importing(handle)) == reference
    for rank in range(2):
        ended = await cluster.back.wait_event(PullEnded, transfer_id, rank)
        assert (ended.ok, ended.prefetched, ended.tokens) == (True, True, 1000)
    await emptied(cluster.back)


async def test_aborts_leave_nothing_behind(cluster: Cluster) -> None:
    await cluster.fresh()
    text = cluster.prompts[-1]
    before = await cluster.back.ask("levels")
    handle = cluster.front.handle("unstaged", len(text))
    waiting = asyncio.create_task(cluster.back.generate(text, 4, importing(handle), request_id="importer"))
    doomed = asyncio.create_task(cluster.front.generate(text, 200, exporting("doomed"), request_id="exporter"))
    async with asyncio.timeout(20):
        while (await cluster.back.ask("levels"))["free"] == before["free"]:
            await asyncio.sleep(0.01)
    await cluster.back.abort("importer")
    for rank in range(2):
        await cluster.front.wait_event(StagedChunk, "doomed", rank)
        assert (await cluster.back.wait_event(PullEnded, "unstaged", rank)).error == "cancelled"
    await cluster.front.abort("exporter")
    await emptied(cluster.front)
    async with asyncio.timeout(20):
        while (await cluster.back.ask("levels"))["free"] != before["free"]:
            await asyncio.sleep(0.01)
    assert (await cluster.back.ask("levels"))["requests"] == 0
    for task in (waiting, doomed):
        task.cancel()
