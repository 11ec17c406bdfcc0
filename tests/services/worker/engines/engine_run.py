"""A real engine in a process of its own that is given what no front end lets through; sends what became of it."""

import asyncio
import json
import time
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from services.worker.engines.base import EngineRequest
from services.worker.engines.vllm import VllmEngine
from shared.domain.job import Generation, JobView
from shared.wire.messages import TokenStep, decode_rows
from tests.services.worker.engines.own_engine import started

DEAR = json.dumps({"type": "string", "pattern": r"^(\w{1,99}-){1,99}$"})  # compiles for seconds
TURNS_S = 0.3  # much less than such a compilation takes


class Run:
    """Requests of one engine, by name."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.firsts: dict[str, TokenStep] = {}
        self.steps: dict[str, list[TokenStep]] = {}
        self.ends: dict[str, asyncio.Future[TokenStep]] = {}
        self.ended: list[str] = []

    def submit(
        self,
        name: str,
        prompt: list[int],
        tokens: int = 8,
        sampling: Any = None,
        salt: str = "",
        job: JobView | None = None,
        adapter: str = "",
        generation: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        given = sampling if isinstance(sampling, bytes) else msgspec.msgpack.encode(sampling or greedy())
        self.times[name], self.tokens[name], self.steps[name] = [], [], []
        self.ends[name] = asyncio.get_running_loop().create_future()

        def sink(step: TokenStep) -> None:
            self.times[name].append(time.monotonic())
            self.firsts.setdefault(name, step)
            self.steps[name].append(step)
            self.tokens[name] += step.tokens
            if step.finish_reason:
                self.ended.append(name)
                self.ends[name].set_result(step)

        job = job or JobView(name, len(prompt), tokens)
        made = Generation(given, time.time(), salt, adapter=adapter, **(generation or {}))
        self.engine.submit(EngineRequest(name, job, prompt, made, tokens, **more), sink)

    async def end(self, name: str) -> TokenStep:
        return await asyncio.wait_for(asyncio.shield(self.ends[name]), 120)

    async def produced(self, name: str, steps: int) -> None:
        """Wait for so many of them."""
        async with asyncio.timeout(60):
            while len(self.times[name]) < steps:
                assert not self.ends[name].done(), f"{name} has ended"
                await asyncio.sleep(0.01)

    def longest_gap_s(self, name: str, since: float = 0.0) -> float:
        times = [each for each in self.times[name] if each >= since]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, **more)


def guided(backend: str | None = "xgrammar", **wish: Any) -> SamplingParams:
    made = StructuredOutputsParams(**wish)
    made._backend = backend
    return SamplingParams(temperature=0, structured_outputs=made)


async def refusals(run: Run) -> dict[str, Any]:
    """What would end a step, beside a decode that goes on."""
    run.submit("steady", [5, 6, 7], 300)
    bad: dict[str, dict[str, Any]] = {
        "too long": {"prompt": list(range(5, 4000))},
        "empty": {"prompt": []},
        "not a token": {"prompt": [10**6]},
        "negative": {"prompt": [-1]},
        "garbage": {"prompt": [5], "sampling": b"\xff\xfe"},
        "bias": {"prompt": [5], "sampling": greedy(logit_bias={10**6: 1.0})},
        "allowed": {"prompt": [5], "sampling": greedy(allowed_token_ids=[10**6])},
        "backend": {"prompt": [5], "sampling": guided("no such", regex="a")},
        "grammar": {"prompt": [5], "sampling": guided(grammar="root ::= (((")},
        "budget": {"prompt": [5], "sampling": greedy(thinking_token_budget=5)},
    }
    for name, request in bad.items():
        run.submit(name, **request)
    ends = {name: await run.end(name) for name in bad}
    steady = await run.end("steady")
    return {
        "ends": {name: [end.finish_reason, end.stop_reason] for name, end in ends.items()},
        "steady": [steady.finish_reason, len(run.times["steady"])],
    }


async def grammars(run: Run) -> dict[str, Any]:
    """A dear grammar beside a decode; aborted while it compiles."""
    run.submit("fine", [5], 4, guided(regex="(yes|no)"))
    fine = await run.end("fine")
    run.submit("steady", [5, 6, 7], 1500)
    await run.produced("steady", 20)
    began = time.monotonic()
    run.submit("dear", [5], 4, guided(json=DEAR))
    steps = len(run.times["steady"]) + 20
    async with asyncio.timeout(60):  # a compilation that held the engine up would end before these steps
        while len(run.times["steady"]) < steps and not run.ends["dear"].done():
            await asyncio.sleep(0.01)
    compiling = not run.ends["dear"].done()
    gap_s = run.longest_gap_s("steady", began)
    run.engine.abort("dear")
    await run.produced("steady", len(run.times["steady"]) + 20)
    run.engine.abort("steady")
    idle = await turns(run)
    return {"fine": fine.finish_reason, "compiling": compiling, "gap_s": gap_s, "turns_a_second": idle}


async def turns(run: Run) -> float:
    """How often the engine turns while it waits for nothing but a grammar."""
    count, scheduler = [0], run.engine._scheduler
    schedule = scheduler.schedule

    def counted(*given: Any, **more: Any) -> Any:
        count[0] += 1
        return schedule(*given, **more)

    scheduler.schedule = counted
    began_mono = time.monotonic()
    run.submit("dear again", [5], 4, guided(json=DEAR.replace("99", "98")))
    await asyncio.sleep(TURNS_S)
    waiting, counted_s = not run.ends["dear again"].done(), time.monotonic() - began_mono
    turns = count[0]
    run.engine.abort("dear again")
    scheduler.schedule = schedule
    return turns / counted_s if waiting else -1.0


async def full_staging(run: Run) -> dict[str, Any]:
    """Exports that find no room, beside a decode: how long they hold up the engine's thread."""
    rank, spent = run.engine.rank, list[float]()
    assert rank is not None
    stage = rank.stage

    def timed(*given: Any) -> None:
        began, refused = time.perf_counter(), rank.stats().staging_failed
        stage(*given)
        if rank.stats().staging_failed > refused:
            spent.append(time.perf_counter() - began)

    rank.stage = timed  # type: ignore[method-assign]
    run.submit("steady", [5, 6, 7], 400)
    for number in range(40):
        run.submit(f"export {number}", [5 + number, *range(6, 70)], 1, first_token_only=True, export_to=f"t{number}")
    for number in range(40):
        await run.end(f"export {number}")
    await run.end("steady")
    stats = rank.stats()
    rank.stage = stage  # type: ignore[method-assign]
    held_bytes = rank.staged_bytes
    for number in range(40):
        rank.release(f"t{number}")
    return {"refused": stats.staging_failed, "held": held_bytes, "refusal_s": median(spent)}


