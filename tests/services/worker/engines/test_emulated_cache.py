"""The emulated engine's prefix cache: it saves what vLLM's would, within its memory, and tells of it."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from services.worker.engines.base import CacheEvent, EngineRequest
from services.worker.engines.emulated import EmulatedEngine
from services.worker.prefix_feed import HeldPrefixes
from shared.domain.instance import Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import KvHandle
from shared.domain.prompt import BLOCK_TOKENS, block_hashes
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, HostTier, RunSpec
from shared.sim.workload import Workload
from shared.wire.messages import Reused, TokenStep
from tests.services.worker.engines.test_emulated import finish, handle, settings, steps
from tests.shared.sim.clusters import instance

PROMPT = list(range(1, 321))


def request(
    name: str, prompt: list[int], salt: str = "", from_: KvHandle | None = None, output: int = 2
) -> EngineRequest:
    job = JobView(name, len(prompt), output)
    return EngineRequest(name, job, prompt, Generation(b"", 1.0, salt), output, import_from=from_)


class Told:
    def __init__(self) -> None:
        self.held = HeldPrefixes(tiered=True)
        self.events: list[CacheEvent] = []

    def __call__(self, events: Sequence[CacheEvent]) -> None:
        self.events += events
        for event in events:
            self.held.apply(event)

    def tokens(self, prompt: list[int], salt: str = "") -> int:
        blocks = self.held.reachable.blocks
        hashes = block_hashes(prompt, salt)
        return BLOCK_TOKENS * next((at for at, one in enumerate(hashes) if one not in blocks), len(hashes))


async def run(told: Told, *requests: EngineRequest, **more: object) -> list[int]:
    """Prompt tokens that each request, one after the other, computes; the engine's own count agrees."""
    engine = EmulatedEngine(settings(**more), on_cache=told)
    await engine.start()
    try:
        found, prompts, total = [], 0, engine.stats().free_blocks
        for one in requests:
            before = len(steps(engine))
            await finish(engine, one)
            taken = steps(engine)[before:]
            computed = sum(tokens for step in taken for tokens, _ in step.prefill)
            computed += sum(step.decode_count for step in taken) - (one.max_tokens - 1)
            found.append(computed)
            prompts += len(one.prompt_token_ids)
        assert engine.stats().free_blocks == total
        assert engine.stats().prompt_tokens in (0, prompts)
        if not any(one.import_from for one in requests):
            assert (
                engine.stats().hit_tokens == engine.stats().prompt_tokens - sum(found) or not engine.stats().hit_tokens
            )
        return found
    finally:
        await engine.close()


async def test_a_second_request_computes_what_the_first_did_not() -> None:
    told, longer = Told(), [*PROMPT, *range(1000, 1040)]
    assert await run(told, request("a", PROMPT), request("b", longer), request("c", PROMPT)) == [320, 40, 32]
    assert told.tokens(longer) == 320


async def test_the_first_tokens_say_what_was_reused() -> None:
    engine = EmulatedEngine(settings())
    await engine.start()
    engine.link.expect("t")
    said: list[Reused | None] = []
    for one in (
        request("a", PROMPT[:130]),
        request("b", PROMPT, from_=handle(300)),
        request("c", PROMPT),
        request("d", PROMPT, "other", output=1),
    ):
        ended, first = asyncio.Event(), len(said)

        def take(step: TokenStep, ended: asyncio.Event = ended) -> None:
            said.append(step.reused)
            if step.finish_reason:
                ended.set()

        engine.submit(one, take)
        await asyncio.wait_for(ended.wait(), 10)
        assert not any(said[first + 1 :])
    await engine.close()
    assert [one for one in said if one is not None] == [
        Reused(0, 128, 0),
        Reused(300, 20, 300 - 128),
        Reused(288, 32, 0),
        Reused(0, 320, 0),
    ]


async def test_another_salt_finds_nothing() -> None:
    told = Told()
    work = (request("a", PROMPT), request("b", PROMPT, "s"), request("c", PROMPT, "s"), request("d", PROMPT, "t"))
    assert await run(told, *work) == [320, 320, 32, 320]
    assert told.tokens(PROMPT, "s") == 320
    assert told.tokens(PROMPT, "other") == 0


async def test_without_the_cache_all_is_computed_and_nothing_is_told() -> None:
    told = Told()
    assert await run(told, request("a", PROMPT), request("b", PROMPT), emulated_prefix_cache=False) == [320, 320]
    assert not told.events


async def test_imported_kv_counts_like_computed_kv() -> None:
    told = Told()
    assert await run(told, request("a", PROMPT, from_=handle(320)), request("b", PROMPT)) == [1, 32]
    assert told.tokens(PROMPT) == 320


