from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cluster_monitor import adapter_book, policy_book
from services.cluster_monitor.app import create_app
from services.cluster_monitor.routes import State
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import ClusterView, InstanceInfo, InstanceState, Role
from shared.domain.policies import PolicySet
from shared.store.write_behind import WriteBehind
from shared.wire.clients.monitor import MonitorClient
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.services.control_plane import follow, request, running, sqlite, until
from tests.services.fake_worker import FakeWorker, fake_worker, make_info


@dataclass
class Cluster:
    """A monitor, a subscriber of its broadcast, and fake workers as a test wants them."""

    settings: MonitorSettings
    state: State
    transport: httpx.ASGITransport
    client: MonitorClient
    stack: AsyncExitStack  # the workers
    monitor: AsyncExitStack
    views: list[ClusterView] = field(default_factory=list)

    async def worker(self, instance_id: str, role: Role, **options: Any) -> FakeWorker:
        info: InstanceInfo = options.pop("info", None) or make_info(instance_id, free_address())
        client = None if options.pop("unregistered", False) else self.client
        return await self.stack.enter_async_context(
            fake_worker(info, role, self.settings.heartbeat_address, client, **options)
        )

    def mortal(self, instance_id: str, role: Role, **info: Any) -> AbstractAsyncContextManager[FakeWorker]:
        """A registered worker that dies at the end of the block."""
        found = make_info(instance_id, free_address(), **info)
        return fake_worker(found, role, self.settings.heartbeat_address, self.client)

    async def get(self, path: str) -> Any:
        """The JSON of a GET that must succeed."""
        answer = await request(self.transport, "GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def news(self, *outcomes: dict[str, Any], **more: Any) -> Any:
        """What scheduler s0 reports; the monitor's answer."""
        body = {"revision": self.policies.revision, "outcomes": list(outcomes), **more}
        answer = await request(self.transport, "POST", "/schedulers/s0/news", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def store(self) -> WriteBehind:
        return self.state.store

    @property
    def policies(self) -> PolicySet:
        return self.state.policies.policies

    async def stop(self) -> None:
        """Stop the monitor; the workers of `stack` live on."""
        await self.monitor.aclose()

    async def workers(self, **roles: Role) -> list[FakeWorker]:
        found = [await self.worker(name, role) for name, role in roles.items()]
        for name, role in roles.items():
            await self.wait_ready(name, role)
        return found

    async def wait_ready(self, instance_id: str, role: Role) -> None:
        await until(
            lambda: (seen := self.seen(instance_id)) and (seen.state, seen.role) == (InstanceState.READY, role),
            f"{instance_id} ready as {role}",
        )

    async def wait_state(self, instance_id: str, state: InstanceState) -> None:
        await until(lambda: self.state.registry.get(instance_id).state is state, f"{instance_id} {state}")

    def seen(self, instance_id: str) -> Any:
        return self.views[-1].get(instance_id) if self.views else None


Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a monitor; settings may be changed by keyword."""
    for book in (policy_book, adapter_book):  # a disk that is busy is not what is tested
        monkeypatch.setattr(book, "KEEP_S", 20.0)
    async with AsyncExitStack() as stack:

        async def run(**changes: Any) -> Cluster:
            wanted = {
                "heartbeat_address": free_address(),
                "broadcast_address": free_address(),
                "database_url": sqlite(tmp_path),
                "silence_s": 20.0,  # the workers are on the monitor's loop: while it stalls they cannot beat
                "quiet_start_s": 0.3,
                **changes,
            }
            settings = MonitorSettings(**wanted)
            app = create_app(settings)
            own = await stack.enter_async_context(AsyncExitStack())
            transport = await own.enter_async_context(running(app))
            client = await own.enter_async_context(MonitorClient("http://monitor", transport=transport))
            workers = await stack.enter_async_context(AsyncExitStack())
            cluster = Cluster(settings, app.state.leadership.acting(), transport, client, workers, own)
            sockets = Sockets()
            stack.callback(sockets.close)
            stack.callback(follow(sockets, settings.broadcast_address, cluster.views.append).close)
            return cluster

        yield run


@pytest.fixture
async def cluster(start: Start) -> Cluster:
    found: Cluster = await start()
    return found
