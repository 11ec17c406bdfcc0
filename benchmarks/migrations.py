"""Streams of all kinds of sampling on real engines, which are moved from one decode instance to another again and
again, while targets are killed. Each answer has to be that of the same request undisturbed.
"""

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import numpy as np

from benchmarks.cluster_files import emulated
from benchmarks.suite import BARE, CPU_ENGINE, SPLIT, started
from services.launcher.up import RunningSuite
from shared.errors import Conflict, NotFound, PolyphaseError
from shared.timeline import Span
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin

PROMPT_TOKENS, SEED = 200, 11
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 60, "maxItems": 60}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}
GREEDY: dict[str, Any] = {"temperature": 0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seed": SAMPLED,
    "top_p": SAMPLED | {"top_p": 0.8},
    "top_k": SAMPLED | {"top_k": 20},
    "min_p": SAMPLED | {"min_p": 0.05},
    "presence": GREEDY | {"presence_penalty": 0.7},
    "frequency": GREEDY | {"frequency_penalty": 0.4},
    "repetition": GREEDY | {"repetition_penalty": 1.2},
    "penalties": SAMPLED | {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "min_tokens": GREEDY | {"ignore_eos": False, "min_tokens": 40},
    "bias": GREEDY | {"logit_bias": {"100": 5.0, "200": -5.0}},
    "logprobs": SAMPLED | {"logprobs": 3},
    "json": GREEDY | {"structured_outputs": {"json": NUMBERS}, "ignore_eos": False},
    "regex": SAMPLED | {"structured_outputs": {"regex": "[a-z ]*"}, "ignore_eos": False, "min_tokens": 40},
    "bad_words": GREEDY | {"bad_words": ["the"]},
    "both": SAMPLED | {"min_p": 0.02, "presence_penalty": 0.3, "structured_outputs": {"json": NUMBERS}},
}
DECODES = ("decode-0", "decode-1", "decode-2")
CLUSTER: dict[str, Any] = {
    **BARE,
    "name": "migrations",
    "policies": SPLIT,
    "gateway": {"dtype": "float32", "attempts": 100, "losses_at_one_token": 20},
    "instance_defaults": {**CPU_ENGINE, "max_model_len": 2048},
    "instances": [
        {"id": "prefill-0", "role": "prefill"},
        {"id": "decode-0", "role": "decode", "block_size": 32},
        {"id": "decode-1", "role": "decode", "block_size": 64},
        {"id": "decode-2", "role": "decode", "block_size": 32},
    ],
}


@dataclass
class Stream:
    """One answer. times: when its tokens came, by the client's clock."""

    name: str
    job_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    done: bool = False
    known_as: str = ""  # the id of its job, once it is known

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass
class Found:
    """What became of the streams."""

    wrong: list[str] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)  # by outcome
    lost_tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)  # from the last token at one instance to the first at the next
    step_ms: float = 0.0
    resumes: int = 0


async def moved_streams(
    folder: Path, *, moves: int, tokens: int, kills: int = 0, kinds: Sequence[str] = tuple(KINDS), seed: int = SEED
) -> Found:
    """Each stream is moved so many times at random moments; of the moves, `kills` have their target killed."""
    found, random = Found(), Random(seed)
    prompts = {name: [random.randrange(5, 4000) for _ in range(PROMPT_TOKENS)] for name in kinds}
    async with started(CLUSTER, folder) as suite, httpx.AsyncClient(base_url=suite.plan.api_url, timeout=300) as client:

        async def run(stream: Stream) -> None:
            body = {"model": "demo", "prompt": prompts[stream.name], "max_tokens": tokens, "ignore_eos": True}
            body |= {"stream": True, "return_token_ids": True, **KINDS[stream.name]}
            headers = {"X-Request-Id": stream.job_id}
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                async for line in response.aiter_lines():
                    event = line.removeprefix("data: ")
                    if event.startswith("{"):
                        _receive(stream, json.loads(event))
            stream.done = True

        undisturbed = [Stream(name, f"still-{uuid.uuid4().hex}") for name in kinds]
        await asyncio.gather(*map(run, undisturbed))
        found.step_ms = 1e3 * median(gap for stream in undisturbed for gap in stream.gaps_s)
        moving = [Stream(name, f"move-{uuid.uuid4().hex}") for name in kinds]
        victims = {at: random.randrange(1, moves) for at in random.sample(range(len(kinds)), kills)}
        (scheduler,) = suite.suite.schedulers()
        async with suite.suite.monitor() as monitor, scheduler:
            movers = [
                asyncio.create_task(
                    _move(stream, suite, monitor, scheduler, Random(seed + at), moves, tokens, victims.get(at), found)
                )
                for at, stream in enumerate(moving)
            ]
            await asyncio.gather(*map(run, moving), *movers)
            await _count(scheduler, moving, found)
        for still, moved in zip(undisturbed, moving, strict=True):
            _compare(still, moved, found)
    return found


