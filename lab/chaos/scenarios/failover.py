"""Two monitors of which one acts: it is lost in one way or another, and the other one takes over."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial

from lab.chaos.arena import Arena
from lab.chaos.clusters import OPEN_PAIR, PAIR
from lab.chaos.framing import Part, ZmtpSplitter
from lab.chaos.scenario import Scenario
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

TAKEN_OVER_S = 6.0  # the longest on a busy machine; what it took is told
_POLL_S = 0.01
_WATCH_S = 0.03
_REPLAY_S = 0.3  # between two replays
_EPOCH_BYTES = 8  # behind the header of a broadcast


async def _acts(arena: Arena, name: str) -> bool:
    """Whether that monitor acts, and tells of every instance."""
    async with _client(arena, name) as monitor:
        try:
            return len(await monitor.call("GET", "/instances", timeout_s=0.5)) >= len(arena.roles.first)
        except PolyphaseError:
            return False


def _client(arena: Arena, name: str) -> MonitorClient:
    """Of that monitor, whichever acts."""
    url = next(f"http://{p.host}:{p.port}" for p in arena.ports if p.process == name and p.purpose == "http")
    return MonitorClient(url, token=cluster_keys.kept_token(arena.suite.data_dir))


async def _who(arena: Arena) -> tuple[str, str]:
    """The monitor that acts, and the one that stands by. Raises DeadlineExceeded when nobody acts."""
    found: list[str] = []

    async def one() -> bool:
        found[:] = [name for name in arena.named("monitor") if await _acts(arena, name)]
        return len(found) == 1

    await until(one, TAKEN_OVER_S, "one monitor to act")
    return found[0], next(name for name in arena.named("monitor") if name != found[0])


async def _lose(arena: Arena, lose: Callable[[str], Awaitable[object] | object]) -> tuple[str, str]:
    """Take the one that acts away, wait for the other, and tell how long that took; who acted, and who does now."""
    active, other = await _who(arena)
    began = time.monotonic()
    done = lose(active)
    if isinstance(done, Awaitable):
        await done
    await until(lambda: _acts(arena, other), TAKEN_OVER_S, f"{other} to take over", poll_s=_POLL_S)
    arena.notes.append(f"taken over in {time.monotonic() - began:.2f} s")
    return active, other


async def _kill(arena: Arena) -> None:
    active, _ = await _lose(arena, arena.processes.kill)
    await until(lambda: _stands_by(arena, active), TAKEN_OVER_S * 3, f"{active} to stand by")


async def _freeze(arena: Arena) -> None:
    """It wakes, is not the one that acts, and says so; no two act."""
    active, other = await _lose(arena, arena.processes.freeze)
    await asyncio.sleep(1.0)
    arena.processes.thaw()
    await until(lambda: _stands_by(arena, active), TAKEN_OVER_S, f"{active} to stand by")
    assert await _acts(arena, other), f"{other} has stopped to act"


async def _no_database(arena: Arena) -> None:
    """The database refuses whatever the one that acts writes, and no other one's."""
    active, _ = await _lose(arena, arena.switches.read_only)
    arena.switches.writable(active)
    await until(lambda: _stands_by(arena, active), TAKEN_OVER_S, f"{active} to stand by")


async def _clock(arena: Arena) -> None:
    """Its clock jumps, which nobody takes for a reason to change; then it dies."""
    active, other = await _who(arena)
    for offset_s in (3600.0, -3600.0):
        arena.switches.clock(offset_s, active)
        await asyncio.sleep(1.5)
        assert await _acts(arena, active), f"{active} has stopped to act"
    arena.switches.clock(-3600.0, other)
    await _lose(arena, arena.processes.kill)


async def _both(arena: Arena) -> None:
    """With nobody left schedulers go by what they heard last; whoever is back first acts."""
    await arena.processes.back(arena.processes.kill(*arena.named("monitor")))
    await _who(arena)


async def _and_scheduler(arena: Arena) -> None:
    """And a scheduler at the same time."""
    scheduler = arena.processes.kill(arena.named("scheduler")[0])
    await _lose(arena, arena.processes.kill)
    await arena.processes.back(scheduler)


async def _flip_under_way(arena: Arena) -> None:
    """It is told as unknown, by whoever acts then; the instance is given work again."""
    name = arena.decode[0]
    asked = asyncio.create_task(arena.roles.flip(name, force=True))
    await asyncio.sleep(0.1)
    await _lose(arena, arena.processes.kill)
    await asyncio.gather(asked, return_exceptions=True)
    await arena.roles.as_first()


async def _answers_lost(arena: Arena) -> None:
    """Its renewals are written and it does not learn so; then it can write no more. What it answers stays true."""
    active, other = await _who(arena)
    early, late = arena.decode[:2]
    async with _never_two(arena):
        arena.switches.lose_answers(active)
        asked_early = await _drained_by(arena, active, early)
        await until(partial(_stands_by, arena, active), TAKEN_OVER_S, f"{active} to stop")
        asked_late = await _drained_by(arena, active, late)
        began = time.monotonic()
        arena.switches.read_only(active)
        await until(lambda: _acts(arena, other), TAKEN_OVER_S, f"{other} to take over", poll_s=_POLL_S)
        arena.notes.append(f"taken over {time.monotonic() - began:.2f} s after the database was out of its reach")
        await _is_true(arena, early, asked_early)
        await _is_true(arena, late, asked_late)
        arena.switches.writable(active)
        await until(lambda: _stands_by(arena, active), TAKEN_OVER_S, f"{active} to stand by")
        await asyncio.sleep(2 * LEASE_S)  # it would take the lease within that time
    assert isinstance(asked_late, Standby), f"a monitor whose lease has run out answered a drain with {asked_late!r}"
    assert await _acts(arena, other), f"{other} has stopped to act"
    await arena.roles.as_first()


