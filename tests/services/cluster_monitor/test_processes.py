"""The real monitor process, and a worker process that is stopped, continued and killed."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import ClusterView, InstanceState
from shared.errors import PolyphaseError
from shared.wire.clients.monitor import MonitorClient
from shared.wire.sockets import Sockets
from tests.ports import free_address, free_port
from tests.services.control_plane import follow, sqlite, until

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def process(*command: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.send_signal(signal.SIGCONT)
            running.terminate()
        async with asyncio.timeout(60):
            await running.wait()


@asynccontextmanager
async def listening(address: str, views: list[ClusterView]) -> AsyncIterator[None]:
    sockets = Sockets()
    feed = follow(sockets, address, views.append)
    try:
        yield
    finally:
        feed.close()
        sockets.close()


async def test_a_worker_is_stopped_continued_and_killed_under_the_real_monitor(tmp_path: Path) -> None:
    settings = MonitorSettings(
        http_port=free_port(),
        heartbeat_address=free_address(),
        broadcast_address=free_address(),
        database_url=sqlite(tmp_path),
        silence_s=0.4,
    )
    url = f"http://127.0.0.1:{settings.http_port}"
    views: list[ClusterView] = []

    def state() -> Any:
        found = views[-1].get("d0") if views else None
        return found.state if found else None

    def unresponsive(view: ClusterView) -> bool:
        return (found := view.get("d0")) is not None and found.state is InstanceState.UNRESPONSIVE

    async def healthy() -> bool:
        try:
            return bool(await client.get("/health", dict[str, str]))
        except PolyphaseError:
            return False

    script = str(ROOT / "tests/services/cluster_monitor/worker_process.py")
    async with (
        listening(settings.broadcast_address, views),
        MonitorClient(url) as client,
        process("-m", "services.cluster_monitor", **settings.to_environment()) as monitor,
    ):
        await until(healthy, "monitor up", timeout_s=120)
        async with process(script, "d0", free_address(), settings.heartbeat_address, url) as worker:
            await until(lambda: state() is InstanceState.READY, "ready", timeout_s=120)
            seen = len(views)
            # By a process of its own: were it frozen for as long as a machine pauses this test, its connection would be
            # lost.
            frozen = await asyncio.create_subprocess_exec(
                "sh", "-c", f"kill -STOP {worker.pid}; sleep 1.3; kill -CONT {worker.pid}"
            )
            await until(lambda: any(unresponsive(view) for view in views[seen:]), "unresponsive")
            await frozen.wait()
            await until(lambda: state() is InstanceState.READY, "ready again")
            worker.kill()
            await until(lambda: state() is None, "gone from the broadcast")
            assert (await client.instance("d0")).death == "connection lost"
    assert monitor.returncode in (0, -signal.SIGTERM)  # uvicorn raises the signal again when all is closed
