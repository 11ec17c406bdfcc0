"""Scenarios of operations.

Drains and flips race with each other, with failures and with the monitor's restart. Processes are replaced by others of
the same, of a compatible or of an incompatible version.
"""

import asyncio
from collections.abc import Awaitable

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.scenario import Scenario
from services.launcher.child_process import Child
from services.launcher.ports import free_range
from services.launcher.suite import until
from shared.domain.instance import Role
from shared.errors import Conflict, NotFound, PolyphaseError
from shared.runtime.wire_version import OURS
from shared.wire.clients.http import WorkerAdmin
from tools.client import Ending, Response, send


async def _drain_in_turn(arena: Arena) -> None:
    for name in (*arena.decode, *arena.prefill):
        await arena.roles.drain(name)
        await arena.roles.resume(name)


async def _drain_last(arena: Arena) -> None:
    """The monitor must refuse to drain the last ready decode instance."""
    *others, last = arena.decode
    for name in others:
        await arena.roles.drain(name)
    try:
        with arena.outage():  # should the monitor carry it out after all
            await arena.roles.drain(last, timeout_s=3.0)
    except Conflict:
        return
    finally:
        await arena.roles.reset()
    raise AssertionError("the last ready decode instance was drained without being forced")


async def _drain_all_forced(arena: Arena) -> None:
    """Jobs wait until an instance is back."""
    with arena.outage():
        for name in arena.decode:
            await arena.roles.drain(name, force=True)
        await asyncio.sleep(2.0)
        await arena.roles.reset()


async def _flip_race(arena: Arena) -> None:
    """The monitor refuses some of the operations. Instances of both roles must remain."""
    names = (*arena.decode, *arena.prefill)
    for _ in range(3):
        await _together(*(arena.roles.flip(name) for name in names), *(arena.roles.drain(name) for name in names))
        await _together(*(arena.roles.resume(name) for name in names))
        ready = {entry["role"] for entry in (await arena.suite.instances()).values() if entry["state"] == "ready"}
        if ready != {"prefill", "decode"}:
            raise AssertionError(f"after a race of flips and drains only these roles are ready: {sorted(ready)}")
    await arena.roles.reset()


async def _flip_and_kill(arena: Arena) -> None:
    flipping = asyncio.create_task(arena.roles.flip(arena.decode[0]))
    draining = asyncio.create_task(arena.roles.drain(arena.decode[1]))
    await asyncio.sleep(0.1)
    old = arena.processes.kill(arena.decode[0], arena.decode[1])
    await _together(flipping, draining)
    await arena.processes.back(old)
    await arena.roles.reset()


async def _monitor_dies_in_flips(arena: Arena) -> None:
    """After each restart the monitor must be able to put all roles right."""
    (monitor,) = arena.named("monitor")
    for name in (arena.decode[0], arena.prefill[0], arena.decode[1]):
        flipping = asyncio.create_task(arena.roles.flip(name))
        await asyncio.sleep(0.15)
        old = arena.processes.kill(monitor)
        await _together(flipping)
        await arena.processes.back(old)
        await arena.roles.reset()


async def _monitor_frozen_in_drain(arena: Arena) -> None:
    """The monitor wakes when its client has long given up; the operation must come to an end."""
    (monitor,), name = arena.named("monitor"), arena.decode[0]
    arena.processes.freeze(monitor)
    draining = asyncio.create_task(arena.roles.drain(name, timeout_s=1.0))
    await asyncio.sleep(4.0)
    arena.processes.thaw(monitor)
    await _together(draining)
    await until(lambda: _no_operation(arena), 10.0, "the operation to end")
    await arena.roles.reset()


async def _no_operation(arena: Arena) -> bool:
    return not any(entry["operation"] for entry in (await arena.suite.instances()).values())


async def _together(*operations: Awaitable[None]) -> None:
    """Wait for all. An operation may be refused: in a race some are."""
    for result in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, PolyphaseError):
            raise result


ROLES = (
    Scenario("drain-in-turn", "every instance drains and resumes, one after the other", _drain_in_turn),
    Scenario("drain-last", "all decode instances but one drain; the last one is asked to", _drain_last),
    Scenario("drain-all", "every decode instance drains by force, and resumes", _drain_all_forced),
    Scenario("flip-race", "flips and drains of all instances at once, three times", _flip_race),
    Scenario("flip-and-kill", "instances die in the middle of a flip and of a drain", _flip_and_kill),
    Scenario("flip-monitor-dies", "the monitor dies in the middle of three flips", _monitor_dies_in_flips),
    Scenario(
        "drain-monitor-frozen", "a drain is asked of a monitor that stands still for 4 s", _monitor_frozen_in_drain
    ),
)

