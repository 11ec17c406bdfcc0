"""Rolling replacement by the same version or a compatible one, and refusal of any other."""

from lab.chaos.arena import Arena
from lab.chaos.client import Ending, Reply, send
from lab.chaos.scenario import Scenario
from services.launcher.ports import free_range
from services.launcher.process import Child
from services.launcher.suite import until
from shared.domain.instance import Role
from shared.errors import NotFound
from shared.runtime.wire_version import OURS
from shared.wire.clients.http import WorkerAdmin

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
