"""Scenarios of two monitors: the acting monitor is lost in one way or another, and the standby takes over."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial

from benchmarks.chaos.garbage import rpc_clients
from benchmarks.chaos.inject.sitecustomize import LOST, READ_ONLY
from benchmarks.chaos.proxy import Piece, ZmtpSplitter
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import OPEN_PAIR, PAIR
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.suite import background, until_found
from services.launcher import cluster_keys
from services.launcher.addresses import LEASE_S
from services.launcher.suite import until
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, PolyphaseError, Standby
from shared.runtime.wire_version import OURS
from shared.store.lease import ENDING
from shared.wire.api.monitor import InstanceRow
from shared.wire.broadcast import opened, sealed
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, Method, ResumeRequest
from shared.wire.rpc_client import RpcClient

TAKEN_OVER_S = 6.0  # the longest time on a busy machine; the report has the measured one
_POLL_S = 0.01
_WATCH_S = 0.03
_REPLAY_S = 0.3  # between two replays
_EPOCH_BYTES = 8  # behind the header of a broadcast

failover = partial(scenario, "failover", bed=PAIR)


def _client(suite: SuiteUnderTest, name: str) -> MonitorClient:
    url = next(port.url for port in suite.ports if port.process == name and port.purpose == "http")
    return MonitorClient(url, token=cluster_keys.kept_token(suite.data_dir))


async def _instances(suite: SuiteUnderTest, name: str) -> int | PolyphaseError:
    """How many instances this monitor lists, or its error, which is Standby when it does not act."""
    async with _client(suite, name) as monitor:
        try:
            return len(await monitor.get("/instances", list[InstanceRow], timeout_s=0.5))
        except PolyphaseError as error:
            return error


async def _acts(suite: SuiteUnderTest, name: str) -> bool:
    """Whether this monitor acts, and knows all instances."""
    found = await _instances(suite, name)
    return isinstance(found, int) and found >= len(suite.roles)


async def _until_standby(suite: SuiteUnderTest, name: str, timeout_s: float = TAKEN_OVER_S) -> None:
    async def is_standby() -> bool:
        return isinstance(await _instances(suite, name), Standby)

    await until(is_standby, timeout_s, f"{name} to stand by")


async def _require_acting(suite: SuiteUnderTest, name: str) -> None:
    assert await _acts(suite, name), f"{name} does not act any more"


async def _monitors(suite: SuiteUnderTest) -> tuple[str, str]:
    """The acting monitor and the standby. Raises DeadlineExceeded when no monitor acts."""

    async def find() -> tuple[str, str] | None:
        first, second = suite.named("monitor")
        match await _acts(suite, first), await _acts(suite, second):
            case True, False:
                return first, second
            case False, True:
                return second, first
        return None

    return await until_found(find, TAKEN_OVER_S, "one monitor to act")


async def _take_over(suite: SuiteUnderTest, lose: Callable[[str], object]) -> tuple[str, str]:
    """Lose the acting monitor, wait until the standby acts, and note the time; returns the old and the new one."""
    active, other = await _monitors(suite)
    began = time.monotonic()
    lose(active)
    await until(lambda: _acts(suite, other), TAKEN_OVER_S, f"{other} to take over", poll_s=_POLL_S)
    suite.notes.append(f"taken over in {time.monotonic() - began:.2f} s")
    return active, other


@failover("monitor-failover-kill", "kill -9 of the monitor that acts")
async def _kill(suite: SuiteUnderTest) -> None:
    active, _ = await _take_over(suite, suite.processes.kill)
    await _until_standby(suite, active, TAKEN_OVER_S * 3)


@failover("monitor-failover-freeze", "the monitor that acts stands still, and wakes")
async def _freeze(suite: SuiteUnderTest) -> None:
    active, other = await _take_over(suite, suite.processes.freeze)
    await asyncio.sleep(1.0)
    suite.processes.thaw()
    await _until_standby(suite, active)
    await _require_acting(suite, other)


@failover("monitor-failover-unwritable", "the monitor that acts cannot write to its database")
async def _no_database(suite: SuiteUnderTest) -> None:
    active, _ = await _take_over(suite, partial(suite.switches.database, READ_ONLY))
    suite.switches.database(0, active)
    await _until_standby(suite, active)


@failover("monitor-failover-clock", "its clock jumps an hour ahead and behind; then it is killed")
async def _clock(suite: SuiteUnderTest) -> None:
    """Jumps of the clock must not end a monitor's term. Then the monitor dies."""
    active, other = await _monitors(suite)
    for offset_s in (3600.0, -3600.0):
        suite.switches.clock(offset_s, active)
        await asyncio.sleep(1.5)
        await _require_acting(suite, active)
    suite.switches.clock(-3600.0, other)
    await _take_over(suite, suite.processes.kill)


