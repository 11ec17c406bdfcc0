"""Scenarios of two monitors: the acting monitor is lost in one way or another, and the standby takes over."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.clusters import OPEN_PAIR, PAIR
from benchmarks.chaos.faults import kill
from benchmarks.chaos.framing import Part, ZmtpSplitter
from benchmarks.chaos.scenario import Scenario
from services.launcher import cluster_keys
from services.launcher.addresses import LEASE_S
from services.launcher.suite import until
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, PolyphaseError, Standby
from shared.runtime.wire_version import OURS
from shared.store.lease import ENDING
from shared.wire.broadcast import opened, sealed
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, Method, ResumeRequest
from shared.wire.rpc_client import RpcClient, RpcClients
from shared.wire.sockets import Sockets

TAKEN_OVER_S = 6.0  # the longest time on a busy machine; the report has the measured one
_POLL_S = 0.01
_WATCH_S = 0.03
_REPLAY_S = 0.3  # between two replays
_EPOCH_BYTES = 8  # behind the header of a broadcast


def _client(arena: Arena, name: str) -> MonitorClient:
    """A client of this monitor, whether it acts or not."""
    url = next(port.url for port in arena.ports if port.process == name and port.purpose == "http")
    return MonitorClient(url, token=cluster_keys.kept_token(arena.suite.data_dir))


async def _acts(arena: Arena, name: str) -> bool:
    """Whether this monitor acts, and knows all instances."""
    async with _client(arena, name) as monitor:
        try:
            return len(await monitor.call("GET", "/instances", timeout_s=0.5)) >= len(arena.roles.first)
        except PolyphaseError:
            return False


async def _is_standby(arena: Arena, name: str) -> bool:
    async with _client(arena, name) as monitor:
        try:
            await monitor.call("GET", "/instances", timeout_s=0.5)
        except Standby:
            return True
        except PolyphaseError:
            return False
    return False


async def _until_standby(arena: Arena, name: str, timeout_s: float = TAKEN_OVER_S) -> None:
    await until(partial(_is_standby, arena, name), timeout_s, f"{name} to stand by")


async def _require_acting(arena: Arena, name: str) -> None:
    assert await _acts(arena, name), f"{name} does not act any more"


async def _monitors(arena: Arena) -> tuple[str, str]:
    """The acting monitor and the standby. Raises DeadlineExceeded when no monitor acts."""
    acting: list[str] = []

    async def one_acts() -> bool:
        acting[:] = [name for name in arena.named("monitor") if await _acts(arena, name)]
        return len(acting) == 1

    await until(one_acts, TAKEN_OVER_S, "one monitor to act")
    return acting[0], next(name for name in arena.named("monitor") if name != acting[0])


async def _take_over(arena: Arena, lose: Callable[[str], object]) -> tuple[str, str]:
    """Lose the acting monitor, wait until the standby acts, and note the time; returns the old and the new one."""
    active, other = await _monitors(arena)
    began = time.monotonic()
    lose(active)
    await until(lambda: _acts(arena, other), TAKEN_OVER_S, f"{other} to take over", poll_s=_POLL_S)
    arena.notes.append(f"taken over in {time.monotonic() - began:.2f} s")
    return active, other


async def _kill(arena: Arena) -> None:
    active, _ = await _take_over(arena, arena.processes.kill)
    await _until_standby(arena, active, TAKEN_OVER_S * 3)


async def _freeze(arena: Arena) -> None:
    """When the old monitor wakes, it must become the standby."""
    active, other = await _take_over(arena, arena.processes.freeze)
    await asyncio.sleep(1.0)
    arena.processes.thaw()
    await _until_standby(arena, active)
    await _require_acting(arena, other)


async def _no_database(arena: Arena) -> None:
    """The database refuses the writes of the acting monitor alone."""
    active, _ = await _take_over(arena, arena.switches.read_only)
    arena.switches.writable(active)
    await _until_standby(arena, active)


async def _clock(arena: Arena) -> None:
    """Jumps of the clock must not end a monitor's term. Then the monitor dies."""
    active, other = await _monitors(arena)
    for offset_s in (3600.0, -3600.0):
        arena.switches.clock(offset_s, active)
        await asyncio.sleep(1.5)
        await _require_acting(arena, active)
    arena.switches.clock(-3600.0, other)
    await _take_over(arena, arena.processes.kill)


