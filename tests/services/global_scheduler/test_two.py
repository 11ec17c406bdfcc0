"""Two schedulers and two gateways: a job's reports go where it was placed, and whichever is lost loses nothing."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select

from gateway import reports
from services.global_scheduler import app as scheduler_app
from services.global_scheduler.settings import SchedulerSettings
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.job import LOST
from shared.domain.policies import PolicySet
from shared.domain.route import PolicySpec
from shared.errors import PolyphaseError
from shared.store.database import open_engine
from shared.store.migrate import migrate
from shared.store.retention import ABANDONED_S
from shared.store.tables import requests
from shared.wire.clients.scheduler import SchedulerAdmin
from shared.wire.sockets import Sockets
from tests.ports import free_address, free_port
from tests.services.control_plane import Announcer, sqlite, until
from tests.services.fake_worker import make_info
from tests.services.global_scheduler.conftest import Scheduler, Start
from tests.services.global_scheduler.gateways import Gateway, gateway
from tests.shared.store.rows import request_row

ROOT = Path(__file__).parents[3]
CLUSTER = {"d0": Role.DECODE, "d1": Role.DECODE}
COUNTED = {"placement": PolicySpec("workload", {"penalty": "linear"})}  # keeps a ledger


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REFRESH_S", 0.2)
    monkeypatch.setattr(scheduler_app, "SWEEP_S", 0.1)


async def _pair(start: Start, **changes: Any) -> tuple[Scheduler, Scheduler]:
    wanted = {**COUNTED, "lost_after_s": 4.0, **changes}  # a busy machine stalls for a second
    found = [await start(scheduler_id=f"s{number}", **wanted) for number in range(2)]
    for one in found:
        await one.hear(**CLUSTER)
    return found[0], found[1]


async def _phases(scheduler: Scheduler) -> dict[str, str]:
    return {row.job_id: row.phase for row in await scheduler.admin.requests(limit=1000)}


async def test_each_job_is_told_to_the_one_that_placed_it_and_its_work_is_settled(start: Start) -> None:
    first, second = await _pair(start)
    addresses = (first.settings.rpc_address, second.settings.rpc_address)
    with gateway(*addresses) as one, gateway(*addresses) as other:
        for each, name in ((one, "a"), (other, "b")):
            await each.connected(*addresses)
            await each.begin(*(f"{name}{n}" for n in range(20)))
        tables = [await _phases(scheduler) for scheduler in (first, second)]
        assert all(len(table) >= 15 for table in tables)  # in turn
        assert not tables[0].keys() & tables[1].keys()
        assert [len(s.state.placer.decider.ledger) for s in (first, second)] == [len(table) for table in tables]
        for each in (one, other):
            await each.finish(*list(each.jobs))
    after = [await _phases(scheduler) for scheduler in (first, second)]
    assert [set(table.values()) for table in after] == [{"completed"}, {"completed"}]
    assert [table.keys() for table in after] == [table.keys() for table in tables]
    assert [len(s.state.placer.decider.ledger) for s in (first, second)] == [0, 0]


async def test_a_job_that_is_placed_again_stays_with_its_scheduler(start: Start) -> None:
    first, second = await _pair(start)
    addresses = (first.settings.rpc_address, second.settings.rpc_address)
    with gateway(*addresses) as one:
        await one.connected(*addresses)
        await one.begin("j")
        for _ in range(3):
            await one.schedulers.place(one.jobs["j"].view(), timeout_s=5)
        assert sorted(len(s.state.placer.decider.ledger) for s in (first, second)) == [0, 1]


async def test_a_gateway_that_is_killed_leaves_no_open_job(start: Start) -> None:
    first, second = await _pair(start)
    addresses = [first.settings.rpc_address, second.settings.rpc_address]
    script = str(ROOT / "tests/services/global_scheduler/gateway_process.py")
    victim = await asyncio.create_subprocess_exec(
        sys.executable, script, *addresses, "--", "a", "b", "c", "d", env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    with gateway(*addresses) as living:
        await living.connected(*addresses)
        await living.begin("mine-0", "mine-1")

        async def all_open() -> bool:
            assert victim.returncode is None
            await living.reporter.flush()
            return set("abcd") <= {**await _phases(first), **await _phases(second)}.keys()

        try:
            await until(all_open, "the victim's jobs are open", timeout_s=120)
        finally:
            victim.kill()
            await victim.wait()

        async def settled() -> bool:
            await living.reporter.flush()
            seen = {**await _phases(first), **await _phases(second)}
            return all(seen[job_id] == "failed" for job_id in "abcd")

        await until(settled, "the victim's jobs are lost", timeout_s=30)
        both = {**await _phases(first), **await _phases(second)}
        assert {both["mine-0"], both["mine-1"]} == {"decode"}
        assert sum(len(s.state.placer.decider.ledger) for s in (first, second)) == 2

        async def stored() -> bool:
            rows = await _rows(first.settings.database_url)
            return all(rows.get(job_id, ("",))[0] == "failed" for job_id in "abcd")

        await until(stored, "the rows are lost, too", timeout_s=30)
        rows = await _rows(first.settings.database_url)
        assert {rows[job_id][1] for job_id in "abcd"} == {LOST}
        assert rows["mine-0"][0] == "decode"


async def test_a_job_thought_lost_is_believed_when_it_speaks_again(start: Start) -> None:
    """A gateway that hung longer than `lost_after_s`."""
    scheduler: Scheduler = await start(**COUNTED, lost_after_s=0.3)
    await scheduler.hear(**CLUSTER)
    with gateway(scheduler.settings.rpc_address) as one:
        await one.begin("j")

        async def lost() -> bool:
            return (await scheduler.admin.request("j")).outcome == LOST

        await until(lost, "silence is taken for loss")
        await one.finish("j")
        assert (await scheduler.admin.request("j")).phase == "completed"

        async def stored() -> bool:
            return (await _rows(scheduler.settings.database_url)).get("j", ("",))[0] == "completed"

        await until(stored, "and the row says so", timeout_s=30)


async def test_what_a_former_life_left_open_is_lost_once_nobody_told_of_it(start: Start, tmp_path: Path) -> None:
    engine = open_engine(sqlite(tmp_path))
    await migrate(engine)
    now = time.time()
    left = [
        request_row("old", scheduler_id="s0", phase="decode", arrived_s=now, updated_s=now - 1.0),
        request_row("theirs", scheduler_id="s1", arrived_s=now, updated_s=now - 1.0),
        request_row("of one that is no more", scheduler_id="s2", arrived_s=now, updated_s=now - 2 * ABANDONED_S),
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(requests), left)
    await engine.dispose()
    scheduler: Scheduler = await start(scheduler_id="s0", lost_after_s=0.3)

    async def closed() -> bool:
        rows = await _rows(scheduler.settings.database_url)
        return rows["old"] == rows["of one that is no more"] == ("failed", LOST)

    await until(closed, "the rows are closed", timeout_s=30)
    assert (await _rows(scheduler.settings.database_url))["theirs"] == ("queued", "")


async def _rows(url: str) -> dict[str, tuple[str, str]]:
    engine = open_engine(url)
    try:
        async with engine.connect() as connection:
            found = await connection.execute(select(requests.c.job_id, requests.c.phase, requests.c.outcome))
            return {job_id: (phase, outcome) for job_id, phase, outcome in found}
    finally:
        await engine.dispose()


class Processes:
    """Two real scheduler processes on one database, and the broadcast they hear."""

    def __init__(self, settings: list[SchedulerSettings], publisher: Announcer) -> None:
        self.settings = settings
        self.running: list[asyncio.subprocess.Process] = []
        self._publisher = publisher
        self._sequence = 0

    async def start(self) -> None:
        for one in self.settings:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **one.to_environment()}
            command = (sys.executable, "-m", "services.global_scheduler")
            self.running.append(
                await asyncio.create_subprocess_exec(
                    *command, cwd=ROOT, env=environment, stderr=asyncio.subprocess.DEVNULL
                )
            )

    def broadcast(self) -> None:
        self._sequence += 1
        load = InstanceLoad(time_s=time.time(), free_blocks=900, inflight=1)
        views = (
            InstanceView(make_info(name, "tcp://127.0.0.1:9"), role, InstanceState.READY, load)
            for name, role in CLUSTER.items()
        )
        self._publisher.publish(ClusterView(self._sequence, time.time(), tuple(views), PolicySet(1, **COUNTED)))

    def admin(self, number: int) -> SchedulerAdmin:
        return SchedulerAdmin(f"http://127.0.0.1:{self.settings[number].http_port}")

    async def begin(self, each: Gateway, *job_ids: str) -> None:
        """Jobs on both schedulers, once both have a broadcast."""
        addresses = [one.rpc_address for one in self.settings]
        await until(lambda: all(each.clients.to(a).connected for a in addresses), "both up", timeout_s=120)

        async def placed() -> bool:
            self.broadcast()
            try:
                for _ in addresses:
                    await each.begin(f"probe-{self._sequence}-{_}")
            except PolyphaseError:
                return False
            return True

        await until(placed, "both heard a broadcast", timeout_s=30)
        await each.begin(*job_ids)


@asynccontextmanager
async def _processes(tmp_path: Path) -> AsyncIterator[Processes]:
    url, broadcast = sqlite(tmp_path), free_address()
    engine = open_engine(url)
    await migrate(engine)
    await engine.dispose()
    settings = [
        SchedulerSettings(
            scheduler_id=f"s{number}",
            http_port=free_port(),
            rpc_address=free_address(),
            broadcast_address=broadcast,
            database_url=url,
            monitor_url="",
            lost_after_s=4.0,
        )
        for number in range(2)
    ]
    async with AsyncExitStack() as stack:
        sockets = Sockets()
        stack.callback(sockets.close)
        publisher = Announcer(sockets, broadcast)
        stack.callback(publisher.close)
        found = Processes(settings, publisher)
        try:
            await found.start()
            yield found
        finally:
            for process in found.running:
                if process.returncode is None:
                    process.kill()
                await process.wait()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_whichever_scheduler_is_lost_no_job_is(tmp_path: Path, victim: int, how: signal.Signals) -> None:
    async with _processes(tmp_path) as schedulers:
        addresses = [one.rpc_address for one in schedulers.settings]
        with gateway(*addresses) as one, gateway(*addresses) as other:
            for each, name in ((one, "a"), (other, "b")):
                await schedulers.begin(each, *(f"{name}{n}" for n in range(6)))
            schedulers.running[victim].send_signal(how)
            gone = addresses[victim]
            await until(lambda: not one.clients.to(gone).connected and not other.clients.to(gone).connected, "noticed")
            wanted = {*one.jobs, *other.jobs}
            for each in (one, other):
                await each.begin("new-" + ("a" if each is one else "b"))
                wanted |= each.jobs.keys()
                await each.finish(*list(each.jobs))

            async def stored() -> bool:
                rows = await _rows(schedulers.settings[0].database_url)
                return all(rows.get(job_id, ("",))[0] == "completed" for job_id in wanted)

            if how is signal.SIGSTOP:  # frozen in the midst of a write it holds SQLite's lock until it thaws
                schedulers.running[victim].send_signal(signal.SIGCONT)
                await _forgets(schedulers, victim, one, other)
            await until(stored, "every job's end is in the database", timeout_s=60)


async def _forgets(schedulers: Processes, victim: int, *gateways: Gateway) -> None:
    """A scheduler that thawed has no open job left that others took over, and calls none of them lost."""
    async with schedulers.admin(victim) as admin:

        async def nothing_open() -> bool:
            for each in gateways:
                await each.reporter.flush()
            return {row.phase for row in await admin.requests(limit=1000)} <= {"completed"}

        await until(nothing_open, "no ghost", timeout_s=60)
