"""`polyphase bench overhead`: what the suite itself costs a request and a token, and the time to first token it adds.

Every service is real; the instances are emulated and compute in no time. The same load goes in turns to vLLM's API
layer alone: what the machine's other guests do to one they do to the other. CPU is of gateway, scheduler and monitor,
idling included. Structured outputs are measured with real engines, beside plain vLLM: see `overhead_structured`.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.bench.long_prompts import AIM_MS as AIM_TURN_MS
from lab.bench.long_prompts import run_long_prompts
from lab.bench.overhead_structured import aims_of as aims_of_structured
from lab.bench.overhead_structured import structured_ttfts
from lab.bench.overhead_targets import Target, api_layer_alone, cluster, of_suite
from lab.bench.stream_client import StreamResult, run_load, stream_completion
from services.launcher.up import running_suite

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
STREAMS = (1, 16, 64, 256)
SHORT, LONG = 2, 66  # output tokens of the two loads, from which the costs of a request and of a token follow
TIMED = 24  # output tokens of the requests of which the first token is timed
ROUNDS, LEAST_SHORT, LEAST_LONG = 3, 24, 4  # requests of a load, or twice as many as there are streams
IDLE_S = 8.0
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
HOST = "127.0.0.1"
AIM_TOKEN_RATIO, AIM_TOKEN_FROM, AIM_REQUEST_RATIO, AIM_IDLE_MS = 0.5, 16, 1.1, 10.0
AIM_TTFT_MS = {1: 2.0, 16: 2.0, 64: 5.0}

Cell = dict[str, float]


def run_overhead_bench(rounds: int = ROUNDS, streams: tuple[int, ...] = STREAMS) -> dict[str, Any]:
    """Start an emulated suite, load it, and give figures and aims."""
    structured = structured_ttfts()
    long_prompts = run_long_prompts()  # sets environment variables, which real engines would go by
    result = asyncio.run(_bench(rounds, streams))
    result["figures"]["structured_outputs"] = structured
    result["aims"] |= aims_of_structured(structured)
    result["figures"]["long_prompt_longest_turn_ms"] = long_prompts
    worst = max(turn for of_kind in long_prompts.values() for turn in of_kind.values())
    result["aims"]["long_prompt_longest_turn_ms"] = _aim(worst, AIM_TURN_MS)
    return result


async def _bench(rounds: int, streams: tuple[int, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        async with (
            running_suite(cluster(), Path(folder), Console(stderr=True)) as running,
            api_layer_alone(Path(folder)) as alone,
        ):
            suite = of_suite(running.suite)
            for target in (suite, alone):
                for path in PATHS.values():
                    await run_load(HOST, target.port, _bodies(path, 64, SHORT), 8, path)
            idle_ms = await _idle_ms(suite)
            cells = {
                kind: {str(count): await _cell(suite, alone, path, count, rounds) for count in streams}
                for kind, path in PATHS.items()
            }
    return {"figures": {"idle_cpu_ms_per_s": round(idle_ms, 2), **cells}, "aims": aims_of(idle_ms, cells)}


async def _idle_ms(suite: Target) -> float:
    before, began = suite.cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (suite.cpu_s() - before) * 1e3 / (time.monotonic() - began)


async def _cell(suite: Target, alone: Target, path: str, streams: int, rounds: int) -> Cell:
    """Medians of rounds in each of which both targets have their turn."""
    seen = [await _round(suite, alone, path, streams) for _ in range(rounds)]
    return {name: round(statistics.median(each[name] for each in seen), 3) for name in seen[0]}


async def _round(suite: Target, alone: Target, path: str, streams: int) -> Cell:
    ours, base = await _costs(suite, path, streams), await _costs(alone, path, streams)
    cell = {**ours, **{f"api_layer_alone_{name}": value for name, value in base.items()}}
    for name in ("cpu_per_token_us", "cpu_per_request_ms"):
        cell[f"{name}_ratio"] = ours[name] / base[name]
    for name in ("ttft_p50_ms", "ttft_p99_ms"):
        cell[f"added_{name}"] = ours[name] - base[name]
    return cell


async def _costs(target: Target, path: str, streams: int) -> Cell:
    """Of short and of long answers; the difference is the cost of the tokens."""
    short_s, _ = await _cpu_of(target, path, max(LEAST_SHORT, 2 * streams), SHORT, streams)
    long_s, long = await _cpu_of(target, path, max(LEAST_LONG, 2 * streams), LONG, streams)
    per_token_s = (long_s - short_s) / (LONG - SHORT)
    times = await _ttfts(target, path, max(LEAST_SHORT, 2 * streams), streams)
    return {
        "cpu_per_token_us": per_token_s * 1e6,
        "cpu_per_request_ms": (short_s - SHORT * per_token_s) * 1e3,
        "events_per_token": sum(result.chunks for result in long) / (len(long) * LONG),
        "ttft_p50_ms": times[len(times) // 2] * 1e3,
        "ttft_p99_ms": times[len(times) * 99 // 100] * 1e3,
    }


async def _cpu_of(
    target: Target, path: str, requests: int, tokens: int, streams: int
) -> tuple[float, list[StreamResult]]:
    """CPU seconds a request, and what the client saw."""
    before = target.cpu_s()
    results = await run_load(HOST, target.port, _bodies(path, requests, tokens), streams, path)
    return (target.cpu_s() - before) / requests, results


async def _ttfts(target: Target, path: str, requests: int, streams: int) -> list[float]:
    """In order, of requests that come evenly, as many at once as there are to be streams.

    Prefill takes no time in either target, so the difference between two is what our services add.
    """
    answer_s = (await stream_completion(HOST, target.port, _bodies(path, 1, TIMED)[0], path=path)).total_s
    began = time.monotonic()

    async def one(number: int, body: dict[str, object]) -> float:
        await asyncio.sleep(began + number * answer_s / streams - time.monotonic())
        return (await stream_completion(HOST, target.port, body, path=path)).ttft_s

    bodies = _bodies(path, requests, TIMED)
    return sorted(await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies))))


def _bodies(path: str, count: int, tokens: int) -> list[dict[str, object]]:
    usual = {"model": "demo", "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    prompts = [f"{index} {PROMPT}" for index in range(count)]
    if path == PATHS["chat"]:
        return [{**usual, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return [{**usual, "prompt": prompt} for prompt in prompts]


def aims_of(idle_ms: float, cells: dict[str, dict[str, Cell]]) -> dict[str, Any]:
    """Each aim with the worst of the figures that it is about."""
    of_streams = [(int(count), cell) for of_kind in cells.values() for count, cell in of_kind.items()]
    many = [cell for count, cell in of_streams if count >= AIM_TOKEN_FROM]
    aims = {
        "idle_cpu_ms_per_s": _aim(idle_ms, AIM_IDLE_MS),
        "cpu_per_request_ratio": _aim(
            max(cell["cpu_per_request_ms_ratio"] for _, cell in of_streams), AIM_REQUEST_RATIO
        ),
    }
    if many:
        worst = max(cell["cpu_per_token_us_ratio"] for cell in many)
        aims[f"cpu_per_token_ratio at {AIM_TOKEN_FROM} and more"] = _aim(worst, AIM_TOKEN_RATIO)
    for count, want in AIM_TTFT_MS.items():
        seen = [cell["added_ttft_p50_ms"] for streams, cell in of_streams if streams == count]
        if seen:
            aims[f"added_ttft_p50_ms at {count}"] = _aim(max(seen), want)
    return aims


def _aim(got: float, want: float) -> dict[str, Any]:
    return {"want": f"<= {want:g}", "got": round(got, 3), "met": got <= want}
