"""Scenarios of operations.

Drains and flips race with each other, with failures and with the monitor's restart. Processes are replaced by others of
the same, of a compatible or of an incompatible version.
"""

import asyncio
from collections.abc import Awaitable
from functools import partial

from benchmarks.chaos.faults import drain_all_decode, replace, services
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.suite import until_found
from services.launcher.child_process import Child
from services.launcher.ports import free_range
from services.launcher.suite import until
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, NotFound, PolyphaseError
from shared.runtime.wire_version import OURS
from shared.wire.clients.http import WorkerAdmin
from tools.client import Ending, Response, send

roles = partial(scenario, "roles")
version = partial(scenario, "versions", bound_s=90.0)  # processes start while users keep the machine busy


@roles("drain-in-turn", "every instance drains and resumes, one after the other")
async def _drain_in_turn(suite: SuiteUnderTest) -> None:
    for name in (*suite.decode, *suite.prefill):
        await suite.drain(name)
        await suite.resume(name)


@roles("drain-last", "all decode instances but one drain; the last one is to drain, too")
async def _drain_last(suite: SuiteUnderTest) -> None:
    """The monitor must refuse to drain the last ready decode instance."""
    *others, last = suite.decode
    for name in others:
        await suite.drain(name)
    try:
        with suite.outage():  # should the monitor carry it out after all
            await suite.drain(last, timeout_s=3.0)
    except Conflict:
        return
    finally:
        await suite.reset_roles()
    raise AssertionError("the last ready decode instance was drained without being forced")


roles("drain-all", "every decode instance drains by force, and resumes", drain_all_decode)


@roles("flip-race", "flips and drains of all instances at once, three times")
async def _flip_race(suite: SuiteUnderTest) -> None:
    """The monitor refuses some of the operations. Instances of both roles must remain."""
    names = (*suite.decode, *suite.prefill)
    for _ in range(3):
        await _together(*(suite.flip(name) for name in names), *(suite.drain(name) for name in names))
        await _together(*(suite.resume(name) for name in names))
        ready = {entry.role for entry in (await suite.instances()).values() if entry.state is InstanceState.READY}
        assert ready == set(Role), f"after a race of flips and drains only {sorted(ready)} is ready"
    await suite.reset_roles()


@roles("flip-and-kill", "instances die in the middle of a flip and of a drain")
async def _flip_and_kill(suite: SuiteUnderTest) -> None:
    flipping = asyncio.create_task(suite.flip(suite.decode[0]))
    draining = asyncio.create_task(suite.drain(suite.decode[1]))
    await asyncio.sleep(0.1)
    old = suite.processes.kill(suite.decode[0], suite.decode[1])
    await _together(flipping, draining)
    await suite.processes.back(old)
    await suite.reset_roles()


@roles("flip-monitor-dies", "the monitor dies in the middle of three flips")
async def _monitor_dies_in_flips(suite: SuiteUnderTest) -> None:
    """After each restart the monitor must be able to put all roles right."""
    (monitor,) = suite.named("monitor")
    for name in (suite.decode[0], suite.prefill[0], suite.decode[1]):
        flipping = asyncio.create_task(suite.flip(name))
        await asyncio.sleep(0.15)
        old = suite.processes.kill(monitor)
        await _together(flipping)
        await suite.processes.back(old)
        await suite.reset_roles()


@roles("drain-monitor-frozen", "a drain is requested of a monitor that stands still for 4 s")
async def _monitor_frozen_in_drain(suite: SuiteUnderTest) -> None:
    """The monitor wakes when its client has long given up; the operation must come to an end."""
    (monitor,), name = suite.named("monitor"), suite.decode[0]
    suite.processes.freeze(monitor)
    draining = asyncio.create_task(suite.drain(name, timeout_s=1.0))
    await asyncio.sleep(4.0)
    suite.processes.thaw(monitor)
    await _together(draining)

    async def no_operation() -> bool:
        return not any(entry.operation for entry in (await suite.instances()).values())

    await until(no_operation, 10.0, "the operation to end")
    await suite.reset_roles()


async def _together(*operations: Awaitable[None]) -> None:
    """Wait for all. An operation may be refused: in a race some are."""
    for result in await asyncio.gather(*operations, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, PolyphaseError):
            raise result


# An instance that is refused must not be listed, and one that joined stays listed when it is gone: two names.
_REFUSED, _NEWCOMER = "stranger", "newcomer"
_OTHER_WIRE = "200"
_JOIN_S = 60.0  # a gateway or an engine is imported first


