"""Hand-overs where tensor-parallel ranks and pipeline stages meet, in float32."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.services.worker.kv.vllm.engine_client import NEW_TOKENS, Engine, emptied, handed_over, identical, prompts
from tests.tiny_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

COUNT = 8


@dataclass
class Cluster:
    two: Engine  # two ranks that share heads
    line: Engine  # two stages: 1 + 2 layers
    grid: Engine  # two stages of two ranks: 2 + 1 layers
    prompts: list[list[int]]
    references: list[list[int]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    plain = Engine("plain", model, dtype="float32", connector=False)
    engines = [
        Engine("two", model, dtype="float32", tp=2),
        Engine("line", model, dtype="float32", pp=2, layers=(1, 2)),
        Engine("grid", model, dtype="float32", tp=2, pp=2, block_size=64),
    ]
    async with AsyncExitStack() as stack:
        for engine in (plain, *engines):
            stack.callback(engine.kill)  # also where another one does not start
        texts = prompts()[-COUNT:]
        async with plain:
            references = [await plain.generate(text, NEW_TOKENS) for text in texts]
        for engine in engines:
            await stack.enter_async_context(engine)
            await engine.generate(texts[-1], 2)  # the first forward of several ranks takes seconds
        yield Cluster(*engines, prompts=texts, references=references)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("source", "target"), [("two", "line"), ("line", "two"), ("grid", "line"), ("line", "grid"), ("two", "grid")]
)
async def test_between_ranks_and_stages(cluster: Cluster, source: str, target: str) -> None:
    exporter, importer = getattr(cluster, source), getattr(cluster, target)
    for engine in (exporter, importer):
        await engine.ask("reset")
        engine.events.clear()
    outputs = [await handed_over(exporter, importer, text) for text in cluster.prompts]
    pulls = COUNT * len(importer.endpoints)
    assert await importer.pulls(pulls) == {"ok": pulls}
    assert identical(outputs, cluster.references) == COUNT
    await asyncio.gather(emptied(exporter), emptied(importer))
