"""Monitor, schedulers and emulated instances in one process, over real sockets, and a gateway's pipeline."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from gateway.lengths import LengthClient
from gateway.metrics import GatewayMetrics
from gateway.pipeline import Pipeline
from gateway.reports import Reporter
from gateway.settings import GatewaySettings
from services.cluster_monitor import adapter_book, policy_book
from services.cluster_monitor.app import create_app as monitor_app
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.app import create_app as scheduler_app
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.suite import change_policies
from services.worker import app as worker_app
from services.worker.app import Instance
from services.worker.settings import WorkerSettings
from shared.domain.route import PolicySpec
from shared.wire.api.monitor import PoliciesInForce
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tests.ports import free_address, free_port
from tests.services.control_plane import running, sqlite, until


@dataclass
class LiveSuite:
    """Monitor, two schedulers, instances as a test wants them, and a gateway's pipeline."""

    stack: AsyncExitStack
    monitor_url: str
    monitor_settings: MonitorSettings
    schedulers: list[FastAPI] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)  # of the schedulers
    instances: dict[str, Instance] = field(default_factory=dict)
    monitor: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def client(self) -> MonitorClient:
        return MonitorClient(self.monitor_url)

    async def start_monitor(self) -> FastAPI:
        """Over real HTTP, which is how the others reach it."""
        app = monitor_app(self.monitor_settings)
        port = int(self.monitor_url.rpartition(":")[2])
        self.monitor = AsyncExitStack()
        await self.monitor.enter_async_context(serving(app, port))
        return app

    async def stop_monitor(self) -> None:
        await self.monitor.aclose()

    async def start_scheduler(self) -> None:
        settings = SchedulerSettings(
            scheduler_id=f"s{len(self.schedulers)}",
            rpc_address=free_address(),
            broadcast_address=self.monitor_settings.broadcast_address,
            monitor_url=self.monitor_url,
            database_url=self.monitor_settings.database_url,
        )
        app = scheduler_app(settings)
        await self.stack.enter_async_context(running(app))
        self.schedulers.append(app)
        self.addresses.append(settings.rpc_address)

    async def start_instance(self, name: str, role: str, **changes: Any) -> None:
        ports = {key: free_port() for key in ("rpc_port", "http_port", "kv_port")}
        settings = WorkerSettings(
            instance_id=name,
            role=role,  # type: ignore[arg-type]
            model="m",
            engine="emulated",
            accelerator="A100-SXM-80",
            monitor_url=self.monitor_url,
            heartbeat_address=self.monitor_settings.heartbeat_address,
            broadcast_address=self.monitor_settings.broadcast_address,
            **{"kv_cache_bytes": 1 << 30, "emulated_step_s": 0.001, **ports, **changes},  # type: ignore[arg-type]
        )
        self.instances[name] = await self.stack.enter_async_context(worker_app.running(settings, CollectorRegistry()))

    def known(self, ready: int) -> bool:
        """Whether every scheduler knows of so many instances that are ready."""
        views = [app.state.scheduler.placer.view for app in self.schedulers]
        return all(v is not None and sum(one.state == "ready" for one in v.instances) >= ready for v in views)

    async def change(self, change: dict[str, PolicySpec | None]) -> PoliciesInForce:
        """Change policies; ends when both schedulers and all instances follow."""
        async with self.client as monitor:
            return await change_policies(monitor, change, "test", len(self.schedulers))


async def emptied(instance: Instance) -> None:
    """Nothing is left behind. A request that is given up keeps its blocks until the step under way has ended."""

    def is_empty() -> bool:
        stats = instance.engine.stats()
        return instance.roles.inflight == 0 and stats.free_blocks == stats.total_blocks

    await until(is_empty, "nothing is left behind")


@asynccontextmanager
async def serving(app: FastAPI, port: int) -> AsyncIterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, lifespan="on"))
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign,attr-defined]
    task = asyncio.get_running_loop().create_task(server.serve())
    try:
        await until(lambda: server.started or task.done(), "HTTP is served", timeout_s=60)
        yield
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def live_suite(
    folder: Path, schedulers: int = 2, decode: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[LiveSuite]:
    """With instances p0 and d0, once every scheduler knows that they are ready. changes: of both instances' settings;
    decode: of those of d0.
    """
    async with AsyncExitStack() as stack:
        for book in (policy_book, adapter_book):  # a disk that is busy is not what is tested
            stack.enter_context(patch.object(book, "KEEP_S", 30.0))
        settings = MonitorSettings(
            heartbeat_address=free_address(),
            broadcast_address=free_address(),
            database_url=sqlite(folder),
            quiet_start_s=0.3,
            silence_s=20.0,  # instances are on the monitor's loop: while it stalls they cannot beat
        )
        suite = LiveSuite(stack, f"http://127.0.0.1:{free_port()}", settings)
        await suite.start_monitor()
        stack.push_async_callback(lambda: suite.monitor.aclose())
        for _ in range(schedulers):
            await suite.start_scheduler()
        await suite.start_instance("p0", "prefill", **changes)
        await suite.start_instance("d0", "decode", **changes, **(decode or {}))
        await until(lambda: suite.known(2), "both instances are known to be ready", timeout_s=60)
        yield suite


@contextmanager
def pipelines(suite: LiveSuite, *, shared: bool = False, **changes: Any) -> Iterator[list[Pipeline]]:
    """A gateway's pipeline for each scheduler. shared: one alone, which asks all schedulers in turn. changes: of its
    settings.
    """
    sockets = Sockets()
    try:
        with RpcClients(sockets) as clients:
            made = []
            for addresses in [tuple(suite.addresses)] if shared else [(one,) for one in suite.addresses]:
                settings = GatewaySettings(schedulers=addresses, model="m", **changes)
                schedulers = SchedulerClient(clients, settings.schedulers)
                metrics = GatewayMetrics("m", CollectorRegistry())
                reporter, lengths = Reporter(schedulers, metrics), LengthClient(clients, settings, metrics.predictions)
                made.append(Pipeline(settings, clients, schedulers, reporter, lengths))
            yield made
    finally:
        sockets.close()
