"""What the suite itself costs: CPU a request and a token, and the time to first token that it adds.

Every service is real; the instances are emulated and compute in no time, so nothing but our own work is measured.
A decode step lasts STEP_S, so that each token is a message and an event of its own, as with a real engine.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from services.launcher.bench.stream_client import StreamResult, run_load
from services.launcher.cluster_file import PROJECT, Cluster
from services.launcher.suite import Suite
from services.launcher.up import running_suite

STEP_S = 0.01
SHORT, LONG = 2, 66  # output tokens of the two loads, from which the costs of a request and of a token follow
ROUNDS = 3
REQUESTS = 192
CONCURRENCIES = (1, 16, 64)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
PORT = 19099
AIM_REQUEST_MS, AIM_TOKEN_US = 2.5, 45.0


def run_overhead_bench(requests: int = REQUESTS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Start an emulated suite, load it, and give figures and aims. CPU is of gateway, scheduler and monitor."""
    return asyncio.run(_bench(requests, rounds))


async def _bench(requests: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        async with running_suite(_cluster(), Path(folder), Console(stderr=True)) as running:
            host, port = "127.0.0.1", PORT
            await run_load(host, port, _bodies(32, SHORT), 8)  # warm caches and connections
            idle = await _idle_cpu_per_s(running.suite)
            costs = [await _costs(running.suite, host, port, requests) for _ in range(rounds)]
            figures = _median(costs)
            figures["idle_cpu_ms_per_s"] = idle * 1e3
            for concurrency in CONCURRENCIES:
                figures.update(await _added_ttft(host, port, concurrency))
    aims = {
        "cpu_per_request_ms": _aim(figures["cpu_per_request_ms"], AIM_REQUEST_MS),
        "cpu_per_token_us": _aim(figures["cpu_per_token_us"], AIM_TOKEN_US),
    }
    return {"figures": {name: round(value, 4) for name, value in figures.items()}, "aims": aims}


def _cluster() -> Cluster:
    instance = {
        "engine": "emulated", "accelerator": "A100-SXM-80", "emulated_step_s": 0.0, "max_seqs": 256,
        "kv_cache_bytes": 64 << 30,
    }  # fmt: skip
    return Cluster.model_validate(
        {
            "name": "overhead bench (emulated instances)",
            "model": str(PROJECT / "models" / "demo"),
            "served_model_name": "demo",
            "ports": 19100,
            "gateway": {"port": PORT, "max_queued_jobs": 4096},
            "predictor": {"enabled": False},
            "dashboard": {"enabled": False},
            "instances": [
                {"id": "p0", "role": "prefill", **instance},
                {"id": "d0", "role": "decode", **instance, "emulated_step_s": STEP_S},
            ],
        }
    )


def _bodies(count: int, tokens: int) -> list[dict[str, object]]:
    return [
        {
            "model": "demo", "prompt": f"{index} {PROMPT}", "max_tokens": tokens, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }
        for index in range(count)
    ]  # fmt: skip


async def _costs(suite: Suite, host: str, port: int, requests: int) -> dict[str, float]:
    """One round: the same number of short and of long answers; the difference is the cost of the tokens."""
    short, short_results = await _cpu_of(suite, host, port, _bodies(requests, SHORT))
    long, long_results = await _cpu_of(suite, host, port, _bodies(requests, LONG))
    chunks = sum(result.chunks for result in long_results) - sum(result.chunks for result in short_results)
    tokens = requests * (LONG - SHORT)
    figures: dict[str, float] = {"events_per_token": chunks / tokens}
    for name in short:
        per_token = (long[name] - short[name]) / tokens
        figures[f"{name}_per_token_us"] = per_token * 1e6
        figures[f"{name}_per_request_ms"] = (short[name] / requests - SHORT * per_token) * 1e3
    return figures


async def _cpu_of(
    suite: Suite, host: str, port: int, bodies: list[dict[str, object]], concurrency: int = 16
) -> tuple[dict[str, float], list[StreamResult]]:
    before = _cpu(suite)
    results = await run_load(host, port, bodies, concurrency)
    after = _cpu(suite)
    return {name: after[name] - before[name] for name in after}, results


def _cpu(suite: Suite) -> dict[str, float]:
    """CPU seconds so far, by process and together."""
    seconds: dict[str, float] = {}
    for process in suite.state.processes:
        if process.name.startswith(("gateway", "scheduler", "monitor")):
            times = psutil.Process(process.pid).cpu_times()
            seconds[f"{process.name.split('-')[0]}_cpu"] = times.user + times.system
    return {**seconds, "cpu": sum(seconds.values())}


async def _idle_cpu_per_s(suite: Suite, seconds: float = 3.0) -> float:
    before, began = _cpu(suite)["cpu"], time.monotonic()
    await asyncio.sleep(seconds)
    return (_cpu(suite)["cpu"] - before) / (time.monotonic() - began)


async def _added_ttft(host: str, port: int, concurrency: int) -> dict[str, float]:
    """Prefill takes no time here, so all of the time to first token is ours and the machine's."""
    results = await run_load(host, port, _bodies(max(64, 4 * concurrency), 16), concurrency)
    times = sorted(result.ttft_s * 1e3 for result in results)
    return {
        f"added_ttft_p50_at_{concurrency}_ms": statistics.median(times),
        f"added_ttft_p99_at_{concurrency}_ms": times[min(len(times) - 1, int(len(times) * 0.99))],
    }


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _aim(got: float, want: float) -> dict[str, Any]:
    return {"want": f"<= {want:g}", "got": round(got, 3), "met": got <= want}