# Drains and flips, with emulated instances.

LONG_STREAMS, LONG_PROMPT, LONG_TOKENS = 64, 2000, 20_000
LINK_GBPS, CONTEXT = 100.0, 32_768
EMULATED = emulated(
    "drain",
    [{"id": "prefill-0", "role": "prefill"}, {"id": "decode", "role": "decode", "count": 3}],
    {"emulated_step_s": 0.02, "emulated_link_gbps": LINK_GBPS, "max_seqs": 256, "kv_cache_bytes": 64 << 30}
    | {"max_model_len": CONTEXT},
    gateway={"max_queued_jobs": 4096, "job_timeout_s": 3600.0},
    policies=SPLIT,
    max_model_len=CONTEXT,
)


@dataclass
class Drained:
    """drain_s: of the instance; bytes_s: that its KV takes on its link. gaps_s: over all streams and flips."""

    streams: int
    drain_s: float
    bytes_s: float
    gaps_s: list[float]
    flips: int = 0


async def drained(folder: Path, *, streams: int = LONG_STREAMS, flips: int = 0) -> Drained:
    """Drain an emulated instance that decodes so many long streams, then flip decode instances to and fro."""
    async with (
        started(EMULATED, folder) as suite,
        httpx.AsyncClient(base_url=suite.plan.api_url, timeout=None) as client,
    ):
        running = [Stream("", f"long-{uuid.uuid4().hex}") for _ in range(streams)]
        tasks = [asyncio.create_task(_endless(client, each, at)) for at, each in enumerate(running)]
        async with suite.suite.monitor() as monitor:
            for name in ("decode-1", "decode-2"):  # all streams come to one instance
                await monitor.drain(name, timeout_s=5.0)
            while not all(each.tokens for each in running):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            for name in ("decode-1", "decode-2"):
                await monitor.resume(name)
            await asyncio.sleep(1.0)  # for a load of the streams
            held = sum(LONG_PROMPT + len(each.tokens) for each in running)
            began_s = time.monotonic()
            await monitor.drain("decode-0", timeout_s=60.0)
            drain_s = time.monotonic() - began_s
            rows = await suite.suite.instances()
            kv_bytes = held * rows["decode-0"].info.kv_bytes_per_token
            await monitor.resume("decode-0")
            for number in range(flips):
                name = f"decode-{number // 2 % 3}"
                await monitor.flip(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [gap for each in running for gap in each.gaps_s]
    return Drained(streams, drain_s, kv_bytes * 8 / (LINK_GBPS * 1e9), gaps, flips)


async def _endless(client: httpx.AsyncClient, stream: Stream, number: int) -> None:
    prompt = [5 + (number + at) % 1000 for at in range(LONG_PROMPT)]
    body = {"model": "demo", "prompt": prompt, "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as response:
        async for line in response.aiter_lines():
            if (event := line.removeprefix("data: ")).startswith("{"):
                _receive(stream, json.loads(event))


def figures_of(found: Found) -> dict[str, float]:
    """For a bench's result."""
    over = np.array(found.gaps_ms) - found.step_ms
    return {
        "migrations": float(found.moves["migration"]),
        "migrations_given_up": float(found.moves["stay"]),
        "resumes": float(found.resumes),
        "wrong_streams": float(len(found.wrong)),
        "lost_tokens": float(found.lost_tokens),
        "step_ms": round(found.step_ms, 2),
        "gap_over_step_p50_ms": round(float(np.percentile(over, 50)), 1),
        "gap_over_step_p99_ms": round(float(np.percentile(over, 99)), 1),
    }


def _receive(stream: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        stream.error = str(event["error"])
        return
    for choice in event.get("choices", ()):
        new = choice.get("token_ids") or []
        stream.tokens += new
        if new:
            stream.times.append(time.monotonic())
        if choice.get("logprobs"):
            stream.logprobs += choice["logprobs"]["token_logprobs"]


async def _move(
    stream: Stream,
    suite: RunningSuite,
    monitor: MonitorClient,
    scheduler: SchedulerAdmin,
    random: Random,
    moves: int,
    tokens: int,
    killed: int | None,
    found: Found,
) -> None:
    """Move a stream at moments that are spread over its answer. killed: number of the move whose target is killed."""
    moments = sorted(random.sample(range(4, max(5 + moves, int(0.9 * tokens))), moves))
    for number, moment in enumerate(moments):
        while len(stream.tokens) < moment and not stream.done:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        to = ""
        if number == killed:
            to = random.choice(DECODES)
        try:
            while not stream.done:
                try:
                    await monitor.move(await _job_id(stream, scheduler), to=to)
                    break
                except (Conflict, NotFound):  # it is on its way, or is already at the target
                    if to:
                        break
                    await asyncio.sleep(0.1)
        except PolyphaseError as error:
            found.moves[error.code] += 1
            continue
        if stream.done:
            return
        if to:
            await asyncio.sleep(random.random() * 0.05)
            with suppress(NotFound):  # it has just been killed beside another stream's move
                await suite.suite.restarted(to, suite.suite.kill(to))


async def _job_id(stream: Stream, scheduler: SchedulerAdmin) -> str:
    """The gateway adds to a client's request id. Raises NotFound while the scheduler does not know the job."""
    if not stream.known_as:
        rows = await scheduler.requests(limit=1000)
        stream.known_as = next((row.job_id for row in rows if stream.job_id in row.job_id), "")
    if not stream.known_as:
        raise NotFound(f"{stream.job_id}: no scheduler knows it")
    return stream.known_as


def _compare(still: Stream, moved: Stream, found: Found) -> None:
    found.lost_tokens += max(0, len(still.tokens) - len(moved.tokens))
    at = next((n for n, pair in enumerate(zip(still.tokens, moved.tokens, strict=False)) if pair[0] != pair[1]), None)
    if moved.error or at is not None or len(still.tokens) != len(moved.tokens):
        found.wrong.append(f"{moved.name}: {moved.error or f'token {at}'}: {len(moved.tokens)} of {len(still.tokens)}")
    elif not np.allclose(still.logprobs, moved.logprobs, atol=1e-3):
        found.wrong.append(f"{moved.name}: other log probabilities")


async def _count(scheduler: SchedulerAdmin, moving: Sequence[Stream], found: Found) -> None:
    """From the timelines of the requests."""
    for stream in moving:
        timeline = await scheduler.timeline(await _job_id(stream, scheduler))
        for decision in timeline.decisions:
            found.moves[decision.kind] += decision.kind in ("migration", "stay", "resume")
        decodes = [span for span in timeline.spans if span.span is Span.DECODE]
        found.gaps_ms += [
            1e3 * (after.started_s - before.ended_s)
            for before, after in pairwise(decodes)
            if before.attempt == after.attempt
        ]
    found.resumes = found.moves["resume"]
