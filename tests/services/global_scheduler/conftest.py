import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.global_scheduler.app import create_app
from services.global_scheduler.routes import State
from services.global_scheduler.settings import SchedulerSettings
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.job import Phase
from shared.domain.policies import PolicySet
from shared.domain.route import PolicySpec
from shared.timeline import RequestTimeline, TimelineSums
from shared.wire.clients.scheduler import SchedulerAdmin, SchedulerClient
from shared.wire.messages import JobReport
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.services.control_plane import Announcer, running, sqlite, until
from tests.services.fake_worker import make_info


@dataclass
class Scheduler:
    """A scheduler, the broadcast it hears, and a gateway's client."""

    settings: SchedulerSettings
    state: State
    transport: httpx.ASGITransport
    client: SchedulerClient
    admin: SchedulerAdmin
    sockets: Sockets
    publisher: Announcer
    policies: PolicySet
    sequence: int = 0
    instances: tuple[InstanceView, ...] = ()

    async def hear(self, **roles: Role | tuple[Role, InstanceState]) -> None:
        """Broadcast a cluster until the scheduler has it."""
        views = []
        for name, role in roles.items():
            what, state = role if isinstance(role, tuple) else (role, InstanceState.READY)
            load = InstanceLoad(time_s=time.time(), free_blocks=900)
            views.append(InstanceView(make_info(name, "tcp://127.0.0.1:9"), what, state, load))
        self.instances = tuple(views)
        await self._broadcast()

    async def follow(self, **policies: PolicySpec) -> None:
        """Broadcast other policies until the scheduler has heard of them."""
        revision = self.policies.revision + 1
        self.policies = msgspec.structs.replace(self.policies, revision=revision, **policies)
        await self._broadcast()

    async def _broadcast(self) -> None:
        self.sequence += 1
        wanted = self.sequence

        def arrived() -> bool:
            self.publisher.publish(ClusterView(wanted, time.time(), self.instances, self.policies))
            view = self.state.placer.view
            return view.sequence == wanted

        await until(arrived, "broadcast heard")


def report(job_id: str, phase: Phase = Phase.COMPLETED, **changes: Any) -> JobReport:
    fields: dict[str, Any] = {
        "job_id": job_id,
        "gateway_id": "g0",
        "phase": phase,
        "arrived_s": time.time(),
        "prompt_tokens": 100,
        "output_tokens": 20,
        "prefill_instance": "p0",
        "decode_instance": "d0",
        "split": 100,
        "outcome": "stop",
        "ttft_s": 0.2,
        "tpot_s": 0.02,
        "slo_met": True,
    }
    if phase.final:
        fields |= of_timeline(RequestTimeline(job_id, time.time(), prompt_tokens=100), phase)
    return JobReport(**{**fields, **changes})


def of_timeline(timeline: RequestTimeline, phase: Phase = Phase.COMPLETED) -> dict[str, Any]:
    """The fields of a report that a gateway makes of a timeline."""
    sums = TimelineSums.of(timeline) if phase.final else None
    return {"timeline_json": msgspec.json.encode(timeline).decode(), "sums": sums}


Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a scheduler; settings may be changed by keyword, and so may the policies of what it hears."""
    async with AsyncExitStack() as stack:

        async def run(**changes: Any) -> Scheduler:
            wanted = {
                "rpc_address": free_address(),
                "broadcast_address": free_address(),
                "database_url": sqlite(tmp_path),
                "monitor_url": "",
                "policy_seed": 0,
                **changes,
            }
            chosen = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}
            said = {kind: wanted.pop(kind, name) for kind, name in chosen.items()}
            policies = {kind: PolicySpec(one) if isinstance(one, str) else one for kind, one in said.items()}
            settings = SchedulerSettings(**wanted)
            app = create_app(settings)
            transport = await stack.enter_async_context(running(app))
            admin = await stack.enter_async_context(SchedulerAdmin("http://scheduler", transport=transport))
            sockets = Sockets()
            stack.callback(sockets.close)
            publisher = Announcer(sockets, settings.broadcast_address)
            stack.callback(publisher.close)
            clients = stack.enter_context(RpcClients(sockets))
            client = SchedulerClient(clients, [settings.rpc_address])
            return Scheduler(
                settings, app.state.scheduler, transport, client, admin, sockets, publisher, PolicySet(1, **policies)
            )

        yield run


@pytest.fixture
async def scheduler(start: Start) -> Scheduler:
    found: Scheduler = await start()
    return found