# An instance that is refused must not be listed, and one that joined stays listed when it is gone: two names.
_REFUSED, _NEWCOMER = "stranger", "newcomer"
_OTHER_WIRE = "200"
_JOIN_S = 15.0


async def _rolling(arena: Arena) -> None:
    for name in (*arena.decode, *arena.prefill):
        await arena.roles.drain(name)
        await arena.processes.back(arena.processes.stop(name))
        await arena.roles.ready(name)
    for service in ("predictor", "scheduler", "monitor"):
        for name in arena.named(service):
            await arena.processes.back(arena.processes.stop(name))


async def _rolling_gateways(arena: Arena) -> None:
    """A gateway that ends refuses new clients, and finishes the answers under way."""
    for name in arena.named("gateway"):
        await arena.processes.back(arena.processes.stop(name))


async def _other_wire(arena: Arena) -> None:
    await _require_refused(arena, {"CHAOS_WIRE_VERSION": _OTHER_WIRE}, "wire_version")


async def _other_model(arena: Arena) -> None:
    await _require_refused(arena, {"POLYPHASE_WORKER_EMULATED_MODEL": "Llama-2-13B"}, "fingerprint")


async def _other_wire_gateway(arena: Arena) -> None:
    """The gateway reaches no scheduler. Its clients must get a 503, and not an error that blames their requests."""
    spec, port = arena.spec(arena.named("gateway")[0]), free_range(size=1)
    env = {**spec.env, "POLYPHASE_GATEWAY_PORT": str(port), "POLYPHASE_GATEWAY_GATEWAY_ID": _REFUSED}
    await arena.strangers.start(_REFUSED, spec.argv, {**env, "CHAOS_WIRE_VERSION": _OTHER_WIRE})
    answers: list[Response] = []

    async def answered() -> bool:
        answers.append(await send(("127.0.0.1", port), arena.requests[0]))
        return answers[-1].ending is not Ending.UNREACHABLE

    await until(answered, _JOIN_S, "the gateway to answer")
    answer = answers[-1]
    unavailable = "503" in (str(answer.status), answer.code)  # the code, where a stream has begun
    if not unavailable or f"wire_version {_OTHER_WIRE} " not in answer.error:
        raise AssertionError(f"a gateway of another wire version answers {answer.status} {answer.code}: {answer.error}")


async def _next_wire(arena: Arena) -> None:
    """The next wire version, of a process that still supports the present one."""
    await _require_joins(
        arena, {"CHAOS_WIRE_VERSION": str(OURS.version + 1), "CHAOS_MIN_WIRE_VERSION": str(OURS.version)}
    )


async def _newcomer(arena: Arena) -> None:
    await _require_joins(arena, {})


async def _require_joins(arena: Arena, env: dict[str, str]) -> None:
    """An instance joins, gets work, and is killed."""
    child, admin = await _start(arena, _NEWCOMER, env)

    async def decodes() -> bool:
        return bool((await admin.instance())["load"]["decoding"])

    async with admin:
        await arena.roles.ready(_NEWCOMER, timeout_s=_JOIN_S)
        await until(decodes, _JOIN_S, "the newcomer to get work")
    child.kill()
    await child.wait()


async def _require_refused(arena: Arena, env: dict[str, str], reason: str) -> None:
    """An instance reports why it was refused, and the monitor does not know it."""
    _, admin = await _start(arena, _REFUSED, env)

    async def reports() -> bool:
        return reason in (await admin.instance())["refused"]

    async with admin:
        await until(reports, _JOIN_S, f"the refusal to name {reason}")
    if _REFUSED in await arena.suite.instances():
        raise AssertionError("an instance that was refused is in the list")
    async with arena.suite.monitor() as monitor:
        try:
            await monitor.instance(_REFUSED)
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


VERSIONS = (
    Scenario("rolling", "every process but the gateways is replaced, instances drained first", _rolling, bound_s=90.0),
    Scenario(
        "rolling-gateways",
        "both gateways are replaced, one at a time",
        _rolling_gateways,
        errors=True,  # one that is about to end turns new requests away
        breaks=True,
        bound_s=60.0,
    ),
    Scenario("other-wire", "an instance of another wire version wants to join", _other_wire),
    Scenario("other-wire-gateway", "a gateway of another wire version wants to serve", _other_wire_gateway),
    Scenario("next-wire", "an instance of the next wire version joins, gets work, and is killed", _next_wire),
    Scenario("other-model", "an instance of another model wants to join", _other_model),
    Scenario("newcomer", "one more instance joins, gets work, and is killed", _newcomer),
)
