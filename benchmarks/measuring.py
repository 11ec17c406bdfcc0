"""Processes that a bench starts beside or instead of a suite, and the CPU time and memory of processes."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.results import Figures
from benchmarks.suite import DEMO_MODEL
from services.launcher.ports import free_alone
from services.launcher.suite import until
from services.launcher.supervisor import StartFailed
from services.launcher.up import RunningSuite

START_S, END_S = 180.0, 30.0  # of a process
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def port_of(running: RunningSuite) -> int:
    """The port of the API."""
    return urlsplit(running.plan.api_url).port or 80


def pids_of(running: RunningSuite, *beginnings: str) -> list[int]:
    """The processes whose names begin with one of these words."""
    return [process.pid for process in running.suite.state.processes if process.name.startswith(beginnings)]


@asynccontextmanager
async def serving(
    health: str, *command: str, program: str = sys.executable, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that serves, Python by default, once it answers at the URL `health`. Raises StartFailed with the end of
    its log.
    """
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            program,
            *command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

        async def answers_or_ended() -> bool:
            try:
                return process.returncode is not None or (await client.get(health)).is_success
            except httpx.HTTPError:
                return False

        try:
            async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
                await until(answers_or_ended, START_S, f"an answer at {health}", poll_s=0.02)
            if process.returncode is not None:
                end = os.pread(log.fileno(), 2000, max(0, os.fstat(log.fileno()).st_size - 2000)).decode(
                    errors="replace"
                )
                raise StartFailed(f"{health}: the process ended with {process.returncode}: {end}")
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@asynccontextmanager
async def plain_vllm(kv_bytes: int, *options: str, model: Path = DEMO_MODEL) -> AsyncIterator[int]:
    """The port of vLLM's own server with one engine of that model, which it serves as `demo`."""
    port = free_alone()
    own = "--served-model-name demo --dtype float32 --max-model-len 2048 --enforce-eager "
    own += f"--kv-cache-memory-bytes {kv_bytes} --host 127.0.0.1 --port {port}"
    command = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *own.split(), *options)
    async with serving(f"http://127.0.0.1:{port}/health", *command, **OFFLINE, OMP_NUM_THREADS="1"):
        yield port


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds, and how often a thread that waited was woken."""

    cpu_s: float = 0.0
    wakes: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_s + other.cpu_s, self.wakes + other.wakes)

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_s - other.cpu_s, self.wakes - other.wakes)

    def over(self, count: int) -> "Usage":
        return Usage(self.cpu_s / count, self.wakes / count)


def usage(pids: Iterable[int]) -> Usage:
    """What the processes have used until now, all threads together."""
    pids = list(pids)
    return Usage(cpu_s(pids), sum(map(_wakes, pids)))


def _wakes(pid: int) -> int:
    threads = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(thread.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for thread in threads)


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that the processes have used, to the nanosecond where the kernel tells it, else in ticks of 10 ms."""
    return sum(map(_cpu_s, pids))


def _cpu_s(pid: int) -> float:
    try:
        threads = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(thread.split()[0]) for thread in threads) / 1e9
    except FileNotFoundError:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


async def cores(groups: Mapping[str, Sequence[int]], window_s: float) -> Figures:
    """The cores that each group of processes uses during the window."""
    began, before = time.monotonic(), {name: cpu_s(pids) for name, pids in groups.items()}
    await asyncio.sleep(window_s)
    took_s = time.monotonic() - began
    return {name: (cpu_s(pids) - before[name]) / took_s for name, pids in groups.items()}


def own_bytes(pids: Iterable[int]) -> int:
    """Memory that belongs to these processes alone, without what the fork server shares with them."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)
