"""A real monitor over HTTP, fake workers that die as tests want, and the planner beside them."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.cluster_monitor.app import create_app as monitor_app
from services.cluster_monitor.settings import MonitorSettings
from services.planner.app import create_app
from services.planner.routes import State
from services.planner.settings import PlannerSettings
from shared.domain.demand import DemandSecond
from shared.domain.instance import Role
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates
from shared.wire.api import SchedulerNews
from shared.wire.api.planner import Proposal
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.planner import PlannerClient
from tests.ports import free_address, free_port
from tests.services.control_plane import running, sqlite, until
from tests.services.fake_worker import FakeWorker, fake_worker, make_info
from tests.services.live_suite import serving

FORM = StepForm(0.01, 1e-4, 0.0, 1e-3)
KNOWN = Rates(step=StepRates(FORM, FORM, FORM), link=LinkRate(1e9))
LONG, SHORT = (1500.0, 10.0), (100.0, 150.0)  # prompt and output tokens


def asked(count: int, rate: int, lengths: tuple[float, float]) -> list[DemandSecond]:
    """What one scheduler tells of the last so many seconds, `rate` requests in each."""
    n, last, (prompt, output) = rate, int(time.time()), lengths
    sums = {
        "prompt_tokens": n * prompt,
        "fresh_tokens": n * prompt,
        "fresh_squares": n * prompt * prompt,
        "prompt_logs": n * log(prompt),
        "prompt_log_squares": n * log(prompt) ** 2,
        "output_tokens": n * output,
        "per_ttft": n * 1.0,
        "per_tpot": n * 20.0,
        "split_least": n * 1.0,
        "split_most": n * 1.0,
    }
    return [DemandSecond("s0", last - at, n, **sums) for at in range(count, 0, -1)]


@dataclass
class Watched:
    """The monitor's client, the planner's client and insides, and the workers by name."""

    monitor: MonitorClient
    client: PlannerClient
    state: State
    settings: MonitorSettings
    stack: AsyncExitStack
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    lives: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def start(self, name: str, role: Role) -> FakeWorker:
        life = await self.stack.enter_async_context(AsyncExitStack())
        info = msgspec.structs.replace(make_info(name, free_address()), rates=KNOWN)
        worker = await life.enter_async_context(fake_worker(info, role, self.settings.heartbeat_address, self.monitor))
        worker.rates = KNOWN
        self.workers[name], self.lives[name] = worker, life
        return worker

    async def start_all(self, roles: str) -> None:
        """One a letter, p or d, named by it and its position; ends when the planner knows them to be ready."""
        for at, letter in enumerate(roles):
            await self.start(f"{letter}{at}", Role.PREFILL if letter == "p" else Role.DECODE)
        await until(lambda: self.ready() == len(roles), "the planner knows all to be ready", 20.0)

    def ready(self) -> int:
        view = self.state.watch.view
        return sum(one.state.value == "ready" for one in view.instances) if view is not None else 0

    async def kill(self, name: str) -> None:
        """A sudden death."""
        await self.lives[name].aclose()

    async def ask(self, count: int, rate: int, lengths: tuple[float, float]) -> None:
        """Clients ask for that; ends when the planner knows."""
        await self.monitor.scheduler_news("s0", SchedulerNews(0, demand=asked(count, rate, lengths)))
        await until(lambda: self.state.watch.demand is not None, "a profile", 20.0)

    async def proposal(self, *states: str, timeout_s: float = 20.0) -> Proposal:
        """The newest once it is in one of these states."""

        async def found() -> Any:
            told = await self.client.proposals()
            return told[0] if told and told[0].state in states else None

        one: Proposal = await until(found, f"a proposal {states}", timeout_s)
        return one


Watching = Callable[..., Any]


@pytest.fixture
async def watching(tmp_path: Path) -> AsyncIterator[Watching]:
    """Starts all of it; the planner's settings by keyword. A second call is the planner's next life."""
    async with AsyncExitStack() as stack:
        known: list[Watched] = []

        async def monitor() -> tuple[MonitorClient, MonitorSettings]:
            settings = MonitorSettings(
                heartbeat_address=free_address(),
                broadcast_address=free_address(),
                database_url=sqlite(tmp_path),
                quiet_start_s=0.3,
                silence_s=20.0,  # the workers are on the monitor's loop: while it stalls they cannot beat
            )
            port = free_port()
            await stack.enter_async_context(serving(monitor_app(settings), port))
            return await stack.enter_async_context(MonitorClient(f"http://127.0.0.1:{port}")), settings

        async def run(**changes: Any) -> Watched:
            client, settings = (known[0].monitor, known[0].settings) if known else await monitor()
            wanted = {"monitor_url": client.base_url, "step_s": 0.05, "review_s": 300.0, **changes}
            planner = PlannerSettings(
                broadcast_address=settings.broadcast_address, database_url=sqlite(tmp_path), **wanted
            )
            app = create_app(planner)
            life = await stack.enter_async_context(AsyncExitStack())
            transport = await life.enter_async_context(running(app))
            asks = await life.enter_async_context(PlannerClient("http://planner", transport=transport))
            found = Watched(client, asks, app.state.planner, settings, stack)
            found.lives["planner"] = life
            known.append(found)
            return found

        yield run
