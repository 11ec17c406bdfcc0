"""Greedy tokens after a hand-over equal those of one plain engine, between engines of unlike block sizes, ranks, stages
and precisions. float32: across tensor-parallel degrees only that is exact.

Tests of identity count pulls: a silent recomputation would be identical, too. The last test kills an engine.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from benchmarks.engine_client import NEW_TOKENS, Engine, emptied, exporting, handed_over, identical, importing, prompts
from services.worker.kv.rank_messages import PullEnded, Release, StagedChunk, Stats
from services.worker.kv.wire.nixl_agent import installed
from shared.domain.kv import Codec
from tests.services.worker.kv.rig import prefetch
from tests.tiny_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
OVERLAPPING: dict[str, Any] = {"async_scheduling": True}  # vLLM's CPU backend cannot, with pipeline stages
LOSSY: dict[str, Any] = {"extra": {"lossy": True}}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"connector": False},
    "p": {**LOSSY, **OVERLAPPING},
    "d": {"block_size": 128, **LOSSY, **OVERLAPPING},
    "one": {"scheme": "nixl" if installed() else "kv"},
    "nixl": {"scheme": "nixl", "block_size": 128, **OVERLAPPING},
    "two": {"tp": 2, "block_size": 64, **OVERLAPPING},
    "front": {"pp": 2},  # stages of 2 + 1 layers
    "back": {"pp": 2, "layers": (1, 2), "block_size": 64},
    "grid": {"tp": 2, "pp": 2, "block_size": 64},
    "half": {"dtype": "bfloat16", **OVERLAPPING},
    "wide": {"dtype": "bfloat16", "block_size": 128, **OVERLAPPING},
    "tight": {"kv_cache_memory_bytes": 1536 * TOKEN_BYTES, **OVERLAPPING},  # room for about 1500 tokens
}


class Engines:
    """The engines of this file: each is started for the first test that needs it and serves all later ones."""

    def __init__(self, model: Path) -> None:
        self.prompts = prompts()
        self.references: list[list[int]] = []  # answers of the plain engine to the prompts
        self._model = model
        self._engines: dict[str, Engine] = {}

    async def get(self, *names: str) -> list[Engine]:
        """These engines, without the prefixes, faults and events of earlier tests."""
        missing = [name for name in ("plain", *names) if name not in self._engines]
        started = {name: Engine(name, self._model, **({"dtype": "float32"} | ENGINES[name])) for name in missing}
        try:
            for name, engine in started.items():
                self._engines[name] = await engine.__aenter__()
                await engine.generate(self.prompts[-1], 2)  # the first forward of several ranks takes seconds
        finally:
            for name in started.keys() - self._engines.keys():  # another one did not start
                await started[name].__aexit__()
        if not self.references:
            self.references = [await self._engines["plain"].generate(text, NEW_TOKENS) for text in self.prompts]
            assert len({token for reference in self.references for token in reference}) > 50  # not degenerate
        found = [self._engines[name] for name in names]
        for engine in found:
            await engine.ask("reset")
            if engine.name != "plain":
                await engine.ask("fault", zero=False, corrupt=False)
            engine.events.clear()
        return found

    async def stop(self) -> None:
        await asyncio.gather(*(engine.__aexit__() for engine in self._engines.values()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    engines = Engines(make_llama(tmp_path_factory.mktemp("llama")))
    try:
        yield engines
    finally:
        await engines.stop()


@dataclass(frozen=True)
class Pair:
    """An exporter and an importer."""

    source: Engine
    target: Engine
    prompts: list[list[int]]
    references: list[list[int]]  # a plain engine's answers to the prompts

    @property
    def ranks(self) -> int:
        """Of the importer: each pulls its own part."""
        return len(self.target.endpoints)

    async def pulled(self, hand_overs: int) -> bool:
        """Whether each rank has pulled KV for each of so many hand-overs."""
        wanted = hand_overs * self.ranks
        return await self.target.pulls(wanted) == {"ok": wanted}


@pytest_asyncio.fixture(loop_scope="module")
async def pair(request: pytest.FixtureRequest, engines: Engines) -> Pair:
    source, target = await engines.get(*request.param.split())
    return Pair(source, target, engines.prompts, engines.references)


def each(*pairs: str) -> pytest.MarkDecorator:
    """The test runs for each of these pairs: the names of an exporter and an importer."""
    needs_nixl = pytest.mark.skipif(not installed(), reason="nixl is not installed")
    values = [pytest.param(pair, id=pair, marks=needs_nixl if "nixl" in pair else ()) for pair in pairs]
    return pytest.mark.parametrize("pair", values, indirect=True)


@each("p d", "d p", "one d", "two one", "one two", "one back", "front one", "front back", "back front", "two back")
async def test_all_prompts_at_once(pair: Pair) -> None:
    """Chunks leave while a prompt is prefilled, from each rank of the exporter to each rank of the importer."""
    await exchange(pair, len(pair.prompts))


@each("back two", "grid back", "back grid", "two grid")
async def test_long_prompts_at_once(pair: Pair) -> None:
    await exchange(pair, 8)


async def exchange(pair: Pair, count: int) -> None:
    texts, references = pair.prompts[-count:], pair.references[-count:]
    outputs = await asyncio.gather(*(handed_over(pair.source, pair.target, text) for text in texts))
    assert identical(outputs, references) == count
    assert await pair.pulled(count)
    pulled = Counter(event.rank for event in pair.target.events if isinstance(event, PullEnded))
    assert pulled == dict.fromkeys(range(pair.ranks), count)
    ranks = range(len(pair.source.endpoints))
    assert await pair.source.exports(count * len(ranks)) == dict.fromkeys(ranks, count)
    await asyncio.gather(emptied(pair.source), emptied(pair.target))


@each("p d", "one nixl")
async def test_both_directions_at_once(pair: Pair) -> None:
    ends = [(pair.source, pair.target), (pair.target, pair.source)]
    outputs = await asyncio.gather(*(handed_over(*ends[at % 2], text) for at, text in enumerate(pair.prompts)))
    assert identical(outputs, pair.references) == len(pair.prompts)
    to_source = len(pair.prompts) // 2
    for engine, count in ((pair.source, to_source), (pair.target, len(pair.prompts) - to_source)):
        assert await engine.pulls(count) == {"ok": count}
        carriers = {event.transport for event in engine.events if isinstance(event, PullEnded) and event.tokens}
        assert carriers == {"nixl" if pair.target.name == "nixl" else "tcp"}
        (stats,) = await engine.control.call(Stats())
        assert stats.nixl_failures == 0


@each("p d", "front back")
async def test_any_split(pair: Pair) -> None:
    cases = [
        (text, reference, split)
        for text, reference in list(zip(pair.prompts, pair.references, strict=True))[1::2]
        for split in sorted({1, len(text) // 3, len(text) * 4 // 5, len(text) - 1} - {0})
    ]
    assert len(cases) >= 35
    for first in range(0, len(cases), 12):
        await pair.target.ask("reset")
        part = cases[first : first + 12]
        outputs = await asyncio.gather(
            *(handed_over(pair.source, pair.target, text, split=split) for text, _, split in part)
        )
        assert identical(outputs, [reference for _, reference, _ in part]) == len(part)
    # What a neighbour's prompt has left in the cache is not pulled again.
    pulled = await pair.target.pulls(len(cases) * pair.ranks)
    assert set(pulled) <= {"ok", "cached"}
    assert pulled["ok"] >= 35


@each("p d", "front back")
async def test_the_first_token_is_carried(pair: Pair) -> None:
    outputs = []
    for text in pair.prompts[-8:]:
        transfer_id = uuid.uuid4().hex
        first = await pair.source.generate(text, 1, exporting(transfer_id))
        handle = pair.source.handle(transfer_id, len(text))
        outputs.append(first + await pair.target.generate(text + first, NEW_TOKENS - 1, importing(handle)))
    assert identical(outputs, pair.references[-8:]) == 8
    assert await pair.pulled(8)


@each("p d", "front back")
async def test_only_tokens_that_are_not_cached_are_pulled(pair: Pair) -> None:
    text, reference, ranks = pair.prompts[-1], pair.references[-1], pair.ranks
    await pair.target.generate(text[:600], 1)
    assert await handed_over(pair.source, pair.target, text) == reference
    assert await pair.pulled(1)
    cached = 512 if ranks == 1 else 576  # whole blocks of 128, or 64
    assert {event.tokens for event in pair.target.events if isinstance(event, PullEnded)} == {1000 - cached}
    assert await handed_over(pair.source, pair.target, text, split=500) == reference
    assert await pair.target.pulls(2 * ranks) == {"ok": ranks, "cached": ranks}
    await emptied(pair.source)  # although nothing was pulled


@each("p d", "front back")
async def test_a_prefetch_is_joined(pair: Pair) -> None:
    text, transfer_id = pair.prompts[-1], uuid.uuid4().hex
    handle = pair.source.handle(transfer_id, len(text))
    await pair.target.control.call(prefetch(handle, keep_s=20))
    await pair.source.generate(text, 1, exporting(transfer_id))
    assert await pair.target.generate(text, NEW_TOKENS, importing(handle)) == pair.references[-1]
    for rank in range(pair.ranks):
        ended = await pair.target.wait_event(PullEnded, transfer_id, rank)
        assert (ended.ok, ended.prefetched, ended.tokens) == (True, True, 1000)
    await emptied(pair.target)


@each("p d", "one nixl", "front back")
async def test_zeroed_kv_of_either_stage_would_be_noticed(pair: Pair) -> None:
    for stage in range(pair.ranks):
        await pair.target.ask("reset")
        pair.target.events.clear()
        await pair.target.ask("fault", zero=True, corrupt=False, stage=stage)
        outputs = [await handed_over(pair.source, pair.target, text) for text in pair.prompts]
        assert await pair.pulled(len(pair.prompts))
        assert identical(outputs, pair.references) < len(pair.prompts) / 2


@each("p d", "one nixl", "front back")
async def test_corruption_is_recomputed(pair: Pair) -> None:
    ranks, count = pair.ranks, len(pair.prompts)
    await pair.source.ask("fault", zero=False, corrupt=True, stage=ranks - 1)
    outputs = await asyncio.gather(*(handed_over(pair.source, pair.target, text) for text in pair.prompts))
    assert identical(outputs, pair.references) == count
    failed = count * (1 if ranks == 1 else 2)  # front's second stage has layers of one, back's of both ranks
    assert (await pair.target.pulls(count * ranks))["checksum"] in (count, failed)
    await emptied(pair.source)


@each("p d", "d one", "two one", "front back", "nixl one")
async def test_a_cached_prefix_is_exported(pair: Pair) -> None:
    """Whole blocks of what was computed for an earlier request, the tokens of its answer among them."""
    text, (source, target) = pair.prompts[-1], (pair.source, pair.target)
    answer = await source.generate(text, NEW_TOKENS)
    free = (await source.ask("levels"))["free"]
    longer = [*text, *answer, 5, 6, 7]
    reference = await source.generate(longer, NEW_TOKENS)
    handle = await source.export(longer[:900])
    assert 900 - 128 < handle.tokens <= 900
    assert await target.generate(longer, NEW_TOKENS, importing(handle)) == reference
    assert await pair.pulled(1)
    assert {event.tokens for event in target.events if isinstance(event, PullEnded)} == {handle.tokens}
    await emptied(source)
    assert (await source.ask("levels"))["free"] == free
    unknown = await source.export([*reversed(text)])
    assert unknown.tokens == 0
    other = await source.export(longer, salt="other")
    assert other.tokens == 0
    refused = await source.export(longer, room=False)
    assert refused.tokens == 0
    assert (await source.ask("levels"))["free"] == free


@each("p d", "d one", "two one", "front back", "nixl one")
async def test_a_request_is_exported_while_it_runs_and_when_it_leaves(pair: Pair) -> None:
    text, (source, target) = pair.prompts[-1], (pair.source, pair.target)
    reference = await source.generate(text, 64)
    await source.ask("reset")
    running = asyncio.create_task(source.generate(text, 64, request_id="moved"))
    handle = await source.export_running("moved", at=8, until=24)
    assert 1000 <= handle.tokens <= 1016
    await target.generate([*text, *reference][: handle.tokens + 1], 1, importing(handle))
    cached = handle.tokens - handle.tokens % 128  # whole blocks of each engine
    output, rest = await source.leave("moved", at=24, start=cached)
    assert output == reference[: len(output)]
    assert 24 <= len(output) < 40  # steps under way are executed
    assert rest.tokens == 1000 + len(output) - 1
    left = 64 - len(output)
    assert await target.generate([*text, *output], left, importing(rest)) == reference[len(output) :]
    assert await pair.pulled(2)
    assert max(event.tokens for event in target.events[-pair.ranks :] if isinstance(event, PullEnded)) <= 40 + 128
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await emptied(source)
    levels = await source.ask("levels")
    assert (levels["requests"], levels["free"]) == (0, levels["blocks"])


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
@each("p d")
async def test_lossy_kv_stays_away_from_exact_requests(pair: Pair, codec: Codec) -> None:
    p, d, texts, references = pair.source, pair.target, pair.prompts[-6:], pair.references[-6:]
    outputs = [await handed_over(p, d, text, codec=codec) for text in texts]
    assert await pair.pulled(6)
    assert all(len(output) == NEW_TOKENS for output in outputs)
    assert identical([await handed_over(p, d, text) for text in texts], references) == 6
    assert await pair.pulled(12)
    assert await handed_over(p, d, texts[-1] + [5], codec=codec, salt=False) is not None
    assert await d.pulls(13) == {"ok": 12, "unsalted": 1}


@each("p d", "d one")
async def test_waiting_for_kv_ends_at_its_deadline_and_leaves_the_cpu_alone(pair: Pair) -> None:
    before = await pair.target.ask("levels")
    handle = pair.source.handle("never", len(pair.prompts[10]))
    output = await pair.target.generate(pair.prompts[10], NEW_TOKENS, importing(handle, deadline_s=2.0))
    after = await pair.target.ask("levels")
    assert output == pair.references[10]
    assert set(await pair.target.pulls()) == {"timeout"}
    assert (after["cpu_s"] - before["cpu_s"]) / (after["now_s"] - before["now_s"]) < 0.6


@each("p d", "front back")
async def test_aborts_leave_nothing_behind(pair: Pair) -> None:
    source, target, text = pair.source, pair.target, pair.prompts[-1]
    before = await target.ask("levels")
    handle = source.handle("unstaged", len(text))
    waiting = asyncio.create_task(target.generate(text, 4, importing(handle), request_id="importer"))
    await source.hold("exporter", at=8)  # it would end while the machine pauses this test
    doomed = asyncio.create_task(source.generate(text, 200, exporting("doomed"), request_id="exporter"))
    async with asyncio.timeout(60):
        while (await target.ask("levels"))["free"] == before["free"]:
            await asyncio.sleep(0.01)
    await target.abort("importer")
    for rank in range(pair.ranks):
        await source.wait_event(StagedChunk, "doomed", rank)
        assert (await target.wait_event(PullEnded, "unstaged", rank)).error == "cancelled"
    await source.abort("exporter")
    await emptied(source)
    async with asyncio.timeout(60):
        while (await target.ask("levels"))["free"] != before["free"]:
            await asyncio.sleep(0.01)
    assert (await target.ask("levels"))["requests"] == 0
    for task in (waiting, doomed):
        task.cancel()
    released = importing(source.handle("doomed", len(text)))
    assert await target.generate(text, NEW_TOKENS, released) == pair.references[-1]
    assert (await target.pulls(2 * pair.ranks))["released"] == pair.ranks


async def test_stages_are_read_from_the_engine_and_a_handle_of_others_is_recomputed(engines: Engines) -> None:
    one, front, back = await engines.get("one", "front", "back")
    assert [engine.stages for engine in (one, front, back)] == [(), (2, 1), (1, 2)]
    text, reference = engines.prompts[-1], engines.references[-1]
    for stages in ((1, 2), (2, 2)):
        transfer_id = uuid.uuid4().hex
        await front.generate(text, 1, exporting(transfer_id))
        handle = msgspec.structs.replace(front.handle(transfer_id, len(text)), stages=stages)
        assert await one.generate(text, NEW_TOKENS, importing(handle)) == reference
        await front.control.call(Release(transfer_id))
    assert await one.pulls(2) == {"invalid_request": 2}


async def test_bfloat16_between_block_sizes_and_to_float32(engines: Engines) -> None:
    """One after the other: the plain engine's own bfloat16 results depend on what shares a batch (seen with AMX)."""
    count, texts = len(engines.prompts), engines.prompts
    half, wide, one = await engines.get("half", "wide", "one")
    references = [await half.generate(text, NEW_TOKENS) for text in texts]
    for source, target in ((half, wide), (wide, half)):
        await engines.get("half", "wide")
        assert identical([await handed_over(source, target, text) for text in texts], references) == count
        assert await target.pulls(count) == {"ok": count}
    outputs = [await handed_over(half, one, text) for text in texts]
    assert await one.pulls(count) == {"ok": count}
    firsts = sum(output[0] == reference[0] for output, reference in zip(outputs, engines.references, strict=True))
    assert firsts > count / 2  # not identical, but the same model


