"""KV that goes by NIXL between two real engines of unlike block sizes, both ways, is the KV that was computed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from services.worker.kv.rank_links import PullEnded, Stats
from services.worker.kv.wire.nixl_agent import installed
from tests.services.worker.kv.vllm.engine_client import (
    LENGTHS,
    NEW_TOKENS,
    Engine,
    emptied,
    handed_over,
    identical,
    prompts,
)
from tests.tiny_models import make_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not installed(), reason="nixl is not installed"),
]
Engines = tuple[Engine, Engine, Engine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """A plain one, and two with NIXL."""
    model = make_llama(tmp_path_factory.mktemp("llama"))
    plain = Engine("plain", model, dtype="float32", connector=False)
    p = Engine("p", model, dtype="float32", block_size=32, scheme="nixl")
    d = Engine("d", model, dtype="float32", block_size=128, scheme="nixl")
    async with AsyncExitStack() as stack:
        for engine in (plain, p, d):
            stack.callback(engine.kill)
        for engine in (plain, p, d):
            await stack.enter_async_context(engine)
        yield plain, p, d


def carried(engine: Engine) -> set[str]:
    return {event.transport for event in engine.events if isinstance(event, PullEnded) and event.tokens}


async def test_both_directions_at_once(engines: Engines) -> None:
    plain, p, d = engines
    there, back = prompts(), prompts(seed=2)
    references = [await plain.generate(text, NEW_TOKENS) for text in (*there, *back)]
    outputs = await asyncio.gather(
        *(handed_over(p, d, text) for text in there), *(handed_over(d, p, text) for text in back)
    )
    assert identical(outputs, references) == 2 * len(LENGTHS)
    for engine in (p, d):
        assert await engine.pulls(len(LENGTHS)) == {"ok": len(LENGTHS)}
        assert carried(engine) == {"nixl"}
        (stats,) = await engine.control.call(Stats())
        assert stats.nixl_received_bytes == stats.received_bytes > 0
        assert stats.nixl_failures == 0
        await emptied(engine)


async def test_corruption_is_recomputed(engines: Engines) -> None:
    plain, p, d = engines
    text = prompts(seed=3, lengths=(300,))[0]
    await d.ask("reset")
    d.events.clear()
    await p.ask("fault", zero=False, corrupt=True)
    assert await handed_over(p, d, text) == await plain.generate(text, NEW_TOKENS)
    assert await d.pulls(1) == {"checksum": 1}


async def test_zeroed_kv_would_be_noticed(engines: Engines) -> None:
    plain, p, d = engines
    text = prompts(seed=4, lengths=(300,))[0]
    await p.ask("fault", zero=False, corrupt=False)
    await d.ask("fault", zero=True, corrupt=False)
    assert await handed_over(p, d, text) != await plain.generate(text, NEW_TOKENS)