async def seeded(run: Run) -> dict[str, Any]:
    """One answer drawn with a seed, its prompt computed in one step, and in several beside others of its kind."""
    prompt = [5 + at % 900 for at in range(400)]
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    run.submit("whole", prompt, 12, drawn, salt="0")
    ends = [await run.end("whole")]
    run.engine.set_chunk_size(96)
    cut = [f"cut {number}" for number in range(3)]
    for name in cut:
        run.submit(name, prompt, 12, drawn, salt=name)  # nobody finds another's KV
    ends += [await run.end(name) for name in cut]
    run.engine.set_chunk_size(4096)
    return {"ends": [end.finish_reason for end in ends], "tokens": [run.tokens[name] for name in ("whole", *cut)]}


async def scored(run: Run) -> dict[str, list[int]]:
    """How many positions and candidates the log probabilities of prompts have, and those of the first token."""
    shapes = {}
    for tokens in (1, 2, 700):
        name = f"scored {tokens}"
        run.submit(name, [5 + at % 900 for at in range(tokens)], 2, greedy(prompt_logprobs=3, logprobs=1))
        await run.end(name)
        of_prompt, of_token = decode_rows(run.firsts[name].prompt_logprobs), decode_rows(run.firsts[name].logprobs)
        shapes[str(tokens)] = [
            *(len(of_prompt.ranks) // 4, of_prompt.candidates, len(of_prompt.ids) // 4, len(of_prompt.values) // 4),
            *(len(of_token.ranks) // 4, of_token.candidates, len(of_token.ids) // 4),
        ]
    return shapes


async def freed(run: Run) -> dict[str, int]:
    async with asyncio.timeout(60):
        while (stats := run.engine.stats()).free_blocks < stats.total_blocks or stats.waiting or stats.running:
            await asyncio.sleep(0.05)
    return {"free": stats.free_blocks, "total": stats.total_blocks, "waiting": stats.waiting}


async def found(port: int) -> dict[str, Any]:
    """Try it all."""
    # In bfloat16 an answer depends on what its steps are shared with, on CPUs that compute in it.
    exact = {"dtype": "float32", "kv_cache_bytes": 128 << 20}
    async with started(port, 2 << 20, {}, async_scheduling=True, **exact) as here:
        run = Run(here.engine)
        return {
            "overlapping": here.engine._core.engine_core.batch_queue_size,
            "refusals": await refusals(run),
            "seeded": await seeded(run),
            "scored": await scored(run),
            "staging": await full_staging(run),
            "grammars": await grammars(run),
            "freed": await freed(run),
        }
