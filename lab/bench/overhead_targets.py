"""What `bench overhead` measures: the suite with emulated instances, and vLLM's API layer alone."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from gateway.settings import GatewaySettings
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.suite import Suite, until

STEP_S = 0.025  # of a decode: each token is a message and an event of its own, as with a real engine
PORT, ALONE_PORT, FIRST_PORT = 19099, 19098, 19100
MODEL = PROJECT / "models" / "demo"
_MAX_JOBS = 4096
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chats and completions, and the CPU seconds that it has used by now."""

    port: int
    cpu_s: Callable[[], float]


def cluster() -> Cluster:
    """Two prefill and two decode instances that compute in no time."""
    instance = {
        "engine": "emulated",
        "accelerator": "A100-SXM-80",
        "emulated_step_s": 0.0,
        "max_seqs": 256,
        "kv_cache_bytes": 64 << 30,
    }
    prefill = [{"id": f"p{number}", "role": "prefill", **instance} for number in range(2)]
    decode = [{"id": f"d{number}", "role": "decode", **instance, "emulated_step_s": STEP_S} for number in range(2)]
    return Cluster.model_validate(
        {
            "name": "overhead bench (emulated instances)",
            "model": str(MODEL),
            "served_model_name": "demo",
            "ports": FIRST_PORT,
            "gateway": {"port": PORT, "max_queued_jobs": _MAX_JOBS},
            "predictor": {"enabled": False},
            "planner": {"enabled": False},
            "dashboard": {"enabled": False},
            "instances": [*prefill, *decode],
        }
    )


def of_suite(suite: Suite) -> Target:
    """Gateway, schedulers and monitor: all but the instances."""
    pids = [p.pid for p in suite.state.processes if p.name.startswith(("gateway", "scheduler", "monitor"))]
    return Target(PORT, lambda: sum(map(cpu_s, pids)))


@asynccontextmanager
async def api_layer_alone(folder: Path) -> AsyncIterator[Target]:
    """vLLM's own streams behind our admission; its tokens come from a timer in its process."""
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:9",),
        model=str(MODEL),
        served_model_name="demo",
        port=ALONE_PORT,
        max_queued_jobs=_MAX_JOBS,
        lean_streams=False,
    )
    environment = {**os.environ, **settings.to_environment(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "gateway.alone"]
    with (folder / "alone.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        await until(_answers, _START_S, "the API layer alone")
        yield Target(ALONE_PORT, lambda: cpu_s(process.pid))
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 15)


async def _answers() -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{ALONE_PORT}/health", timeout=2)).is_success
        except httpx.HTTPError:
            return False


def cpu_s(pid: int) -> float:
    """Of all threads, to the nanosecond: the usual clocks have ticks of 10 ms, more than some requests cost."""
    try:
        threads = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(thread.split()[0]) for thread in threads) / 1e9
    except FileNotFoundError:  # a kernel without them
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