async def _both(arena: Arena) -> None:
    """Without a monitor schedulers use the last state that they received; the monitor that is back first acts."""
    await kill(lambda arena: arena.named("monitor"))(arena)
    await _monitors(arena)


async def _and_scheduler(arena: Arena) -> None:
    scheduler = arena.processes.kill(arena.named("scheduler")[0])
    await _take_over(arena, arena.processes.kill)
    await arena.processes.back(scheduler)


async def _flip_under_way(arena: Arena) -> None:
    """The new monitor does not know how the flip ended, and must give the instance work again."""
    flipping = asyncio.create_task(arena.roles.flip(arena.decode[0], force=True))
    await asyncio.sleep(0.1)
    await _take_over(arena, arena.processes.kill)
    await asyncio.gather(flipping, return_exceptions=True)
    await arena.roles.reset()


async def _answers_lost(arena: Arena) -> None:
    """Renewals of the lease are written and reported as failed; then writes are refused.

    What the monitor answers to operators must stay true.
    """
    active, other = await _monitors(arena)
    early, late = arena.decode[:2]
    async with _one_acts_at_a_time(arena):
        arena.switches.lose_answers(active)
        early_refusal = await _drain_by(arena, active, early)
        await _until_standby(arena, active)
        late_refusal = await _drain_by(arena, active, late)
        began = time.monotonic()
        arena.switches.read_only(active)
        await until(lambda: _acts(arena, other), TAKEN_OVER_S, f"{other} to take over", poll_s=_POLL_S)
        arena.notes.append(f"taken over {time.monotonic() - began:.2f} s after the database was out of its reach")
        await _require_true(arena, early, early_refusal)
        await _require_true(arena, late, late_refusal)
        arena.switches.writable(active)
        await _until_standby(arena, active)
        await asyncio.sleep(2 * LEASE_S)  # long enough for the old monitor to take the lease, if it could
    assert isinstance(late_refusal, Standby), f"a monitor without a lease answered a drain with {late_refusal!r}"
    await _require_acting(arena, other)
    await arena.roles.reset()


async def _drain_by(arena: Arena, monitor: str, instance: str) -> PolyphaseError | None:
    """Drain an instance through this monitor; returns its refusal, or None when it reports success."""
    async with _client(arena, monitor) as client:
        try:
            await client.drain(instance, timeout_s=TAKEN_OVER_S, who="chaos")
        except PolyphaseError as error:
            return error
    return None


async def _require_true(arena: Arena, instance: str, refusal: PolyphaseError | None) -> None:
    """The instance drains after a success, and does not after a Standby. Other errors leave it open."""
    if refusal is not None and not isinstance(refusal, Standby):
        return
    expected = InstanceState.DRAINING if refusal is None else InstanceState.READY

    async def holds() -> bool:
        return bool((await arena.suite.instances())[instance]["state"] == expected.value)

    await until(
        holds, TAKEN_OVER_S, f"a drain of {instance} answered with {refusal!r}: the instance to be {expected.value}"
    )


@asynccontextmanager
async def _one_acts_at_a_time(arena: Arena) -> AsyncIterator[None]:
    """Query both monitors all the time; raises AssertionError when one acts between two acts of the other.

    Within a lease's length no monitor can take the lease from the other and lose it again.
    """
    acts: list[tuple[float, float, str]] = []

    async def watch(name: str) -> None:
        while True:
            began = time.monotonic()
            if await _acts(arena, name):
                acts.append((began, time.monotonic(), name))
            await asyncio.sleep(_WATCH_S)

    watches = [asyncio.create_task(watch(name)) for name in arena.named("monitor")]
    try:
        yield
    finally:
        for each in watches:
            each.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
    for began, ended, name in acts:
        others = [(start, end) for start, end, other in acts if other != name]
        before = [start for start, end in others if began - LEASE_S < start and end < began]
        after = [end for start, end in others if ended < start and end < began + LEASE_S]
        if before and after and min(after) - max(before) < LEASE_S:
            raise AssertionError(f"{name} acted while the other monitor did")