@failover("monitor-failover-both", "kill -9 of both monitors at once")
async def _both(suite: SuiteUnderTest) -> None:
    """Without a monitor schedulers use the last state that they received; the monitor that is back first acts."""
    await suite.kill_until_back(*suite.named("monitor"))
    await _monitors(suite)


@failover("monitor-failover-scheduler", "kill -9 of it and of a scheduler at once")
async def _and_scheduler(suite: SuiteUnderTest) -> None:
    scheduler = suite.processes.kill(suite.named("scheduler")[0])
    await _take_over(suite, suite.processes.kill)
    await suite.processes.back(scheduler)


@failover("lease-answers-lost", "renewals of its lease are written unanswered, then refused", bound_s=60.0)
async def _answers_lost(suite: SuiteUnderTest) -> None:
    """Renewals of the lease are written and reported as failed; then writes are refused.

    What the monitor answers to operators must stay true.
    """
    active, other = await _monitors(suite)
    early, late = suite.decode[:2]
    async with _one_acts_at_a_time(suite):
        suite.switches.database(LOST, active)
        early_refusal = await _drain_by(suite, active, early)
        await _until_standby(suite, active)
        late_refusal = await _drain_by(suite, active, late)
        began = time.monotonic()
        suite.switches.database(READ_ONLY, active)
        await until(lambda: _acts(suite, other), TAKEN_OVER_S, f"{other} to take over", poll_s=_POLL_S)
        suite.notes.append(f"taken over {time.monotonic() - began:.2f} s after the database was out of its reach")
        await _require_true(suite, early, early_refusal)
        await _require_true(suite, late, late_refusal)
        suite.switches.database(0, active)
        await _until_standby(suite, active)
        await asyncio.sleep(2 * LEASE_S)  # long enough for the old monitor to take the lease, if it could
    assert isinstance(late_refusal, Standby), f"a monitor without a lease answered a drain with {late_refusal!r}"
    await _require_acting(suite, other)
    await suite.reset_roles()


async def _drain_by(suite: SuiteUnderTest, monitor: str, instance: str) -> PolyphaseError | None:
    """Drain an instance through this monitor; returns its refusal, or None when it reports success."""
    async with _client(suite, monitor) as client:
        try:
            await client.drain(instance, timeout_s=TAKEN_OVER_S, who="chaos")
        except PolyphaseError as error:
            return error
    return None


async def _require_true(suite: SuiteUnderTest, instance: str, refusal: PolyphaseError | None) -> None:
    """The instance drains after a success, and does not after a Standby. Other errors leave it open."""
    if refusal is not None and not isinstance(refusal, Standby):
        return
    expected = InstanceState.DRAINING if refusal is None else InstanceState.READY

    async def holds() -> bool:
        return bool((await suite.instances())[instance].state == expected.value)

    await until(
        holds, TAKEN_OVER_S, f"a drain of {instance} answered with {refusal!r}: the instance to be {expected.value}"
    )


@asynccontextmanager
async def _one_acts_at_a_time(suite: SuiteUnderTest) -> AsyncIterator[None]:
    """Query both monitors all the time; raises AssertionError when one acts between two acts of the other.

    Within a lease's length no monitor can take the lease from the other and lose it again.
    """
    acts: list[tuple[float, float, str]] = []

    async def watch(name: str) -> None:
        while True:
            began = time.monotonic()
            if await _acts(suite, name):
                acts.append((began, time.monotonic(), name))
            await asyncio.sleep(_WATCH_S)

    async with background(*map(watch, suite.named("monitor"))):
        yield
    for began, ended, name in acts:
        others = [(start, end) for start, end, other in acts if other != name]
        before = [start for start, end in others if began - LEASE_S < start and end < began]
        after = [end for start, end in others if ended < start and end < began + LEASE_S]
        both = before and after and min(after) - max(before) < LEASE_S
        assert not both, f"{name} acted while the other monitor did"


