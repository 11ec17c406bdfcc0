"""The troubles that `polyphase bench troubles` stages, in this order, each from outside and by a real means."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from lab.bench.troubles_beds import JOB_S, LATE, REAL
from lab.bench.troubles_load import Wish
from lab.bench.troubles_stage import Stage, Trouble
from lab.chaos.arena import Arena
from services.launcher.keeper import State
from services.launcher.suite import until
from shared.domain.route import PolicySpec
from shared.domain.verdict import Level

_SLOW_S = 0.8  # of each KV transfer
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
async def _dead(on: Stage) -> AsyncIterator[None]:
    async with _dead_are(on, "decode-0"):
        yield


@asynccontextmanager
async def _all_dead(on: Stage) -> AsyncIterator[None]:
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
async def _unresponsive(on: Stage) -> AsyncIterator[None]:
    on.be("unresponsive", "prefill-0")
    on.arena.processes.freeze("prefill-0")
    try:
        yield
    finally:
        on.arena.processes.thaw("prefill-0")
    on.be("ready", "prefill-0")


@asynccontextmanager
async def _missing(on: Stage) -> AsyncIterator[None]:
    """Nobody has started it; it is due a minute after the monitor's start."""
    on.be("missing", LATE)
    yield
    await _start_late(on)


async def _start_late(on: Stage) -> None:
    spec = on.arena.spec(LATE)
    on.late = await on.arena.strangers.start(LATE, spec.argv, spec.env)
    on.be("ready", LATE)


@asynccontextmanager
async def _silent_gateway(on: Stage) -> AsyncIterator[None]:
    async with _silent(on, "gateway-1"):
        yield


@asynccontextmanager
async def _silent_scheduler(on: Stage) -> AsyncIterator[None]:
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
async def _no_predictor(on: Stage) -> AsyncIterator[None]:
    on.known.mute_s = time.time()
    async with _killed(on, "predictor"):
        yield
    on.known.mute_s = None


@asynccontextmanager
async def _deaf(on: Stage) -> AsyncIterator[None]:
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
async def _burst(on: Stage) -> AsyncIterator[None]:
    task = asyncio.create_task(on.clients.burst(160, Wish(30, 8)))
    try:
        yield
        await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _too_long(on: Stage) -> AsyncIterator[None]:
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
async def _instant(on: Stage) -> AsyncIterator[None]:
    async with on.clients.users(3, Wish(300, 8, "instant")):
        yield


@asynccontextmanager
async def _swift(on: Stage) -> AsyncIterator[None]:
    async with on.clients.users(3, Wish(60, 24, "swift")):
        yield


@asynccontextmanager
async def _overload(on: Stage) -> AsyncIterator[None]:
    async with on.clients.users(30, Wish(900, 4)):
        yield


@asynccontextmanager
async def _full(on: Stage) -> AsyncIterator[None]:
    async with on.clients.users(44, Wish(300, 120)):
        yield


@asynccontextmanager
async def _kv_cut(on: Stage) -> AsyncIterator[None]:
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
async def _kv_slow(on: Stage) -> AsyncIterator[None]:
    wires = on.arena.wires.between(purpose="kv")
    on.known.slow_s = _SLOW_S / 2  # its way there takes half of it, and its way back the other half
    for wire in wires:
        wire.proxy.slow(latency_s=_SLOW_S / 2)
    try:
        yield
    finally:
        for wire in wires:
            wire.proxy.heal()


def _prefill(arena: Arena) -> tuple[str, ...]:
    return arena.prefill


MISSING = Trouble(
    "missing",
    "nobody starts an instance of the cluster file",
    "instances_missing",
    rf"1 of \d decode instances never came: {LATE}",
    _missing,
    culprits=lambda _: (LATE,),
)
TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        "dead",
        "SIGKILL of a decode instance, and of each that the launcher starts in its place",
        "instances_dead",
        r"1 of \d decode instances dead: decode-0",
        _dead,
        culprits=lambda _: ("decode-0",),
    ),
    MISSING,
    Trouble(
        "unresponsive",
        "SIGSTOP of a prefill instance",
        "instances_unresponsive",
        r"1 of 2 prefill instances unresponsive: prefill-0",
        _unresponsive,
        culprits=lambda _: ("prefill-0",),
    ),
    Trouble(
        "burst",
        "160 requests at once, where each of two gateways takes 40 that do not decode yet",
        "refusals",
        r"more at once than the gateway or a key may have \(\d+ busy\)",
        _burst,
    ),
    Trouble(
        "too-long",
        "12 answers of 16 s, where a request may take 10 s",
        "errors",
        r"they took longer than they may \(\d+ deadline_exceeded\)",
        _too_long,
    ),
    Trouble(
        "ttft",
        "3 clients of a class whose first token is to come within 30 ms, which no prompt of 300 tokens can",
        "ttft_missed",
        r"target 30 ms, class instant\): (prompts take long to compute|requests wait for prefill)",
        _instant,
    ),
    Trouble(
        "tpot",
        "3 clients of a class that wants a token every 20 ms, of instances whose steps take 40 ms",
        "tpot_missed",
        r"target 20 ms, class swift\): decode steps are slow",
        _swift,
    ),
    Trouble(
        "overload",
        "30 clients with prompts of 900 tokens, each asking again at once",
        "ttft_missed",
        r"requests wait for prefill \(queue: .*; \d+ prompts? waits? for up to .* \(prefill-0, prefill-1\)",
        _overload,
        culprits=_prefill,
    ),
    Trouble(
        "kv-full",
        "44 clients whose answers need more KV than the decode instances have",
        "kv_full",
        r"decode KV \S+ %.*, \d+ waiting: decode-",
        _full,
    ),
    Trouble(
        "all-dead",
        "SIGKILL of all decode instances, and of each that the launcher starts in their place",
        "role_empty",
        r"no decode instance is ready: \d dead",
        _all_dead,
        level=Level.DOWN,
    ),
    Trouble("gateway", "SIGSTOP of a gateway", "gateway_gone", "1 of 2 gateways silent .*: gateway-1", _silent_gateway),
    Trouble(
        "scheduler",
        "SIGSTOP of a scheduler",
        "scheduler_gone",
        "1 of 2 schedulers silent .*: scheduler-1",
        _silent_scheduler,
    ),
    Trouble(
        "policies",
        "a policy is changed while a proxy drops all broadcasts to an instance",
        "policies_not_followed",
        "policies not followed by decode-0: they go by older ones",
        _deaf,
        culprits=lambda _: ("decode-0",),
    ),
    Trouble(
        "predictor",
        "SIGKILL of the predictor, and of each that the launcher starts in its place",
        "predictor_fallback",
        "output lengths not predicted: no predictor answers",
        _no_predictor,
    ),
    Trouble(
        "kv-cut",
        "a proxy resets every KV connection",
        "transfers_failing",
        "decode instances compute these prompts again",
        _kv_cut,
        bed=REAL,
    ),
    Trouble(
        "kv-slow",
        f"a proxy has every KV message take {_SLOW_S / 2:g} s longer",
        "transfers_slow",
        "half of the KV transfers take over",
        _kv_slow,
        bed=REAL,
    ),
)
