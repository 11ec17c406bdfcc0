"""A real engine in a process of its own: KV that it keeps for sessions while other requests use its cache."""

import asyncio
from random import Random
from typing import Any

from services.worker.engines.vllm import VllmEngine
from shared.domain.job import JobView
from tests.services.worker.engines.engine_run import Run, freed
from tests.services.worker.engines.own_engine import Started, started

BLOCK, PROMPT = 32, 320
KEEP_S = 1000.0


class Turns(Run):
    """Requests one after the other, and the prompt tokens that each of them found in the prefix cache."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(engine)
        self.rng = Random(3)
        self.count = 0

    def prompt(self, tokens: int = PROMPT) -> list[int]:
        return [self.rng.randrange(5, 4000) for _ in range(tokens)]

    def begin(self, prompt: list[int], tokens: int = 2, session: str = "") -> str:
        self.count += 1
        name = f"r{self.count}"
        self.submit(name, prompt, tokens, job=JobView(name, len(prompt), tokens, session=session))
        return name

    async def hit(self, prompt: list[int], tokens: int = 2, session: str = "") -> int:
        name = self.begin(prompt, tokens, session)
        step = await self.end(name)
        assert step.finish_reason == "length", step
        await freed(self)
        reused = self.firsts[name].reused
        assert reused is not None
        return reused.tokens

    async def pressure(self, blocks: int) -> None:
        """Other requests, one after the other, that use all blocks twice."""
        for _ in range(2 * blocks * BLOCK // PROMPT + 1):
            await self.hit(self.prompt())

    async def settled(self) -> dict[str, int]:
        """What the engine says once it is idle."""
        await self.engine._result_of(lambda: None)
        await self.engine._result_of(self.engine._kept.advance)
        await self.engine._result_of(self.engine._snapshot)
        stats = self.engine.stats()
        return {
            "sessions": stats.sessions,
            "kept": stats.session_blocks,
            "free": stats.free_blocks,
            "total": stats.total_blocks,
            "yielded": stats.sessions_yielded,
            "preemptions": stats.preemptions,
        }


async def work(trial: Turns, here: Started) -> dict[str, Any]:
    blocks, found = here.total_blocks, {}
    chat, plain = trial.prompt(), trial.prompt()
    await trial.hit(chat, 34, session="a")
    await trial.hit(plain, 34)
    await trial.pressure(blocks)
    found["after pressure"] = await trial.settled()
    found["plain again"] = await trial.hit(plain)
    found["next turn"] = await trial.hit([*chat, *trial.tokens["r1"], *trial.prompt(40)], 2, session="a")

    budget = trial.engine._kept.budget
    for name in ("b", "c", "d"):  # of 10 whole blocks each
        await trial.hit(trial.prompt(), session=name)
    found["budget"] = {"budget": budget, **await trial.settled()}

    # Two requests that have room together only in what is kept.
    half = (blocks * BLOCK) // 2 - 8
    before = await trial.settled()
    together = [trial.begin(trial.prompt(half - 64), 60) for _ in range(2)]
    for name in together:
        assert (await trial.end(name)).finish_reason == "length"
    found["together"] = trial.times[together[1]][0] < trial.times[together[0]][-1]
    await freed(trial)
    found["needed"] = {"before": before, "after": await trial.settled()}

    await trial.hit(chat, session="a")
    await trial.settled()
    trial.engine._kept._clock = lambda: 1e12
    found["over"] = await trial.settled()
    return found


async def found(port: int, share: float, keep_s: float = KEEP_S) -> dict[str, Any]:
    limits = {"max_model_len": 2048, "block_size": BLOCK, "chunk_size": 256, "kv_cache_bytes": 15 << 20}
    limits |= {"session_keep_s": keep_s, "session_share": share, "dtype": "float32"}
    async with started(port, 4 << 20, {}, **limits) as here:
        async with asyncio.timeout(200):
            return await work(Turns(here.engine), here) | {"blocks": here.total_blocks}
