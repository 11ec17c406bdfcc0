"""Drains and flips, raced against each other, against deaths and against the monitor's own restart."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from lab.chaos.arena import Arena
from lab.chaos.load import Ending, Reply, send
from lab.chaos.scenario import Scenario
from services.launcher.child_process import Child
from services.launcher.ports import free_range
from services.launcher.suite import until
from shared.domain.instance import Role
from shared.errors import Conflict, NotFound, PolyphaseError
from shared.runtime.wire_version import OURS
from shared.wire.clients.http import WorkerAdmin

_REFUSED = (PolyphaseError,)  # a race has losers; what they are told is not what is looked at


async def drain_in_turn(arena: Arena) -> None:
    """Each instance drains under load and resumes: nobody notices."""
    for name in (*arena.decode, *arena.prefill):
        await arena.roles.drain(name)
        await arena.roles.resume(name)


async def drain_last(arena: Arena) -> None:
    """All decode instances but one drain; the last one's drain must be refused."""
    *others, last = arena.decode
    for name in others:
        await arena.roles.drain(name)
    try:
        with arena.away():  # should it be carried out after all
            try:
                await arena.roles.drain(last, timeout_s=3.0)
            except Conflict:
                return
            raise AssertionError("the last ready decode instance was drained without being forced")
    finally:
        await arena.roles.as_first()


async def drain_all_forced(arena: Arena) -> None:
    """Every decode instance drains, on purpose; jobs wait until one is back."""
    with arena.away():
        for name in arena.decode:
            await arena.roles.drain(name, force=True)
        await asyncio.sleep(2.0)
        await arena.roles.as_first()


async def flip_race(arena: Arena) -> None:
    """Everything is asked of everybody at once. Some of it is refused; some instance of each role must remain."""
    names = (*arena.decode, *arena.prefill)
    for _ in range(3):
        await _together(*(arena.roles.flip(name) for name in names), *(arena.roles.drain(name) for name in names))
        await _together(*(arena.roles.resume(name) for name in names))
        ready = {entry["role"] for entry in (await arena.suite.instances()).values() if entry["state"] == "ready"}
        if ready != {"prefill", "decode"}:
            raise AssertionError(f"after a race of flips and drains only these roles are ready: {sorted(ready)}")
    await arena.roles.as_first()


async def flip_and_kill(arena: Arena) -> None:
    """An instance dies in the middle of its flip, another in the middle of its drain."""
    flipping = asyncio.create_task(arena.roles.flip(arena.decode[0]))
    draining = asyncio.create_task(arena.roles.drain(arena.decode[1]))
    await asyncio.sleep(0.1)
    old = arena.processes.kill(arena.decode[0], arena.decode[1])
    for task in (flipping, draining):
        with suppress(*_REFUSED):
            await task
    await arena.processes.back(old)
    await arena.roles.as_first()


async def monitor_dies_in_flips(arena: Arena) -> None:
    """Thrice: a flip begins, the monitor dies in it, comes back, and can put everything right again."""
    (monitor,) = arena.named("monitor")
    for name in (arena.decode[0], arena.prefill[0], arena.decode[1]):
        flipping = asyncio.create_task(arena.roles.flip(name))
        await asyncio.sleep(0.15)
        old = arena.processes.kill(monitor)
        with suppress(*_REFUSED):
            await flipping
        await arena.processes.back(old)
        await arena.roles.as_first()


async def monitor_frozen_in_drain(arena: Arena) -> None:
    """A drain is asked of a monitor that stands still; what it answers and what then happens must be one thing."""
    (monitor,), name = arena.named("monitor"), arena.decode[0]
    arena.processes.freeze(monitor)
    draining = asyncio.create_task(arena.roles.drain(name, timeout_s=1.0))
    await asyncio.sleep(4.0)
    arena.processes.thaw(monitor)
    with suppress(*_REFUSED):
        await draining
    await until(lambda: _no_operation(arena), 10.0, "the operation to end")
    await arena.roles.as_first()


async def _no_operation(arena: Arena) -> bool:
    return not any(entry["operation"] for entry in (await arena.suite.instances()).values())


async def _together(*wishes: Coroutine[Any, Any, None]) -> None:
    for result in await asyncio.gather(*wishes, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, _REFUSED):
            raise result


ROLES = (
    Scenario("drain-in-turn", "every instance drains and resumes, one after the other", drain_in_turn),
    Scenario("drain-last", "all decode instances but one drain; the last one is asked to", drain_last),
    Scenario("drain-all", "every decode instance drains by force, and resumes", drain_all_forced),
    Scenario("flip-race", "flips and drains of all instances at once, three times", flip_race),
    Scenario("flip-and-kill", "instances die in the middle of a flip and of a drain", flip_and_kill),
    Scenario("flip-monitor-dies", "the monitor dies in the middle of three flips", monitor_dies_in_flips),
    Scenario(
        "drain-monitor-frozen", "a drain is asked of a monitor that stands still for 4 s", monitor_frozen_in_drain
    ),
)

# MERGED versions.py
# Rolling replacement by the same version or a compatible one, and refusal of any other.


_STRANGER, _NEWCOMER = "stranger", "newcomer"  # that is refused, and that joins: what was in the list stays there
_OTHER = "200"  # a wire version
_JOIN_S = 15.0