async def test_preemption_under_a_tight_kv_space(engines: Engines) -> None:
    """Both as importer and as exporter: what was staged or pulled before a preemption stays right."""
    plain, one, tight = await engines.get("plain", "one", "tight")
    texts = prompts(seed=2, lengths=(300, 310, 320, 330))
    big = [text + text + text[:300] for text in texts]
    for source, target, wanted, tokens in ((one, tight, texts, 200), (tight, one, big, NEW_TOKENS)):
        references = [await plain.generate(text, tokens) for text in wanted]
        await engines.get("one", "tight")
        outputs = await asyncio.gather(*(handed_over(source, target, text, new_tokens=tokens) for text in wanted))
        assert identical(outputs, references) == len(wanted)
        assert await target.pulls(len(wanted)) == {"ok": len(wanted)}
    assert (await tight.ask("levels"))["preemptions"] > 0


@each("p d")
async def test_a_killed_exporter_is_recomputed(pair: Pair) -> None:
    """Kills an engine: no test of it may follow."""
    text, reference = pair.prompts[-1], pair.references[-1]
    await pair.source.generate(text, 1, exporting("orphan"))
    handle = pair.source.handle("orphan", len(text))
    pair.source.kill()
    assert await asyncio.wait_for(pair.target.generate(text, NEW_TOKENS, importing(handle)), 60) == reference
    (code,) = await pair.target.pulls()
    assert code in ("unreachable", "peer_lost")