@version("rolling", "every process but the gateways is replaced, instances drained first")
async def _rolling(suite: SuiteUnderTest) -> None:
    for name in (*suite.decode, *suite.prefill):
        await suite.drain(name)
        await suite.processes.back(suite.processes.stop(name))
        await suite.until_ready(name)
    await replace(services("predictor", "scheduler", "monitor"))(suite)


# A gateway that ends refuses new clients, and finishes the answers under way.
version(
    "rolling-gateways",
    "both gateways are replaced, one at a time",
    replace(services("gateway")),
    errors=True,
    breaks=True,
)


async def _require_refused(env: dict[str, str], reason: str, suite: SuiteUnderTest) -> None:
    """An instance reports why it was refused, and the monitor does not know it."""
    _, admin = await _start(suite, _REFUSED, env)

    async def reports() -> bool:
        return reason in (await admin.instance()).refused

    async with admin:
        await until(reports, _JOIN_S, f"the refusal to name {reason}")
    assert _REFUSED not in await suite.instances(), "an instance that was refused is in the list"
    async with suite.monitor() as monitor:
        try:
            await monitor.instance(_REFUSED)
        except NotFound:
            return
    raise AssertionError("the monitor knows an instance that it refused")


version(
    "other-wire",
    "an instance of another wire version tries to join",
    partial(_require_refused, {"CHAOS_WIRE_VERSION": _OTHER_WIRE}, "wire_version"),
)
version(
    "other-model",
    "an instance of another model tries to join",
    partial(_require_refused, {"POLYPHASE_WORKER_EMULATED_MODEL": "Llama-2-13B"}, "fingerprint"),
)


@version("other-wire-gateway", "a gateway of another wire version tries to serve")
async def _other_wire_gateway(suite: SuiteUnderTest) -> None:
    """The gateway reaches no scheduler. Its clients must get a 503, and not an error that blames their requests."""
    spec, port = suite.spec(suite.named("gateway")[0]), free_range(size=1)
    env = {**spec.env, "POLYPHASE_GATEWAY_PORT": str(port), "POLYPHASE_GATEWAY_GATEWAY_ID": _REFUSED}
    await suite.start_stranger(_REFUSED, spec.argv, {**env, "CHAOS_WIRE_VERSION": _OTHER_WIRE})

    async def find() -> Response | None:
        answer = await send(("127.0.0.1", port), suite.requests[0])
        return None if answer.ending is Ending.UNREACHABLE else answer

    answer = await until_found(find, _JOIN_S, "the gateway to answer")
    got = f"a gateway of another wire version answers {answer.status} {answer.code}: {answer.error}"
    assert "503" in (str(answer.status), answer.code), got  # the code, where a stream has begun
    assert f"wire_version {_OTHER_WIRE} " in answer.error, got


async def _require_joins(env: dict[str, str], suite: SuiteUnderTest) -> None:
    """An instance joins, gets work, and is killed."""
    child, admin = await _start(suite, _NEWCOMER, env)

    async def decodes() -> bool:
        return bool((await admin.instance()).load.decoding)

    async with admin:
        await suite.until_ready(_NEWCOMER, timeout_s=_JOIN_S)
        await until(decodes, _JOIN_S, "the newcomer to get work")
    child.kill()
    await child.wait()


async def _start(suite: SuiteUnderTest, name: str, env: dict[str, str]) -> tuple[Child, WorkerAdmin]:
    spec, port = suite.spec(suite.decode[0]), free_range(size=3)
    own = {"INSTANCE_ID": name, "ROLE": Role.DECODE.value, "RPC_PORT": port, "HTTP_PORT": port + 1, "KV_PORT": port + 2}
    own_env = {f"POLYPHASE_WORKER_{key}": str(value) for key, value in own.items()}
    child = await suite.start_stranger(name, spec.argv, {**spec.env, **own_env, **env})
    return child, WorkerAdmin(f"http://127.0.0.1:{port + 1}")


# A process of the next wire version that still supports the present one.
_NEXT_WIRE = {"CHAOS_WIRE_VERSION": str(OURS.version + 1), "CHAOS_MIN_WIRE_VERSION": str(OURS.version)}
version(
    "next-wire",
    "an instance of the next wire version joins, gets work, and is killed",
    partial(_require_joins, _NEXT_WIRE),
)
version("newcomer", "one more instance joins, gets work, and is killed", partial(_require_joins, {}))
