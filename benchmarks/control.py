"""`polyphase bench control`: cost of the control plane with 10, 100 and 1,000 instances.

The monitor and the scheduler are real processes. The instances are one process (`control_fleet`) that holds a
heartbeat, a broadcast and an RPC connection for each instance and computes nothing. `bench dashboard` uses the same
processes.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import psutil
import uvloop
from pydantic import SecretStr

from benchmarks.control_fleet import FleetOptions
from benchmarks.suite import metric
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher import ports
from shared.domain.cluster import ClusterState
from shared.domain.instance import InstanceState
from shared.domain.job import JobView, Phase
from shared.errors import Unavailable
from shared.wire.broadcast import ClusterFeed
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import JobReport
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets

SETTLE_S, READY_S = 3.0, 60.0


@dataclass(slots=True)
class Control:
    """The processes under test, and a subscriber to the broadcasts."""

    monitor_settings: MonitorSettings
    scheduler_settings: SchedulerSettings
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    cluster: ClusterState = field(default_factory=ClusterState)

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor_settings.http_port}"

    @property
    def scheduler_url(self) -> str:
        return f"http://127.0.0.1:{self.scheduler_settings.http_port}"

    def ready(self) -> int:
        """Instances that the subscriber knows to be ready."""
        return sum(one.state is InstanceState.READY for one in self.cluster.view().instances)

    async def all_ready(self, size: int) -> bool:
        return self.ready() == size

    def cpu_s(self, name: str) -> float:
        times = psutil.Process(self.processes[name].pid).cpu_times()
        return times.user + times.system

    async def start(self, name: str, *command: str, **environment: str) -> None:
        self.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def start_monitor(self) -> None:
        await self.start("monitor", "-m", "services.cluster_monitor", **self.monitor_settings.to_environment())

    async def start_scheduler(self) -> None:
        await self.start("scheduler", "-m", "services.global_scheduler", **self.scheduler_settings.to_environment())

    def load(self, kind: str) -> None:
        pipe = self.processes["fleet"].stdin
        assert pipe is not None
        pipe.write(f"{kind}\n".encode())

    async def end(self) -> None:
        for process in reversed(self.processes.values()):
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 15.0)
            except TimeoutError:
                process.kill()
                await process.wait()


@asynccontextmanager
async def running(size: int, before: Callable[[str], Awaitable[None]] | None = None) -> AsyncIterator[Control]:
    """Monitor, scheduler and so many instances that compute nothing; `before` may fill their database, by its URL."""
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        control = Control(*_settings(Path(folder)))
        if before is not None:
            await before(control.monitor_settings.database_url)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(control.end)
            await control.start_monitor()
            await control.start_scheduler()
            for url in (control.monitor_url, control.scheduler_url):
                await until(partial(healthy, f"{url}/health"), f"{url} answers")
            sockets = Sockets()
            stack.callback(sockets.close)
            feed = ClusterFeed(
                sockets, control.monitor_settings.broadcast_address, lambda delta: control.cluster.apply(delta)
            )
            stack.callback(feed.close)
            await _start_fleet(control, size)
            await until(lambda: control.all_ready(size), f"{size} instances are ready")
            await settled()
            yield control


def _settings(folder: Path) -> tuple[MonitorSettings, SchedulerSettings]:
    first = ports.free_range()
    address = [f"tcp://127.0.0.1:{first + at}" for at in range(8)]
    database = f"sqlite:///{folder}/polyphase.db"
    monitor = MonitorSettings(
        http_port=first,
        heartbeat_address=address[1],
        broadcast_address=address[2],
        database_url=database,
        cluster_token=SecretStr("open"),
    )
    scheduler = SchedulerSettings(
        http_port=first + 3,
        rpc_address=address[4],
        broadcast_address=address[2],
        monitor_url=f"http://127.0.0.1:{first}",
        database_url=database,
    )
    return monitor, scheduler


async def _start_fleet(control: Control, size: int) -> None:
    monitor = control.monitor_settings
    options = FleetOptions(
        size, monitor.http_port + 5, monitor.heartbeat_address, monitor.broadcast_address, control.monitor_url
    )
    await control.start("fleet", "-m", "benchmarks.control_fleet", msgspec.json.encode(options).decode())


async def settled() -> None:
    await asyncio.sleep(SETTLE_S)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for it. Raises Unavailable."""
    deadline = time.monotonic() + READY_S
    while not await condition():
        if time.monotonic() > deadline:
            raise Unavailable(f"not within {READY_S:g} s: {what}")
        await asyncio.sleep(0.02)


