"""Hand-overs between engines that differ in tensor-parallel degree, dtype and KV space.

Across degrees in float32 only: in bfloat16 two ranks alone already differ from one.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.services.worker.kv.vllm.engine_client import NEW_TOKENS, Engine, emptied, handed_over, identical, prompts
from tests.tiny_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

COUNT = 25


@dataclass
class Cluster:
    one: Engine  # float32
    two: Engine  # float32, two ranks, block size 64
    half: Engine  # bfloat16
    wide: Engine  # bfloat16, block size 128
    tight: Engine  # float32, room for about 1500 tokens
    prompts: list[list[int]]
    references: list[list[int]]

    async def fresh(self) -> None:
        for engine in (self.one, self.two, self.half, self.wide, self.tight):
            await engine.ask("reset")
            engine.events.clear()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[False, True], ids=["one step at a time", "overlapping"]
)
async def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """With vLLM's asynchronous scheduling and without; references are of an engine without."""
    overlapping: dict[str, Any] = {"async_scheduling": request.param}
    model = make_llama(tmp_path_factory.mktemp("llama"))
    token_bytes = 3 * 2 * 2 * 32 * 4
    engines = [
        Engine("one", model, dtype="float32"),
        Engine("two", model, dtype="float32", tp=2, block_size=64, **overlapping),
        Engine("half", model, dtype="bfloat16", **overlapping),
        Engine("wide", model, dtype="bfloat16", block_size=128, **overlapping),
        Engine("tight", model, dtype="float32", kv_cache_memory_bytes=1536 * token_bytes, **overlapping),
    ]
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.callback(engine.kill)  # also where another one does not start
        for engine in engines:
            await stack.enter_async_context(engine)
        assert engines[-1].async_scheduling == request.param
        texts = prompts()
        for engine in engines:  # the first forward of two ranks takes seconds
            await engine.generate(texts[-1], 2)
        references = [await engines[0].generate(text, NEW_TOKENS) for text in texts]
        yield Cluster(*engines, prompts=texts, references=references)  # type: ignore[misc]


async def test_two_ranks_to_one(cluster: Cluster) -> None:
    await cluster.fresh()
    outputs = await asyncio.gather(*(handed_over(cluster.two, cluster.one, text) for text in cluster.prompts))
    assert identical(outputs, cluster.references) == COUNT
    assert await cluster.one.pulls(COUNT) == {"ok": COUNT}
    await emptied(cluster.two)


async def test_one_rank_to_two(cluster: Cluster) -> None:
    await cluster.fresh()
    outputs = await asyncio.gather(*(handed_over(cluster.one, cluster.two, text) for text in cluster.prompts))
    assert identical(outputs, cluster.references) == COUNT
    assert await cluster.two.pulls(2 * COUNT) == {"ok": 2 * COUNT}  # one a rank
    await emptied(cluster.one)


async def test_bfloat16_between_block_sizes(cluster: Cluster) -> None:
    """One after the other: the plain engine's own bfloat16 results depend on what shares a batch (seen with AMX)."""
    await cluster.fresh()
    references = [await cluster.half.generate(text, NEW_TOKENS) for text in cluster.prompts]
    for source, target in ((cluster.half, cluster.wide), (cluster.wide, cluster.half)):
        await cluster.fresh()
        outputs = [await handed_over(source, target, text) for text in cluster.prompts]
        assert identical(outputs, references) == COUNT
        assert await target.pulls(COUNT) == {"ok": COUNT}


async def test_bfloat16_to_float32(cluster: Cluster) -> None:
    """Not identical, but the same model: most first tokens agree."""
    await cluster.fresh()
    outputs = [await handed_over(cluster.half, cluster.one, text) for text in cluster.prompts]
    assert await cluster.one.pulls(COUNT) == {"ok": COUNT}
    firsts = sum(output[0] == reference[0] for output, reference in zip(outputs, cluster.references, strict=True))
    assert firsts > COUNT / 2


async def test_preemption_under_a_tight_kv_space(cluster: Cluster) -> None:
    """Both as importer and as exporter: what was staged or pulled before a preemption stays right."""
    await cluster.fresh()
    texts = prompts(seed=2, lengths=(300, 310, 320, 330))
    references = [await cluster.one.generate(text, 200) for text in texts]
    await cluster.fresh()
    outputs = await asyncio.gather(*(handed_over(cluster.one, cluster.tight, text, new_tokens=200) for text in texts))
    assert identical(outputs, references) == len(texts)
    assert (await cluster.tight.ask("levels"))["preemptions"] > 0
    assert await cluster.tight.pulls(len(texts)) == {"ok": len(texts)}

    await cluster.fresh()
    big = [text + text + text[:300] for text in texts]
    references = [await cluster.one.generate(text, NEW_TOKENS) for text in big]
    await cluster.fresh()
    outputs = await asyncio.gather(*(handed_over(cluster.tight, cluster.one, text) for text in big))
    assert identical(outputs, references) == len(big)
    assert await cluster.one.pulls(len(big)) == {"ok": len(big)}