@failover("old-epochs", "broadcasts and orders of epoch 0 and of past epochs are replayed", bed=OPEN_PAIR)
async def _old_epochs(suite: SuiteUnderTest) -> None:
    """Broadcasts of a monitor that was replaced are replayed, and broadcasts of its successor under past epochs."""
    old = _epoch(suite)
    active, other = await _take_over(suite, partial(suite.switches.database, READ_ONLY))
    suite.switches.database(0, active)
    await _until_standby(suite, active)
    now = _epoch(suite)
    assert old < now, f"the epoch of the acting monitor fell from {old} to {now}"
    replayed = sum(wire.proxy.replay() for wire in suite.wires.between("", active, "broadcasts"))
    forged = 0
    for epoch in (0, 1, old):
        changed = partial(of_epoch, epoch=epoch)
        wires = suite.wires.between("", other, "broadcasts")
        forged += sum(wire.proxy.replay(changed=changed) for wire in wires)
        await asyncio.sleep(_REPLAY_S)
    assert min(replayed, forged), "nothing was replayed: the scenario shows nothing"
    with rpc_clients() as clients:
        for port in suite.ports_for("worker", "rpc"):
            role = suite.roles[port.process].other
            await _require_obeys_no_other(clients.to(port.url), port.process, role, old, now)
    found = await suite.instances()
    wrong = [name for name, role in suite.roles.items() if found[name].role != role.value]
    assert not wrong, f"instances with another role than before: {', '.join(wrong)}"
    await suite.until_ready()
    await _require_acting(suite, other)
    suite.notes.append(f"{replayed} broadcasts replayed, {forged} under another epoch")


async def _require_obeys_no_other(client: RpcClient, name: str, role: Role, old: int, now: int) -> None:
    """The instance refuses orders of past epochs, also after an order of epoch 0, and obeys the present one."""

    async def refused(method: Method, order: DrainRequest | FlipRequest | ResumeRequest) -> None:  # type: ignore[type-arg]
        try:
            await client.call(method, order, timeout_s=TAKEN_OVER_S)
        except Conflict:
            return
        raise AssertionError(f"{name} carries out {method.name} {order}; the monitor that acts has epoch {now}")

    for epoch in (1, old):
        await refused(DRAIN, DrainRequest(0.0, epoch))
        await refused(FLIP, FlipRequest(role, epoch))
        await refused(RESUME, ResumeRequest(epoch))
    await refused(FLIP, FlipRequest(role, 0))  # epoch 0 is of a single monitor, which has to drain first
    await client.call(RESUME, ResumeRequest(0), timeout_s=TAKEN_OVER_S)
    await refused(DRAIN, DrainRequest(0.0, old))
    await client.call(RESUME, ResumeRequest(now), timeout_s=TAKEN_OVER_S)


def of_epoch(message: bytes, epoch: int) -> bytes:
    """The same broadcast under another epoch; other messages stay as they are."""
    pieces = ZmtpSplitter(0).feed(message)
    body = opened(pieces[-1].body) if len(pieces) == 2 else None
    if body is None or body[: len(OURS.header)] != OURS.header:
        return message
    changed = sealed(OURS.header + epoch.to_bytes(_EPOCH_BYTES, "big") + body[len(OURS.header) + _EPOCH_BYTES :])
    return pieces[0].encode() + Piece(pieces[1].head, changed).encode()


def _epoch(suite: SuiteUnderTest) -> int:
    file = f"file:{suite.database.file}{ENDING}?mode=ro"
    with closing(sqlite3.connect(file, uri=True, timeout=TAKEN_OVER_S)) as connection:
        return int(connection.execute("SELECT epoch FROM leases").fetchone()[0])


@failover("monitor-failover-flip", "kill -9 of it while it flips an instance", bound_s=60.0)
async def _flip_under_way(suite: SuiteUnderTest) -> None:
    """The new monitor does not know how the flip ended, and must give the instance work again."""
    flipping = asyncio.create_task(suite.flip(suite.decode[0], force=True))
    await asyncio.sleep(0.1)
    await _take_over(suite, suite.processes.kill)
    await asyncio.gather(flipping, return_exceptions=True)
    await suite.reset_roles()
