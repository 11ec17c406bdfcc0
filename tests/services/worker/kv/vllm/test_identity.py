"""Greedy tokens after a hand-over equal those of a single plain engine. float32, block sizes 32 and 128.

Every identity test counts pulls: a silent recomputation would be identical, too. The last test kills an engine.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from services.worker.kv.rank_links import PullEnded, StagedChunk
from shared.domain.kv import Codec
from tests.services.worker.kv.rig import prefetch
from tests.services.worker.kv.vllm.engine_client import (
    LENGTHS,
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


@dataclass
class Cluster:
    plain: Engine
    p: Engine  # block size 32
    d: Engine  # block size 128
    prompts: list[list[int]]
    references: list[list[int]]

    async def fresh(self) -> None:
        """Forget prefixes and counts."""
        for engine in (self.p, self.d):
            await engine.ask("reset")
            await engine.ask("fault", zero=False, corrupt=False)
            engine.events.clear()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[False, True], ids=["one step at a time", "overlapping"]
)
async def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """With vLLM's asynchronous scheduling and without; references are of an engine without."""
    overlapping: dict[str, Any] = {"async_scheduling": request.param}
    model = make_llama(tmp_path_factory.mktemp("llama"))
    plain = Engine("plain", model, dtype="float32", connector=False)
    p = Engine("p", model, dtype="float32", block_size=32, extra={"lossy": True}, **overlapping)
    d = Engine("d", model, dtype="float32", block_size=128, extra={"lossy": True}, **overlapping)
    async with AsyncExitStack() as stack:
        for engine in (plain, p, d):
            stack.callback(engine.kill)  # also where another one does not start
        for engine in (plain, p, d):
            await stack.enter_async_context(engine)
        assert d.async_scheduling == request.param
        texts = prompts()
        references = [await plain.generate(text, NEW_TOKENS) for text in texts]
        assert len({token for reference in references for token in reference}) > 100  # not degenerate
        yield Cluster(plain, p, d, texts, references)


async def test_one_after_the_other(cluster: Cluster) -> None:
    await cluster.fresh()
    outputs = [await handed_over(cluster.p, cluster.d, text) for text in cluster.prompts]
    assert identical(outputs, cluster.references) == len(LENGTHS)
    assert await cluster.d.pulls(len(LENGTHS)) == {"ok": len(LENGTHS)}
    await emptied(cluster.p)


async def test_all_at_once_with_chunks_that_leave_while_the_prompt_is_prefilled(cluster: Cluster) -> None:
    await cluster.fresh()
    outputs = await asyncio.gather(*(handed_over(cluster.p, cluster.d, text) for text in cluster.prompts))
    assert identical(outputs, cluster.references) == len(LENGTHS)
    assert await cluster.d.pulls(len(LENGTHS)) == {"ok": len(LENGTHS)}
    chunks = [event for event in cluster.p.events if isinstance(event, StagedChunk)]
    assert len(chunks) > len(LENGTHS)
    await emptied(cluster.p)