async def healthy(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


SIZES = (10, 100, 1_000)
WINDOW_S = 8.0
PLACE_PER_S, OPEN = 100.0, 100  # placements, and jobs of them that are not over
AIMS = {"monitor_cores": 0.3, "scheduler_cores": 0.2, "place_p99_ms": 1.0, "known_again_s": 5.0}
Figures = dict[str, float]


def run_control_bench(sizes: tuple[int, ...] = SIZES, window_s: float = WINDOW_S) -> dict[str, Any]:
    """{"figures": {size: {name_unit: number}}, "aims": of the largest, "notes": [str]}."""
    figures = {str(size): uvloop.run(_measure(size, window_s)) for size in sizes}
    largest = figures[str(sizes[-1])]
    aims = {
        f"{name} at {sizes[-1]}": {"want": f"<= {most:g}", "got": largest[name], "met": largest[name] <= most}
        for name, most in AIMS.items()
    }
    first = figures[str(sizes[0])]
    names = ("monitor_cores", "scheduler_cores", "broadcast_bytes_per_s", "place_p50_ms", "place_p99_ms")
    growth = {name: round(largest[name] / first[name], 1) for name in names if first[name]}
    return {
        "figures": {**figures, f"growth_{sizes[0]}_to_{sizes[-1]}": growth},
        "aims": aims,
        "notes": [
            "cores: CPU time of the whole process, in cores, while every load changes each 100 ms without "
            "a placement; idle_…: while none does. place_…: from the question to the answer at the client, "
            f"{PLACE_PER_S:g} a second beside those changing loads; decision_…: the part of it that the scheduler "
            "decides, by its own histogram. known_again: from the start of a new monitor process after a kill -9 until "
            "a listener knows all instances to be ready; of it, start is until the process answers at all."
        ],
    }


async def _measure(size: int, window_s: float) -> Figures:
    async with running(size) as control:
        figures = {f"idle_{name}": value for name, value in (await _window(control, window_s)).items()}
        control.load("busy")
        await settled()
        figures |= await _window(control, window_s)
        figures |= await _place(control, window_s)
        figures |= await _restart(control, size)
    return figures


async def _window(control: Control, window_s: float) -> Figures:
    """Cores of both processes, and what is broadcast, without requests."""
    sent = await _counter(control.monitor_url, "polyphase_broadcast_bytes_total")
    beats = await _counter(control.monitor_url, "polyphase_heartbeats_total")
    began, before = time.monotonic(), {name: control.cpu_s(name) for name in ("monitor", "scheduler")}
    await asyncio.sleep(window_s)
    took_s = time.monotonic() - began
    cores = {name: (control.cpu_s(name) - before[name]) / took_s for name in before}
    return {
        **{f"{name}_cores": round(value, 4) for name, value in cores.items()},
        "broadcast_bytes_per_s": round(
            (await _counter(control.monitor_url, "polyphase_broadcast_bytes_total") - sent) / took_s
        ),
        "heartbeats_per_s": round((await _counter(control.monitor_url, "polyphase_heartbeats_total") - beats) / took_s),
    }


async def _place(control: Control, window_s: float) -> Figures:
    """Round trips of placements, evenly spread."""
    sockets, took_s = Sockets(), list[float]()
    try:
        with RpcClients(sockets) as clients:
            client = SchedulerClient(clients, [control.scheduler_settings.rpc_address])
            await client.place(_job(0), timeout_s=10.0)
            before = await _decisions(control.scheduler_url)
            due = time.monotonic()
            for number in range(1, round(window_s * PLACE_PER_S) + 1):
                due += 1.0 / PLACE_PER_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                began = time.perf_counter()
                await client.place(_job(number), timeout_s=10.0)
                took_s.append(time.perf_counter() - began)
                if number > OPEN:
                    await client.report([_ended(number - OPEN)], timeout_s=10.0)
            after = await _decisions(control.scheduler_url)
    finally:
        sockets.close()
    took_s.sort()
    decided = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    return {
        "place_p50_ms": round(median(took_s) * 1e3, 3),
        "place_p99_ms": round(took_s[len(took_s) * 99 // 100] * 1e3, 3),
        "decision_p99_at_most_ms": _quantile_ms(decided, 0.99),
    }


async def _restart(control: Control, size: int) -> Figures:
    """A new monitor after one that was killed: when it answers, and when all are known again."""
    control.load("busy")
    control.processes["monitor"].send_signal(signal.SIGKILL)
    await control.processes["monitor"].wait()
    control.cluster = ClusterState()
    began = time.monotonic()
    await control.start_monitor()
    await until(lambda: healthy(f"{control.monitor_url}/health"), "the new monitor answers")
    start_s = time.monotonic() - began
    await until(lambda: control.all_ready(size), "all are known again")
    return {"known_again_s": round(time.monotonic() - began, 2), "known_again_start_s": round(start_s, 2)}


async def _scrape(url: str) -> list[str]:
    async with httpx.AsyncClient(timeout=30.0) as client:
        return (await client.get(f"{url}/metrics")).text.splitlines()


async def _counter(url: str, name: str) -> float:
    return metric("\n".join(await _scrape(url)), name)


async def _decisions(url: str) -> dict[float, float]:
    """Decisions by the time that they took at most, in seconds."""
    found = {}
    for line in await _scrape(url):
        if line.startswith("polyphase_scheduler_decision_seconds_bucket{"):
            bound, count = line.split('le="')[1].split('"')[0], float(line.split()[-1])
            found[float(bound)] = count
    return found


def _quantile_ms(counts: dict[float, float], share: float) -> float:
    total = max(counts.values())
    return next(bound * 1e3 for bound, count in sorted(counts.items()) if count >= share * total)


def _job(number: int) -> JobView:
    return JobView(f"bench-{number}", 200 + number * 37 % 1500, 100)


def _ended(number: int) -> JobReport:
    job = _job(number)
    return JobReport(
        job.job_id, "bench", Phase.COMPLETED, time.time() - 1.0, job.prompt_tokens, 100, outcome="stop", slo_met=True
    )