async def _drained_by(arena: Arena, monitor: str, instance: str) -> PolyphaseError | None:
    """How that monitor refused to drain an instance; None where it says that it has done so."""
    async with _client(arena, monitor) as client:
        try:
            await client.drain(instance, timeout_s=TAKEN_OVER_S, who="chaos")
        except PolyphaseError as error:
            return error
    return None


async def _is_true(arena: Arena, instance: str, refusal: PolyphaseError | None) -> None:
    """The instance drains where that was said, and does not where it was said that nothing was done."""
    if refusal is not None and not isinstance(refusal, Standby):
        return
    wanted = InstanceState.DRAINING if refusal is None else InstanceState.READY

    async def so() -> bool:
        return bool((await arena.suite.instances())[instance]["state"] == wanted.value)

    said = f"a drain of {instance} answered with {refusal!r}: the instance to be {wanted.value}"
    await until(so, TAKEN_OVER_S, said)


@asynccontextmanager
async def _never_two(arena: Arena) -> AsyncIterator[None]:
    """Ask both monitors all the time; raises AssertionError when one acts between two acts of the other one.

    Neither can take the lease from the other one and lose it again within a lease's length.
    """
    acts: list[tuple[float, float, str]] = []

    async def watch(name: str) -> None:
        while True:
            asked = time.monotonic()
            if await _acts(arena, name):
                acts.append((asked, time.monotonic(), name))
            await asyncio.sleep(_WATCH_S)

    watches = [asyncio.create_task(watch(name)) for name in arena.named("monitor")]
    try:
        yield
    finally:
        for each in watches:
            each.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
    for asked, answered, name in acts:
        before = [began for began, ended, who in acts if who != name and asked - LEASE_S < began and ended < asked]
        after = [ended for began, ended, who in acts if who != name and answered < began and ended < asked + LEASE_S]
        if before and after and min(after) - max(before) < LEASE_S:
            raise AssertionError(f"{name} acted while the other monitor did")


async def _old_epochs(arena: Arena) -> None:
    """Broadcasts of a monitor that was replaced are replayed, and its successor's under epochs of the past."""
    old = _epoch(arena)
    active, other = await _lose(arena, arena.switches.read_only)
    arena.switches.writable(active)
    await until(lambda: _stands_by(arena, active), TAKEN_OVER_S, f"{active} to stand by")
    now = _epoch(arena)
    assert old < now, f"the epoch of the monitor that acts fell from {old} to {now}"
    replayed = sum(wire.proxy.replay() for wire in arena.wires.between(target=active, purpose="broadcasts"))
    forged = 0
    for epoch in (0, 1, old):
        changed = partial(of_epoch, epoch=epoch)
        wires = arena.wires.between(target=other, purpose="broadcasts")
        forged += sum(wire.proxy.replay(changed=changed) for wire in wires)
        await asyncio.sleep(_REPLAY_S)
    if not replayed or not forged:
        raise AssertionError("nothing was replayed: the scenario shows nothing")
    await _obey_nobody_else(arena, old, now)
    found = await arena.suite.instances()
    wrong = [name for name, role in arena.roles.first.items() if found[name]["role"] != role.value]
    assert not wrong, f"instances with another role than before: {', '.join(wrong)}"
    await arena.roles.ready(*arena.roles.first)
    assert await _acts(arena, other), f"{other} has stopped to act"
    arena.notes.append(f"{replayed} broadcasts replayed, {forged} under another epoch")


async def _obey_nobody_else(arena: Arena, old: int, now: int) -> None:
    """Each instance refuses orders of the past, also after one of epoch 0, and obeys the monitor that acts."""
    sockets = Sockets()
    try:
        with RpcClients(sockets) as clients:
            for port in arena.ports:
                if (port.service, port.purpose) == ("worker", "rpc"):
                    client = clients.to(f"tcp://{port.host}:{port.port}")
                    await _obeys_none_before(client, port.process, arena.roles.first[port.process].other, old, now)
    finally:
        sockets.close()


async def _obeys_none_before(client: RpcClient, name: str, role: Role, old: int, now: int) -> None:
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
    await refused(FLIP, FlipRequest(role, 0))  # of a single monitor, which has to drain it first
    await client.call(RESUME, ResumeRequest(0), timeout_s=TAKEN_OVER_S)
    await refused(DRAIN, DrainRequest(0.0, old))
    await client.call(RESUME, ResumeRequest(now), timeout_s=TAKEN_OVER_S)


def of_epoch(message: bytes, epoch: int) -> bytes:
    """The same broadcast under another epoch; what is no broadcast stays as it is."""
    parts = [part for part in ZmtpSplitter(0).feed(message)[1] if isinstance(part, Part)]
    body = opened(parts[-1].body) if len(parts) == 2 else None
    if body is None or body[: len(OURS.header)] != OURS.header:
        return message
    changed = sealed(OURS.header + epoch.to_bytes(_EPOCH_BYTES, "big") + body[len(OURS.header) + _EPOCH_BYTES :])
    return parts[0].encode() + Part(parts[1].flags, changed).encode()


def _epoch(arena: Arena) -> int:
    """Of the monitor that has the lease."""
    file = f"file:{arena.database.file}{ENDING}?mode=ro"
    with closing(sqlite3.connect(file, uri=True, timeout=TAKEN_OVER_S)) as connection:
        return int(connection.execute("SELECT epoch FROM leases").fetchone()[0])


async def _stands_by(arena: Arena, name: str) -> bool:
    async with _client(arena, name) as monitor:
        try:
            await monitor.call("GET", "/instances", timeout_s=0.5)
        except Standby:
            return True
        except PolyphaseError:
            return False
    return False


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