async def rolling(arena: Arena) -> None:
    """Every process but the gateways, one at a time, by SIGTERM; instances are drained before."""
    for name in (*arena.decode, *arena.prefill):
        await arena.roles.drain(name)
        await arena.processes.back(arena.processes.stop(name))
        await arena.roles.ready(name)
    for service in ("predictor", "scheduler", "monitor"):
        for name in arena.named(service):
            await arena.processes.back(arena.processes.stop(name))


async def rolling_gateways(arena: Arena) -> None:
    """The gateways, one at a time: new clients are turned away there, answers under way end well."""
    for name in arena.named("gateway"):
        await arena.processes.back(arena.processes.stop(name))


async def other_wire(arena: Arena) -> None:
    """An instance that speaks another wire version."""
    await _refused(arena, {"CHAOS_WIRE_VERSION": _OTHER}, "wire_version")


async def other_model(arena: Arena) -> None:
    """An instance of another model."""
    await _refused(arena, {"POLYPHASE_WORKER_EMULATED_MODEL": "Llama-2-13B"}, "fingerprint")


async def other_wire_gateway(arena: Arena) -> None:
    """A gateway of another wire version reaches no scheduler. Its clients are told to come again, and not that their
    requests are wrong.
    """
    spec, port = arena.spec(arena.named("gateway")[0]), free_range(size=1)
    own = {"POLYPHASE_GATEWAY_PORT": str(port), "POLYPHASE_GATEWAY_GATEWAY_ID": _STRANGER, "CHAOS_WIRE_VERSION": _OTHER}
    await arena.strangers.start(_STRANGER, spec.argv, {**spec.env, **own})
    replies: list[Reply] = []

    async def answered() -> bool:
        replies.append(await send(("127.0.0.1", port), arena.asks[0]))
        return replies[-1].ending is not Ending.UNREACHABLE

    await until(answered, _JOIN_S, "the gateway to answer")
    reply = replies[-1]
    unavailable = "503" in (str(reply.status), reply.code)  # the code where a stream has begun
    if not unavailable or f"wire_version {_OTHER} " not in reply.error:
        raise AssertionError(f"a gateway of another wire version answers {reply.status} {reply.code}: {reply.error}")


async def next_wire(arena: Arena) -> None:
    """An instance of the next wire version, which still speaks with the present one, joins and gets work."""
    await _joins(arena, {"CHAOS_WIRE_VERSION": str(OURS.version + 1), "CHAOS_MIN_WIRE_VERSION": str(OURS.version)})


async def newcomer(arena: Arena) -> None:
    """One more of the same version joins, gets work, and dies without a word."""
    await _joins(arena, {})


async def _joins(arena: Arena, env: dict[str, str]) -> None:
    child, admin = await _start(arena, _NEWCOMER, env)
    async with admin:
        await arena.roles.ready(_NEWCOMER, timeout_s=_JOIN_S)
        await until(lambda: _works(admin), _JOIN_S, "the newcomer to get work")
    child.kill()
    await child.wait()


async def _refused(arena: Arena, env: dict[str, str], reason: str) -> None:
    """It must say itself why it was refused, and the cluster must not list it."""
    _, admin = await _start(arena, _STRANGER, env)
    async with admin:
        await until(lambda: _says(admin, reason), _JOIN_S, f"the refusal to name {reason}")
    if _STRANGER in await arena.suite.instances():
        raise AssertionError("an instance that was refused is in the list")
    async with arena.suite.monitor() as monitor:
        try:
            await monitor.instance(_STRANGER)
        except NotFound:
            return
    raise AssertionError("the monitor knows an instance that it refused")


async def _start(arena: Arena, name: str, env: dict[str, str]) -> tuple[Child, WorkerAdmin]:
    spec, port = arena.spec(arena.decode[0]), free_range(size=3)
    own = {
        "POLYPHASE_WORKER_INSTANCE_ID": name,
        "POLYPHASE_WORKER_ROLE": Role.DECODE.value,
        "POLYPHASE_WORKER_RPC_PORT": str(port),
        "POLYPHASE_WORKER_HTTP_PORT": str(port + 1),
        "POLYPHASE_WORKER_KV_PORT": str(port + 2),
    }
    child = await arena.strangers.start(name, spec.argv, {**spec.env, **own, **env})
    return child, WorkerAdmin(f"http://127.0.0.1:{port + 1}")


async def _says(admin: WorkerAdmin, reason: str) -> bool:
    return reason in (await admin.instance())["refused"]


async def _works(admin: WorkerAdmin) -> bool:
    return bool((await admin.instance())["load"]["decoding"])


VERSIONS = (
    Scenario("rolling", "every process but the gateways is replaced, instances drained first", rolling, bound_s=90.0),
    Scenario(
        "rolling-gateways",
        "both gateways are replaced, one at a time",
        rolling_gateways,
        errors=True,  # one that is about to end turns new requests away
        breaks=True,
        bound_s=60.0,
    ),
    Scenario("other-wire", "an instance of another wire version wants to join", other_wire),
    Scenario("other-wire-gateway", "a gateway of another wire version wants to serve", other_wire_gateway),
    Scenario("next-wire", "an instance of the next wire version joins, gets work, and is killed", next_wire),
    Scenario("other-model", "an instance of another model wants to join", other_model),
    Scenario("newcomer", "one more instance joins, gets work, and is killed", newcomer),
)
