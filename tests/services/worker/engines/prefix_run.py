"""A real engine in a process of its own: what it tells of its prefix cache beside what requests find there."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import msgspec

from services.worker.engines.base import CacheEvent, CacheExport, EngineRequest
from services.worker.engines.vllm import VllmEngine
from services.worker.kv import lossy_salt
from services.worker.prefix_feed import HeldPrefixes
from services.worker.settings import WorkerSettings
from shared.domain.adapters import version_key
from shared.domain.job import Generation, JobView
from shared.domain.kv import KvHandle
from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta, block_hashes
from shared.errors import EngineFailed
from shared.policy.prefix_index import PrefixIndex
from tests.services.worker.engines.engine_run import Run, freed, greedy
from tests.services.worker.engines.own_engine import started

PROMPTS = 30


@dataclass
class Found:
    """One request: what was known of its prompt beforehand, what it hit, and what it says that it reused, of which some
    was imported. All in tokens.
    """

    what: str
    prompt: int
    known: int
    hit: int
    reused: int
    imported: int
    hosted: int  # of `known`, told to lie in host memory
    loaded: int  # from there


class Told:
    def __init__(self) -> None:
        self.held = HeldPrefixes(tiered=True)

    def __call__(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            self.held.apply(event)

    def tokens(self, prompt: list[int], salt: str, adapter: str) -> tuple[int, int]:
        """That are held, and of these the ones in host memory."""
        index, prefix, told = PrefixIndex(), block_hashes(prompt, salt, adapter), self.held.reachable.snapshot()
        index.apply("e", PrefixDelta(1, 0, told.added, starts=True, hosted=told.hosted))
        held = index.held_tokens("e", prefix)
        return held, index.hosted_tokens("e", prefix, held)


class Trial(Run):
    """Requests one after the other, each compared with what was told before it."""

    def __init__(self, engine: VllmEngine, told: Told) -> None:
        super().__init__(engine)
        self.told = told
        self.found: list[Found] = []
        self.exported = (0, 0)  # known tokens, and those that an export found

    async def ask(self, what: str, prompt: list[int], salt: str = "", adapter: str = "", **more: Any) -> None:
        name = f"{what} {len(self.found)}"
        (known, hosted), before = self.told.tokens(prompt, salt, adapter), self.engine.stats()
        self.submit(name, prompt, 2, salt=salt, adapter=adapter, **more)
        step = await self.end(name)
        assert step.finish_reason == "length", step
        after = await self.counted(before.prompt_tokens + len(prompt))
        reused = self.firsts[name].reused
        assert reused is not None
        hit = after - before.hit_tokens
        loaded = self.engine.stats().host.served_tokens - before.host.served_tokens
        self.found.append(Found(what, len(prompt), known, hit, reused.tokens, reused.imported, hosted, loaded))

    async def export(self, prompt: list[int]) -> None:
        """Compare what an export finds of a prompt with what is known of it."""
        generation = Generation(msgspec.msgpack.encode(greedy()), time.time(), "")
        request = EngineRequest("export", JobView("export", len(prompt), 1), prompt, generation, 1)
        known, _ = self.told.tokens(prompt, "", "")
        tokens = await self.engine.export_cached(request, CacheExport("x", 0, lambda _: None, lambda: True))
        self.exported = known, tokens
        assert self.engine.rank is not None
        self.engine.rank.release("x")

    async def counted(self, prompt_tokens: int) -> int:
        """Wait until the engine's counts have it, and its events are here."""
        async with asyncio.timeout(30):
            while self.engine.stats().prompt_tokens < prompt_tokens:
                await asyncio.sleep(0.005)
        await freed(self)
        return self.engine.stats().hit_tokens


async def conversations(trial: Trial, rng: Random) -> None:
    """Prompts that begin alike up to a multiple of 64 tokens, in memory that holds few of them; aborts in between."""
    parts = [[rng.randrange(5, 4000) for _ in range(64)] for _ in range(6)]
    for number in range(PROMPTS):
        prompt = [token for _ in range(rng.randrange(1, 7)) for token in parts[rng.randrange(3)]]
        prompt += [rng.randrange(5, 4000) for _ in range(rng.randrange(1, 64))]
        if number % 7 == 3:  # several at once, one of which is given up: shared, copied and half-computed blocks
            together = [f"together {number} {at}" for at in range(4)]
            before = trial.engine.stats().prompt_tokens
            for at, name in enumerate(together):
                trial.submit(name, [*prompt, 5 + at], 20, greedy())
            trial.engine.abort(together[0])
            for name in together[1:]:
                await trial.end(name)
            await trial.counted(before + 3 * (len(prompt) + 1))
        await trial.ask("conversation", prompt, rng.choice(["", "", "s"]))


