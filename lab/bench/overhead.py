"""What the suite itself costs: CPU a request and a token, and the time to first token that it adds.

Every service is real; the instances are emulated and compute in no time. A decode step lasts STEP_S, so that each
token is a message and an event of its own, as with a real engine. The same load also goes to vLLM's API layer alone
(`gateway.alone`): what the machine's other guests do to one they do to the other.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from gateway.settings import GatewaySettings
from lab.bench.stream_client import StreamResult, run_load
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.suite import Suite, until
from services.launcher.up import running_suite

STEP_S = 0.025
SHORT, LONG = 2, 66  # output tokens of the two loads, from which the costs of a request and of a token follow
ROUNDS, REQUESTS, CONCURRENCY = 3, 256, 64
CONCURRENCIES = (1, 16, 64)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
PORT, ALONE_PORT, FIRST_PORT = 19099, 19098, 19100
AIM_REQUEST_MS, AIM_TOKEN_US = 2.5, 45.0
MODEL = PROJECT / "models" / "demo"
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers completions, the CPU seconds it has used, and what it uses a second without any load."""

    port: int
    cpu_s: Callable[[], float]
    idle_cpu_share: float = 0.0


def run_overhead_bench(requests: int = REQUESTS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Start an emulated suite, load it, and give figures and aims. CPU is of gateway, scheduler and monitor."""
    return asyncio.run(_bench(requests, rounds))


async def _bench(requests: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        async with (
            running_suite(_cluster(), Path(folder), Console(stderr=True)) as running,
            _api_layer_alone(Path(folder)) as api_layer,
        ):
            suite = await _warmed(Target(PORT, lambda: _cpu_s(running.suite)))
            alone = await _warmed(api_layer)
            figures = {"idle_cpu_ms_per_s": suite.idle_cpu_share * 1e3}
            costs = [await _round(suite, alone, requests) for _ in range(rounds)]
            figures |= {name: statistics.median(each[name] for each in costs) for name in costs[0]}
            for concurrency in CONCURRENCIES:
                figures |= await _added_ttft(suite, alone, concurrency)
    aims = {
        "cpu_per_request_ms": _aim(figures["cpu_per_request_ms"], AIM_REQUEST_MS),
        "cpu_per_token_us": _aim(figures["cpu_per_token_us"], AIM_TOKEN_US),
    }
    return {"figures": {name: round(value, 3) for name, value in figures.items()}, "aims": aims}


def _cluster() -> Cluster:
    instance = {
        "engine": "emulated",
        "accelerator": "A100-SXM-80",
        "emulated_step_s": 0.0,
        "max_seqs": 256,
        "kv_cache_bytes": 64 << 30,
    }
    return Cluster.model_validate(
        {
            "name": "overhead bench (emulated instances)",
            "model": str(MODEL),
            "served_model_name": "demo",
            "ports": FIRST_PORT,
            "gateway": {"port": PORT, "max_queued_jobs": 4096},
            "predictor": {"enabled": False},
            "planner": {"enabled": False},
            "dashboard": {"enabled": False},
            "instances": [
                {"id": "p0", "role": "prefill", **instance},
                {"id": "d0", "role": "decode", **instance, "emulated_step_s": STEP_S},
            ],
        }
    )


@asynccontextmanager
async def _api_layer_alone(folder: Path) -> AsyncIterator[Target]:
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:9",),
        model=str(MODEL),
        served_model_name="demo",
        port=ALONE_PORT,
        max_queued_jobs=4096,
    )
    environment = {**os.environ, **settings.to_environment(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "gateway.alone"]
    with (folder / "alone.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        await until(_answers, START_S, "the API layer alone")
        times = psutil.Process(process.pid)
        yield Target(ALONE_PORT, lambda: times.cpu_times().user + times.cpu_times().system)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 15)


async def _answers() -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{ALONE_PORT}/health", timeout=2)).is_success
        except httpx.HTTPError:
            return False


def _bodies(count: int, tokens: int) -> list[dict[str, object]]:
    return [
        {
            "model": "demo",
            "prompt": f"{index} {PROMPT}",
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        for index in range(count)
    ]


async def _round(suite: Target, alone: Target, requests: int) -> dict[str, float]:
    """Both targets in turn."""
    ours, base = await _costs(suite, requests), await _costs(alone, requests)
    figures = {**ours, **{f"api_layer_alone_{name}": value for name, value in base.items()}}
    for name in ("cpu_per_request_ms", "cpu_per_token_us"):
        figures[f"added_{name}"] = ours[name] - base[name]
    return figures


async def _costs(target: Target, requests: int) -> dict[str, float]:
    """The same number of short and of long answers; the difference is the cost of the tokens."""
    short_s, short = await _cpu_of(target, _bodies(requests, SHORT))
    long_s, long = await _cpu_of(target, _bodies(requests, LONG))
    tokens = requests * (LONG - SHORT)
    per_token_s = (long_s - short_s) / tokens
    return {
        "cpu_per_token_us": per_token_s * 1e6,
        "cpu_per_request_ms": (short_s / requests - SHORT * per_token_s) * 1e3,
        "events_per_token": (sum(r.chunks for r in long) - sum(r.chunks for r in short)) / tokens,
    }


async def _cpu_of(target: Target, bodies: list[dict[str, object]]) -> tuple[float, list[StreamResult]]:
    """CPU seconds that the load cost on top of idling, and what the client saw."""
    before, began = target.cpu_s(), time.monotonic()
    results = await run_load("127.0.0.1", target.port, bodies, CONCURRENCY)
    idle_s = target.idle_cpu_share * (time.monotonic() - began)
    return target.cpu_s() - before - idle_s, results


def _cpu_s(suite: Suite) -> float:
    """CPU seconds of gateway, schedulers and monitor so far."""
    total = 0.0
    for process in suite.state.processes:
        if process.name.startswith(("gateway", "scheduler", "monitor")):
            times = psutil.Process(process.pid).cpu_times()
            total += times.user + times.system
    return total


async def _warmed(target: Target, seconds: float = 4.0) -> Target:
    """The target with warm caches and connections, and its idle share measured."""
    await run_load("127.0.0.1", target.port, _bodies(64, SHORT), 8)
    before, began = target.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return replace(target, idle_cpu_share=(target.cpu_s() - before) / (time.monotonic() - began))


async def _added_ttft(suite: Target, alone: Target, concurrency: int) -> dict[str, float]:
    """Prefill takes no time in either, so the difference is what our services add."""
    bodies = _bodies(max(64, 4 * concurrency), 16)
    times: dict[str, list[float]] = {}
    for name, target in (("ttft", suite), ("api_layer_alone_ttft", alone)):
        results = await run_load("127.0.0.1", target.port, bodies, concurrency)
        times[name] = sorted(result.ttft_s * 1e3 for result in results)
    figures: dict[str, float] = {}
    for rank in (50, 99):
        ours, base = _percentile(times["ttft"], rank), _percentile(times["api_layer_alone_ttft"], rank)
        figures[f"ttft_p{rank}_at_{concurrency}_ms"] = ours
        figures[f"added_ttft_p{rank}_at_{concurrency}_ms"] = ours - base
    return figures


def _percentile(ordered: list[float], rank: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * rank // 100)]


def _aim(got: float, want: float) -> dict[str, Any]:
    return {"want": f"<= {want:g}", "got": round(got, 3), "met": got <= want}
