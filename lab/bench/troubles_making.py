"""How each trouble is made, and undone at the end of its block."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from lab.bench.troubles_beds import JOB_S, LATE
from lab.bench.troubles_load import Wish
from lab.bench.troubles_stage import Stage
from services.launcher.keeper import State
from services.launcher.suite import until
from shared.domain.route import PolicySpec

SLOW_S = 0.8  # of each KV transfer
_HELD_S = 0.1


@asynccontextmanager
async def _killed(on: Stage, *names: str) -> AsyncIterator[None]:
    """SIGKILL, and again whenever the launcher has started it anew; at the end, until it is back."""
    old = on.arena.processes.kill(*names)

    async def hold() -> None:
        while True:
            await asyncio.sleep(_HELD_S)
            on.arena.processes.kill(*names)

    task = asyncio.create_task(hold())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: all(_is_back(on, name) for name in names), 60.0, f"{', '.join(old)} to be back")


def _is_back(on: Stage, name: str) -> bool:
    status = on.arena.processes.statuses[name]
    return status.state is State.READY and bool(status.pid)


@asynccontextmanager
async def dead(on: Stage) -> AsyncIterator[None]:
    """SIGKILL of a decode instance, and of each that is started in its place."""
    async with _dead_are(on, "decode-0"):
        yield


@asynccontextmanager
async def all_dead(on: Stage) -> AsyncIterator[None]:
    """The same of all decode instances."""
    async with _dead_are(on, *(name for name in on.arena.decode if name != LATE)):
        if on.late is not None:
            on.be("dead", LATE)
            on.late.kill()
        yield
    if on.late is not None:
        await _start_late(on)


@asynccontextmanager
async def _dead_are(on: Stage, *names: str) -> AsyncIterator[None]:
    on.be("dead", *names)
    async with _killed(on, *names):
        yield
    on.be("ready", *names)


@asynccontextmanager
async def unresponsive(on: Stage) -> AsyncIterator[None]:
    """A prefill instance is not heard of, and works."""
    wires = on.arena.wires.between("prefill-0", "monitor", "heartbeats")
    on.be("unresponsive", "prefill-0")
    for wire in wires:
        wire.proxy.stall()
    try:
        yield
    finally:
        for wire in wires:
            wire.proxy.heal()
    on.be("ready", "prefill-0")


@asynccontextmanager
async def frozen(on: Stage) -> AsyncIterator[None]:
    """A prefill instance stands still."""
    on.be("dead", "prefill-0")
    on.arena.processes.freeze("prefill-0")
    try:
        yield
    finally:
        on.arena.processes.thaw("prefill-0")
    on.be("ready", "prefill-0")


@asynccontextmanager
async def missing(on: Stage) -> AsyncIterator[None]:
    """Nobody has started it; it is due a minute after the monitor's start."""
    on.be("missing", LATE)
    yield
    await _start_late(on)


async def _start_late(on: Stage) -> None:
    spec = on.arena.spec(LATE)
    on.late = await on.arena.strangers.start(LATE, spec.argv, spec.env)
    on.be("ready", LATE)


@asynccontextmanager
async def silent_gateway(on: Stage) -> AsyncIterator[None]:
    """A gateway stands still."""
    async with _silent(on, "gateway-1"):
        yield


@asynccontextmanager
async def silent_scheduler(on: Stage) -> AsyncIterator[None]:
    """A scheduler stands still."""
    async with _silent(on, "scheduler-1"):
        yield


@asynccontextmanager
async def _silent(on: Stage, name: str) -> AsyncIterator[None]:
    with on.doubted():
        on.known.silent[name] = time.time()
        on.arena.processes.freeze(name)
        try:
            yield
        finally:
            on.arena.processes.thaw(name)
    del on.known.silent[name]


@asynccontextmanager
async def no_predictor(on: Stage) -> AsyncIterator[None]:
    """SIGKILL of the predictor, and of each that is started in its place."""
    on.known.mute_s = time.time()
    async with _killed(on, "predictor"):
        yield
    on.known.mute_s = None


@asynccontextmanager
async def deaf(on: Stage) -> AsyncIterator[None]:
    """A policy is changed, and an instance gets no broadcasts any more."""
    wires = on.arena.wires.between("decode-0", "monitor", "broadcasts")
    for wire in wires:
        wire.proxy.stall()
    on.known.behind = frozenset({"decode-0"})
    await on.monitor.set_policies({"decode_admission": PolicySpec("reserve_dynamic")}, who="troubles")
    try:
        yield
    finally:
        for wire in wires:
            wire.proxy.heal()
    await on.monitor.set_policies({"decode_admission": None}, who="troubles")
    on.known.behind = frozenset()


@asynccontextmanager
async def burst(on: Stage) -> AsyncIterator[None]:
    """More requests at once than gateways take."""
    task = asyncio.create_task(on.clients.burst(160, Wish(30, 8)))
    try:
        yield
        await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def too_long(on: Stage) -> AsyncIterator[None]:
    """Answers of 16 s where a request may take 10."""
    task = asyncio.create_task(on.clients.burst(12, Wish(60, int(JOB_S * 40))))
    try:
        yield
        await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def instant(on: Stage) -> AsyncIterator[None]:
    """Clients whose first tokens are to come sooner than they can."""
    async with on.clients.users(3, Wish(300, 8, "instant")):
        yield


@asynccontextmanager
async def swift(on: Stage) -> AsyncIterator[None]:
    """Clients who want tokens sooner than steps are."""
    async with on.clients.users(3, Wish(60, 24, "swift")):
        yield


@asynccontextmanager
async def overload(on: Stage) -> AsyncIterator[None]:
    """More long prompts than prefill instances compute in time."""
    async with on.clients.users(24, Wish(900, 4)):
        yield


@asynccontextmanager
async def full(on: Stage) -> AsyncIterator[None]:
    """More KV than the decode instances have."""
    async with on.clients.users(44, Wish(300, 120)):
        yield


@asynccontextmanager
async def kv_cut(on: Stage) -> AsyncIterator[None]:
    """No KV connection lives."""
    wires = on.arena.wires.between(purpose="kv")
    on.known.cut_s = time.time()
    for wire in wires:
        wire.proxy.cut(refuse=True)
    try:
        yield
    finally:
        for wire in wires:
            wire.proxy.heal()


@asynccontextmanager
async def kv_slow(on: Stage) -> AsyncIterator[None]:
    """KV takes its time."""
    wires = on.arena.wires.between(purpose="kv")
    on.known.slow_s = SLOW_S / 2  # its way there takes half of it, and its way back the other half
    for wire in wires:
        wire.proxy.slow(latency_s=SLOW_S / 2)
    try:
        yield
    finally:
        for wire in wires:
            wire.proxy.heal()