async def _old_epochs(arena: Arena) -> None:
    """Broadcasts of a monitor that was replaced are replayed, and broadcasts of its successor under past epochs."""
    old = _epoch(arena)
    active, other = await _take_over(arena, arena.switches.read_only)
    arena.switches.writable(active)
    await _until_standby(arena, active)
    now = _epoch(arena)
    assert old < now, f"the epoch of the acting monitor fell from {old} to {now}"
    replayed = sum(wire.proxy.replay() for wire in arena.wires.between(target=active, purpose="broadcasts"))
    forged = 0
    for epoch in (0, 1, old):
        changed = partial(of_epoch, epoch=epoch)
        wires = arena.wires.between(target=other, purpose="broadcasts")
        forged += sum(wire.proxy.replay(changed=changed) for wire in wires)
        await asyncio.sleep(_REPLAY_S)
    if not replayed or not forged:
        raise AssertionError("nothing was replayed: the scenario shows nothing")
    sockets = Sockets()
    try:
        with RpcClients(sockets) as clients:
            for port in arena.ports_for("worker", "rpc"):
                role = arena.roles.first[port.process].other
                await _require_obeys_no_other(clients.to(port.url), port.process, role, old, now)
    finally:
        sockets.close()
    found = await arena.suite.instances()
    wrong = [name for name, role in arena.roles.first.items() if found[name]["role"] != role.value]
    assert not wrong, f"instances with another role than before: {', '.join(wrong)}"
    await arena.roles.ready(*arena.roles.first)
    await _require_acting(arena, other)
    arena.notes.append(f"{replayed} broadcasts replayed, {forged} under another epoch")


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
    parts = [part for part in ZmtpSplitter(0).feed(message)[1] if isinstance(part, Part)]
    body = opened(parts[-1].body) if len(parts) == 2 else None
    if body is None or body[: len(OURS.header)] != OURS.header:
        return message
    changed = sealed(OURS.header + epoch.to_bytes(_EPOCH_BYTES, "big") + body[len(OURS.header) + _EPOCH_BYTES :])
    return parts[0].encode() + Part(parts[1].flags, changed).encode()


def _epoch(arena: Arena) -> int:
    """The epoch of the monitor that has the lease."""
    file = f"file:{arena.database.file}{ENDING}?mode=ro"
    with closing(sqlite3.connect(file, uri=True, timeout=TAKEN_OVER_S)) as connection:
        return int(connection.execute("SELECT epoch FROM leases").fetchone()[0])


FAILOVER = (
    Scenario("monitor-failover-kill", "kill -9 of the monitor that acts", _kill, PAIR),
    Scenario("monitor-failover-freeze", "the monitor that acts stands still, and wakes", _freeze, PAIR),
    Scenario("monitor-failover-unwritable", "the monitor that acts cannot write to its database", _no_database, PAIR),
    Scenario("monitor-failover-clock", "its clock jumps an hour ahead and behind; then it is killed", _clock, PAIR),
    Scenario("monitor-failover-both", "kill -9 of both monitors at once", _both, PAIR),
    Scenario("monitor-failover-scheduler", "kill -9 of it and of a scheduler at once", _and_scheduler, PAIR),
    Scenario(
        "lease-answers-lost",
        "renewals of its lease are written unanswered, then refused",
        _answers_lost,
        PAIR,
        bound_s=60.0,
    ),
    Scenario("old-epochs", "broadcasts and orders of epoch 0 and of past epochs are replayed", _old_epochs, OPEN_PAIR),
    Scenario("monitor-failover-flip", "kill -9 of it while it flips an instance", _flip_under_way, PAIR, bound_s=60.0),
)
