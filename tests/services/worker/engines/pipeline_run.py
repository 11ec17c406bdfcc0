"""The demo model's engine, divided into pipeline stages or not, in a process of its own; sends what it did."""

import asyncio
from typing import Any

from services.worker.engines.base import EnginePolicies
from tests.services.worker.engines.engine_run import Run, freed
from tests.services.worker.engines.own_engine import started

LENGTHS = (5, 40, 130, 300, 700)
TOKENS = 24


async def found(port: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """Answers to prompts of these lengths, all at once; what the engine's log has of them; what an abort leaves."""
    stages = {"pipeline_parallel": len(layers), "pipeline_layers": layers} if layers else {}
    settings = {"dtype": "float32", "kv_cache_bytes": 64 << 20, "chunk_size": 128, **stages}
    async with started(port, 1 << 20, {}, **settings) as here:
        run = Run(here.engine)
        answers = {"greedily": await answered(run, "greedily", 5)}
        logged = await computed(run)
        here.engine.set_policies(EnginePolicies(step_budget=True))
        answers["within a budget"] = await answered(run, "budget", 3000)
        run.submit("doomed", list(range(50, 300)), 500)
        await run.produced("doomed", 3)
        here.engine.abort("doomed")
        left = await freed(run)
        async with asyncio.timeout(20):
            while here.engine._busy:
                await asyncio.sleep(0.01)
        return {
            "answers": answers,
            "logged": logged,
            "left": left,
            "stages": here.stages,
            "rank": here.engine.rank is not None,
        }


async def answered(run: Run, name: str, first: int) -> list[list[int]]:
    names = [f"{name} {length}" for length in LENGTHS]
    for each, length in zip(names, LENGTHS, strict=True):
        run.submit(each, [first + (length * at) % 997 for at in range(1, length + 1)], TOKENS)
    for each in names:
        await run.end(each)
    return [run.tokens[each] for each in names]


async def computed(run: Run) -> dict[str, Any]:
    """Of all steps so far: tokens of prompts, decodes, the shortest time. The last one is logged after it is told."""
    async with asyncio.timeout(20):
        while run.engine._busy or run.engine.step_s:
            await asyncio.sleep(0.01)
    steps = run.engine.steps.page("e", 1, 0, 10_000).steps
    return {
        "prefill": sum(tokens for step in steps for tokens, _ in step.prefill),
        "decodes": sum(step.decode_count for step in steps),
        "least_s": min(step.seconds for step in steps),
    }