async def work(trial: Trial, settings: WorkerSettings) -> None:
    rng = Random(1)
    prompt = [rng.randrange(5, 4000) for _ in range(300)]
    await trial.ask("first", prompt)
    await trial.ask("again", prompt)
    await trial.ask("salted", prompt, "s")
    await trial.ask("salted again", prompt, "s")
    await trial.ask("approximate", prompt, lossy_salt("t/1"))
    for adapter in settings.lora.adapters:
        await trial.ask(f"by {adapter}", prompt, adapter=adapter)
        await trial.ask(f"by {adapter} again", prompt, adapter=adapter)
        await trial.ask(f"by {adapter}, salted", prompt, "s", adapter)
        await trial.ask(f"by {adapter}, salted again", prompt, "s", adapter)
    if settings.engine_args["enable_prefix_caching"]:
        await conversations(trial, rng)
        await trial.export(prompt)
    await trial.ask("to export", prompt, export_to="t1")
    handle = KvHandle("t1", "e", 1, "f", settings.kv_endpoints, 300, settings.dtype)
    await trial.ask("imported", prompt, "i", import_from=handle)
    await trial.ask("imported before", prompt, "i")
    trial.engine._post(trial.engine._core.reset_prefix_cache)
    await trial.ask("to notice", [7] * 40)
    await trial.ask("cleared", prompt)


async def versions(trial: Trial, settings: WorkerSettings) -> dict[str, Any]:
    """Two versions of one name are loaded while the engine runs, and one is removed while a request has it."""
    engine, random = trial.engine, Random(2)
    prompt = [random.randrange(5, 4000) for _ in range(300)]
    first, second = (version_key("new", digit * 32) for digit in "12")
    for key, path in zip((first, second), settings.lora.adapters.values(), strict=True):
        await engine.add_adapter(key, path)
        await trial.ask(key, prompt, adapter=key)
        await trial.ask(f"{key} again", prompt, adapter=key)
    held = engine._core.engine_core.list_loras()
    trial.submit("alone", prompt, 40, adapter=first)
    await trial.end("alone")
    trial.submit("under way", prompt, 40, adapter=first)
    await engine.remove_adapter(first)
    trial.submit("late", prompt, 40, adapter=first)
    late, under_way = await trial.end("late"), await trial.end("under way")
    await freed(trial)
    await engine.remove_adapter("unknown")  # also waits for the engine's commands before
    failed = ""
    try:
        await engine.add_adapter(version_key("new", "3" * 32), "/no/such/folder")
    except EngineFailed as error:
        failed = error.message
    return {
        "late": [late.finish_reason, late.stop_reason],
        "under way": under_way.finish_reason,
        "same": trial.tokens["under way"] == trial.tokens["alone"],
        "removed": sorted(held - engine._core.engine_core.list_loras()),
        "failed": failed,
    }


async def found(
    port: int,
    block_size: int,
    caching: bool,
    overlapping: bool = False,
    adapters: dict[str, str] | None = None,
    host_kv_bytes: int = 0,
    disk: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Try it all, with asynchronous scheduling or without."""
    told, more = Told(), {"enable_prefix_caching": caching}
    limits = {"max_model_len": 640, "block_size": block_size, "chunk_size": 128, "kv_cache_bytes": 6 << 20}
    lora = {"adapters": adapters or {}, "allow_runtime_updating": bool(adapters), "max_rank": 8 if adapters else None}
    limits |= {"async_scheduling": overlapping, "lora": lora, "host_kv_bytes": host_kv_bytes} | (disk or {})
    async with started(port, 4 << 20, {"on_cache": told}, engine_args=more, **limits) as here:
        trial = Trial(here.engine, told)
        await work(trial, here.settings)
        return {
            "versions": await versions(trial, here.settings) if adapters else {},
            "found": [asdict(one) for one in trial.found],
            "blocks": here.total_blocks,
            "exported": trial.exported,
            "host": msgspec.to_builtins(here.engine.stats().host),
            "nodes": len(told.held),
            "told": len(told.held.reachable.blocks) * BLOCK_TOKENS,
        }