async def test_of_imported_kv_only_the_rest_is_pulled() -> None:
    engine = EmulatedEngine(settings())
    await engine.start()
    await finish(engine, request("a", PROMPT[:130]), request("b", PROMPT, "other"))
    engine.link.expect("t")
    await finish(engine, request("c", PROMPT, from_=handle(320)))
    report = engine.link.known("t")
    assert report is not None
    assert report.tokens == 320 - 128
    await engine.close()


async def test_memory_is_for_the_running_ones_first() -> None:
    """Fifteen blocks of 32: a second prompt leaves four of the first one's, its beginning."""
    told, other = Told(), list(range(2000, 2320))
    bytes_of_block = 131_072 * 32  # Llama-3-8B in 16 bits
    work = (request("a", PROMPT), request("b", other), request("c", PROMPT), request("d", other))
    assert await run(told, *work, kv_cache_bytes=15 * bytes_of_block) == [320, 320, 320 - 128, 320 - 128]
    assert told.tokens(other) == 320


HOST = {"kv_cache_bytes": 15 * 131_072 * 32, "host_kv_bytes": 40 * 131_072 * 32}


async def test_blocks_that_leave_the_cache_stay_in_host_memory_and_are_loaded() -> None:
    """As above with room for forty blocks in host memory: each prompt is computed once, and its last block."""
    told, other = Told(), list(range(2000, 2320))
    work = (request("a", PROMPT), request("b", other), request("c", PROMPT), request("d", other))
    assert await run(told, *work, **HOST) == [320, 320, 32, 32]
    assert told.tokens(other) == told.tokens(PROMPT) == 320
    changes = told.held.reachable.snapshot()
    hosted = [one for one in block_hashes(PROMPT) if one in changes.hosted]
    assert 0 < len(hosted) < 5  # its beginning is still on the device
    assert not set(block_hashes(other)) & set(changes.hosted)


async def test_loading_takes_its_time_and_is_counted() -> None:
    engine = EmulatedEngine(settings(**HOST, emulated_slowdown=1.0, emulated_step_s=None))
    info = await engine.start()
    assert info.rates.host_token_s == pytest.approx(131_072 / (0.8 * 32e9))  # the catalogue's A10
    for number, prompt in enumerate((PROMPT, list(range(2000, 2320)), PROMPT)):
        await finish(engine, request(str(number), prompt))
    host = engine.stats().host
    assert (host.served_tokens, host.limit_bytes) == (32 * host.loaded_blocks, HOST["host_kv_bytes"])
    assert host.loaded_blocks > 0 < host.stored_blocks
    await engine.close()


async def test_it_computes_what_the_simulator_says() -> None:
    """One prompt after the other, on an engine and in the simulator: they share the code of the cache and its tier."""
    rng = np.random.default_rng(5)
    prompts = [[*range(1000 * kind, 1000 * kind + 321)] for kind in rng.integers(1, 8, 25).tolist()]
    limits = EngineLimits(512, 16, 32, prefix_cache=True, host=HostTier(20 * 32, 1e-6, 6 * 4096))
    ids = tuple(tuple(range(10 * prompt[0], 10 * prompt[0] + 10)) for prompt in prompts)
    count = len(prompts)
    work = Workload("w", np.arange(count) * 100.0, np.full(count, 321), np.full(count, 2), ids, 32)
    node = instance("n", Role.DECODE, kv_tokens=15 * 32, limits=limits)
    simulated = simulate(work, [node], RunSpec()).instances[0].prefill_tokens
    more = HOST | {"host_kv_bytes": 20 * 131_072 * 32}
    computed = await run(Told(), *(request(str(at), prompt) for at, prompt in enumerate(prompts)), **more)
    assert sum(computed) == simulated < 300 * count


async def test_a_sessions_kv_is_kept_over_its_pause() -> None:
    async def computed(session: str, **more: object) -> int:
        told, others = Told(), [list(range(start, start + 96)) for start in (2000, 3000, 4000)]
        turn = request("turn", PROMPT)
        first = msgspec.structs.replace(
            turn, request_id="first", job=msgspec.structs.replace(turn.job, session=session)
        )
        work = [first, *(request(str(at), prompt) for at, prompt in enumerate(others)), turn]
        return (await run(told, *work, kv_cache_bytes=15 * 131_072 * 32, **more))[-1]

    assert await computed("s", session_share=0.9) == 32
    assert await computed("", session_share=0.9) == await computed("s", session_keep_s=0.0) > 32


async def test_what_was_answered_is_held_too() -> None:
    engine = EmulatedEngine(settings())
    await engine.start()
    answer = (await finish(engine, request("a", PROMPT, output=70)))["a"]
    await engine.close()
    told = Told()
    assert (await run(told, request("a", PROMPT, output=70), request("b", [*PROMPT, *answer, 5])))[1] <= 32 + 7
    assert told.tokens([*PROMPT, *answer]) == 384
