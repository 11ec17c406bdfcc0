"""Real monitor and scheduler processes, and instances that compute nothing, for benches of the control plane."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import msgspec
import psutil
from pydantic import SecretStr

from lab.bench.control_fleet import FleetOptions
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher import ports
from shared.domain.cluster import ClusterState
from shared.domain.instance import InstanceState
from shared.errors import Unavailable
from shared.wire.broadcast import ClusterFeed
from shared.wire.sockets import Sockets

SETTLE_S, READY_S = 3.0, 60.0


@dataclass(slots=True)
class Control:
    """The processes under test, and a listener to the broadcasts."""

    monitor_settings: MonitorSettings
    scheduler_settings: SchedulerSettings
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    cluster: ClusterState = field(default_factory=ClusterState)

    @property
    def monitor_url(self) -> str:
        """Of the process under test."""
        return f"http://127.0.0.1:{self.monitor_settings.http_port}"

    @property
    def scheduler_url(self) -> str:
        """Of the process under test."""
        return f"http://127.0.0.1:{self.scheduler_settings.http_port}"

    def ready(self) -> int:
        """Instances that the listener knows to be ready."""
        return sum(one.state is InstanceState.READY for one in self.cluster.view().instances)

    async def all_ready(self, size: int) -> bool:
        """Whether the listener knows so many to be."""
        return self.ready() == size

    def cpu_s(self, name: str) -> float:
        """That a process has had."""
        times = psutil.Process(self.processes[name].pid).cpu_times()
        return times.user + times.system

    async def start(self, name: str, *command: str, **environment: str) -> None:
        """A process of this Python."""
        self.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def start_monitor(self) -> None:
        """The monitor, or another after it."""
        await self.start("monitor", "-m", "services.cluster_monitor", **self.monitor_settings.to_environment())

    async def start_scheduler(self) -> None:
        """The scheduler."""
        await self.start("scheduler", "-m", "services.global_scheduler", **self.scheduler_settings.to_environment())

    def load(self, kind: str) -> None:
        """What the instances are to do."""
        pipe = self.processes["fleet"].stdin
        assert pipe is not None
        pipe.write(f"{kind}\n".encode())

    async def end(self) -> None:
        """Of all processes."""
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
    await control.start("fleet", "-m", "lab.bench.control_fleet", msgspec.json.encode(options).decode())


async def settled() -> None:
    """Wait for what follows a change."""
    await asyncio.sleep(SETTLE_S)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for it. Raises Unavailable."""
    deadline = time.monotonic() + READY_S
    while not await condition():
        if time.monotonic() > deadline:
            raise Unavailable(f"not within {READY_S:g} s: {what}")
        await asyncio.sleep(0.02)


async def healthy(url: str) -> bool:
    """Whether a process answers there, and well."""
    try:
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False