async def test_any_split(cluster: Cluster) -> None:
    await cluster.fresh()
    cases = [
        (text, reference, split)
        for text, reference in zip(cluster.prompts, cluster.references, strict=True)
        for split in sorted({1, len(text) // 3, len(text) // 2, len(text) * 4 // 5, len(text) - 1} - {0})
        if split < len(text)
    ]
    assert len(cases) >= 60
    for first in range(0, len(cases), 12):
        await cluster.d.ask("reset")
        part = cases[first : first + 12]
        outputs = await asyncio.gather(
            *(handed_over(cluster.p, cluster.d, text, split=split) for text, _, split in part)
        )
        assert identical(outputs, [reference for _, reference, _ in part]) == len(part)
    # What a neighbour's prompt has left in the cache is not pulled again.
    pulled = await cluster.d.pulls(60)
    assert set(pulled) <= {"ok", "cached"}
    assert pulled["ok"] >= 60


async def test_roles_reversed_and_both_directions_at_once(cluster: Cluster) -> None:
    await cluster.fresh()
    outputs = await asyncio.gather(*(handed_over(cluster.d, cluster.p, text) for text in cluster.prompts))
    assert identical(outputs, cluster.references) == len(LENGTHS)
    assert await cluster.p.pulls(len(LENGTHS)) == {"ok": len(LENGTHS)}

    await cluster.fresh()
    pairs = [(cluster.p, cluster.d), (cluster.d, cluster.p)]
    outputs = await asyncio.gather(
        *(handed_over(*pairs[index % 2], text) for index, text in enumerate(cluster.prompts))
    )
    assert identical(outputs, cluster.references) == len(LENGTHS)
    to_p = len(LENGTHS) // 2
    assert await cluster.p.pulls(to_p) == {"ok": to_p}
    assert await cluster.d.pulls(len(LENGTHS) - to_p) == {"ok": len(LENGTHS) - to_p}


async def test_the_first_token_is_carried(cluster: Cluster) -> None:
    await cluster.fresh()
    outputs = []
    for text in cluster.prompts:
        transfer_id = uuid.uuid4().hex
        first = await cluster.p.generate(text, 1, exporting(transfer_id))
        handle = cluster.p.handle(transfer_id, len(text))
        outputs.append(first + await cluster.d.generate(text + first, NEW_TOKENS - 1, importing(handle)))
    assert identical(outputs, cluster.references) == len(LENGTHS)
    assert await cluster.d.pulls(len(LENGTHS)) == {"ok": len(LENGTHS)}


async def test_only_what_is_not_cached_is_pulled(cluster: Cluster) -> None:
    await cluster.fresh()
    text, reference = cluster.prompts[-1], cluster.references[-1]
    await cluster.d.generate(text[:600], 1)
    assert await handed_over(cluster.p, cluster.d, text) == reference
    (ended,) = [event for event in cluster.d.events if isinstance(event, PullEnded)]
    assert (ended.ok, ended.tokens) == (True, 1000 - 512)  # whole blocks of 128 were cached

    assert await handed_over(cluster.p, cluster.d, text, split=500) == reference
    assert await cluster.d.pulls(2) == {"ok": 1, "cached": 1}
    await emptied(cluster.p)  # although nothing was pulled


async def test_a_prefetch_is_joined(cluster: Cluster) -> None:
    await cluster.fresh()
    text, reference = cluster.prompts[-1], cluster.references[-1]
    transfer_id = uuid.uuid4().hex
    handle = cluster.p.handle(transfer_id, len(text))
    await cluster.d.control.call(prefetch(handle, keep_s=20))
    await cluster.p.generate(text, 1, exporting(transfer_id))
    assert await cluster.d.generate(text, NEW_TOKENS, importing(handle)) == reference
    ended = await cluster.d.wait_event(PullEnded, transfer_id)
    assert (ended.ok, ended.prefetched, ended.tokens) == (True, True, 1000)
    await emptied(cluster.d)


async def test_zeroed_kv_would_be_noticed(cluster: Cluster) -> None:
    await cluster.fresh()
    await cluster.d.ask("fault", zero=True, corrupt=False)
    outputs = [await handed_over(cluster.p, cluster.d, text) for text in cluster.prompts]
    assert await cluster.d.pulls(len(LENGTHS)) == {"ok": len(LENGTHS)}
    assert identical(outputs, cluster.references) < len(LENGTHS) / 2


async def test_corruption_is_recomputed(cluster: Cluster) -> None:
    await cluster.fresh()
    await cluster.p.ask("fault", zero=False, corrupt=True)
    outputs = await asyncio.gather(*(handed_over(cluster.p, cluster.d, text) for text in cluster.prompts))
    assert identical(outputs, cluster.references) == len(LENGTHS)
    assert await cluster.d.pulls(len(LENGTHS)) == {"checksum": len(LENGTHS)}
    await emptied(cluster.p)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
async def test_lossy_kv_stays_away_from_exact_requests(cluster: Cluster, codec: Codec) -> None:
    await cluster.fresh()
    texts, references = cluster.prompts[-6:], cluster.references[-6:]
    outputs = [await handed_over(cluster.p, cluster.d, text, codec=codec) for text in texts]
    assert await cluster.d.pulls(6) == {"ok": 6}
    assert all(len(output) == NEW_TOKENS for output in outputs)
    exact = [await handed_over(cluster.p, cluster.d, text) for text in texts]
    assert identical(exact, references) == 6
    assert await cluster.d.pulls(12) == {"ok": 12}


async def test_lossy_kv_is_refused_without_a_salt(cluster: Cluster) -> None:
    await cluster.fresh()
    text, reference = cluster.prompts[-1], cluster.references[-1]
    assert await handed_over(cluster.p, cluster.d, text, codec=Codec.INT4, salt=False) == reference
    assert await cluster.d.pulls(1) == {"unsalted": 1}
    await emptied(cluster.p)


async def test_waiting_for_kv_ends_at_its_deadline_and_leaves_the_cpu_alone(cluster: Cluster) -> None:
    await cluster.fresh()
    before = await cluster.d.ask("levels")
    handle = cluster.p.handle("never", len(cluster.prompts[10]))
    output = await cluster.d.generate(cluster.prompts[10], NEW_TOKENS, importing(handle, deadline_s=2.0))
    after = await cluster.d.ask("levels")
    assert output == cluster.references[10]
    (code,) = await cluster.d.pulls()
    assert code == "timeout"
    assert (after["cpu_s"] - before["cpu_s"]) / (after["now_s"] - before["now_s"]) < 0.6


async def test_an_aborted_import_frees_its_blocks_within_a_second(cluster: Cluster) -> None:
    await cluster.fresh()
    text = cluster.prompts[-1]
    before = await cluster.d.ask("levels")
    handle = cluster.p.handle("unstaged", len(text))
    waiting = asyncio.create_task(cluster.d.generate(text, 4, importing(handle), request_id="doomed"))
    async with asyncio.timeout(20):
        while (await cluster.d.ask("levels"))["free"] == before["free"]:
            await asyncio.sleep(0.01)
    await cluster.d.abort("doomed")
    async with asyncio.timeout(1):
        assert (await cluster.d.wait_event(PullEnded, "unstaged")).error == "cancelled"
        while (await cluster.d.ask("levels"))["free"] != before["free"]:
            await asyncio.sleep(0.01)
    waiting.cancel()
    assert (await cluster.d.ask("levels"))["requests"] == 0


async def test_an_aborted_prefill_drops_its_staging(cluster: Cluster) -> None:
    await cluster.fresh()
    text = cluster.prompts[-1]
    doomed = asyncio.create_task(cluster.p.generate(text, 200, exporting("doomed"), request_id="doomed"))
    await cluster.p.wait_event(StagedChunk, "doomed")
    await cluster.p.abort("doomed")
    await emptied(cluster.p)
    doomed.cancel()
    handle = cluster.p.handle("doomed", len(text))
    assert await cluster.d.generate(text, NEW_TOKENS, importing(handle)) == cluster.references[-1]
    assert await cluster.d.pulls(1) == {"released": 1}


async def test_a_killed_exporter_is_recomputed(cluster: Cluster) -> None:
    """Kills an engine: no test may follow in this module."""
    await cluster.fresh()
    text, reference = cluster.prompts[-1], cluster.references[-1]
    await cluster.p.generate(text, 1, exporting("orphan"))
    handle = cluster.p.handle("orphan", len(text))
    cluster.p.kill()
    output = await asyncio.wait_for(cluster.d.generate(text, NEW_TOKENS, importing(handle)), 15)
    assert output == reference
    (code,) = await cluster.d.pulls()
    assert code in ("unreachable", "peer_lost")
