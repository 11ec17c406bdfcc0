"""Partitions, and links that are slow, break or flap, between any two processes."""

import asyncio
import socket
from contextlib import ExitStack, suppress

from lab.chaos import hostile
from lab.chaos.arena import Arena
from lab.chaos.clusters import KEYED, OPEN, REAL
from lab.chaos.proxy import Port, Wire
from lab.chaos.scenario import Scenario
from lab.chaos.scenarios.processes import NOTICED_S
from services.launcher.suite import until
from services.worker.kv.wire.tcp_framing import HEARTBEAT
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, Role
from shared.errors import NotConnected, PolyphaseError
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, Heartbeat, Method, ResumeRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets

SILENT_S = 4.0
_PLACE_S = 2.0  # a gateway waits for a scheduler's answer so long


async def silence(*wires: Wire, seconds: float = SILENT_S) -> None:
    """Nothing comes through, and nobody is told."""
    for wire in wires:
        wire.proxy.stall()
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()


async def refusal(*wires: Wire, seconds: float = SILENT_S) -> None:
    """Connections break, and new ones are refused."""
    for wire in wires:
        wire.proxy.cut(refuse=True)
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()


async def _gateway_to_decode(arena: Arena) -> None:
    await silence(*arena.wires.between(target=arena.decode[0], purpose="rpc"))


async def _gateway_to_workers(arena: Arena) -> None:
    with arena.away():
        await refusal(*(w for w in arena.wires.touching(arena.named("gateway")[0]) if w.port.service == "worker"))


async def _gateway_to_schedulers(arena: Arena) -> None:
    with arena.away(_PLACE_S):
        await silence(*(w for w in arena.wires.touching(arena.named("gateway")[0]) if w.port.service == "scheduler"))


async def _one_scheduler(arena: Arena) -> None:
    await silence(*arena.wires.between(target=arena.named("scheduler")[0], purpose="rpc"))


async def _heartbeats(arena: Arena) -> None:
    await silence(*arena.wires.between(arena.decode[0], purpose="heartbeats"))


async def _monitor(arena: Arena) -> None:
    await silence(*arena.wires.touching(*arena.named("monitor")))


async def _instance(arena: Arena) -> None:
    await silence(*arena.wires.touching(arena.decode[0]))


async def _slow(arena: Arena) -> None:
    wires = arena.wires.between(purpose="rpc")
    for wire in wires:
        wire.proxy.slow(latency_s=0.1, bytes_per_s=200_000)
    await asyncio.sleep(SILENT_S)
    for wire in wires:
        wire.proxy.heal()


async def _flap(arena: Arena) -> None:
    for _ in range(10):
        for wire in arena.rng.sample(arena.wires.all, len(arena.wires.all) // 8):
            wire.proxy.cut()
        await asyncio.sleep(0.5)


LINKS = (
    Scenario("link-silent", "one decode instance's RPC is silent for 4 s", _gateway_to_decode, away_s=NOTICED_S),
    Scenario("link-gateway-workers", "one of two gateways cannot reach any instance for 4 s", _gateway_to_workers),
    Scenario("link-gateway-schedulers", "one of two gateways hears of no scheduler for 4 s", _gateway_to_schedulers),
    Scenario("link-one-scheduler", "one of two schedulers is silent for 4 s", _one_scheduler, away_s=NOTICED_S),
    Scenario("link-heartbeats", "one instance's heartbeats do not arrive for 4 s", _heartbeats),
    Scenario("link-monitor", "the monitor is cut off from everybody for 4 s", _monitor),
    Scenario("link-instance", "a decode instance is cut off from everybody for 4 s", _instance, away_s=NOTICED_S),
    Scenario("link-slow", "all RPC takes 100 ms longer, at 200 kB/s, for 4 s", _slow, away_s=1.0),
    Scenario(
        "link-flap", "an eighth of all connections is reset twice a second for 4 s", _flap, away_s=2.0, errors=True
    ),
)

# MERGED frames.py
# Corrupt, stale, replayed and garbage frames, on every socket.


BAD_S = 4.0
_HALF_OPEN = 10  # connections a port


async def garbage_everywhere(arena: Arena) -> None:
    """Noise on every port, well-framed nonsense on every ZeroMQ port."""
    await hostile.make_noise(arena.ports, arena.rng)
    await hostile.say([port for port in arena.ports if port.purpose != "http"], arena.rng)


async def half_open(arena: Arena) -> None:
    """Connections that say half a word, or none, and stay."""
    with ExitStack() as stack:
        for port in arena.ports:
            for number in range(_HALF_OPEN):
                with suppress(ConnectionRefusedError):  # an emulated instance has no KV to offer
                    made = stack.enter_context(socket.create_connection((port.host, port.port), timeout=2.0))
                    made.sendall(b"\xff\x00\x00"[: number % 4] if port.purpose != "http" else b"POST /v1/comp"[:number])
        await asyncio.sleep(BAD_S)


async def _corrupt(arena: Arena, *wires: Wire, share: float) -> None:
    for wire in wires:
        wire.proxy.corrupt(share)
    await asyncio.sleep(BAD_S)
    for wire in wires:
        wire.proxy.heal()
    if not sum(wire.proxy.corrupted for wire in wires):
        raise AssertionError("nothing was corrupted: the scenario shows nothing")


async def _replay(arena: Arena, *wires: Wire, back: bool = True) -> None:
    for _ in range(int(BAD_S / 0.5)):
        for wire in wires:
            wire.proxy.replay(back=back)
        await asyncio.sleep(0.5)
    if not sum(wire.proxy.replayed for wire in wires):
        raise AssertionError("nothing was replayed: the scenario shows nothing")


async def corrupt_state(arena: Arena) -> None:
    """Heartbeats and broadcasts with flipped bits: state is dropped, or put right by the next one."""
    beats, casts = arena.wires.between(purpose="heartbeats"), arena.wires.between(purpose="broadcasts")
    await _corrupt(arena, *beats, *casts, share=0.3)


async def replay_state(arena: Arena) -> None:
    """Old heartbeats and broadcasts come again."""
    await _replay(arena, *arena.wires.between(purpose="heartbeats"), *arena.wires.between(purpose="broadcasts"))


async def corrupt_rpc(arena: Arena) -> None:
    """Flipped bits in calls and answers; with the cluster's keys they cannot pass for what was sent."""
    await _corrupt(arena, *arena.wires.between(purpose="rpc"), share=0.005)


async def replay_rpc(arena: Arena) -> None:
    """Old calls come again: what they made was made already."""
    await _replay(arena, *arena.wires.between(purpose="rpc"), back=False)


FRAMES = (
    Scenario("garbage", "noise and well-framed nonsense on every port", garbage_everywhere, OPEN),
    Scenario("half-open", "ten connections a port that say half a word and stay for 4 s", half_open),
    Scenario("corrupt-state", "bits flip in 30 % of heartbeats and broadcasts", corrupt_state, OPEN, away_s=2.0),
    Scenario("replay-state", "old heartbeats and broadcasts come again", replay_state, OPEN, away_s=2.0),
    Scenario(
        "corrupt-rpc", "bits flip in 0.5 % of RPC messages, with keys", corrupt_rpc, KEYED, away_s=2.0, errors=True
    ),
    Scenario("replay-rpc", "old calls come again, twice a second", replay_rpc, OPEN, away_s=1.0),
    Scenario("garbage-keyed", "noise and nonsense of a stranger without the keys", garbage_everywhere, KEYED),
)

# MERGED strangers.py
# A process of this host that does not have the suite's key: it gets nothing, and no process obeys it.


_EPOCH = 1 << 40  # of a monitor that would shut out every other one
_TRY_S = 1.0
_LISTEN_S = 3.0
_FALSE = "false-instance"


async def drains(arena: Arena) -> None:
    """Drains, flips and resumes every instance by RPC, in the name of a monitor of a very high epoch."""
    orders: tuple[tuple[Method, object], ...] = (  # type: ignore[type-arg]
        (DRAIN, DrainRequest(_TRY_S, _EPOCH)),
        (FLIP, FlipRequest(Role.PREFILL, _EPOCH)),
        (RESUME, ResumeRequest(_EPOCH)),
    )
    sockets = Sockets()
    try:
        with RpcClients(sockets) as clients:
            calls = [
                _refused(clients, port, method, order)
                for port in _ports(arena, "worker", "rpc")
                for method, order in orders
            ]
            await asyncio.gather(*calls)
    finally:
        sockets.close()
    for name in (*arena.prefill, *arena.decode):
        await arena.roles.ready(name)


async def fences(arena: Arena) -> None:
    """Publishes heartbeats of an instance that does not exist, and listens to the monitors' broadcasts."""
    sockets, heard = Sockets(), list[ClusterDelta]()
    publishers = [Publisher(sockets, _address(port)) for port in _ports(arena, "monitor", "heartbeats")]
    feeds = [
        ClusterFeed(sockets, _address(port), lambda delta: not heard.append(delta))  # type: ignore[func-returns-value]
        for port in _ports(arena, "monitor", "broadcasts")
    ]
    victims = [Heartbeat(name, 1, Role.DECODE, True, InstanceLoad()) for name in (_FALSE, *arena.decode)]
    try:
        async with asyncio.timeout(_LISTEN_S + _TRY_S):
            with suppress(TimeoutError):
                async with asyncio.timeout(_LISTEN_S):
                    while True:
                        for publisher in publishers:
                            for each in victims:
                                publisher.publish(each)
                        await asyncio.sleep(0.02)
    finally:
        for publisher in publishers:
            publisher.close()
        for feed in feeds:
            feed.close()
        sockets.close()
    if heard:
        raise AssertionError(f"a process without the key heard {len(heard)} broadcasts")
    if _FALSE in await arena.suite.instances():
        raise AssertionError("the monitor lists an instance that a process without the key made up")


async def opens_kv(arena: Arena) -> None:
    """Opens KV connections to every rank and greets: each is ended without an answer."""

    def ended(port: Port) -> bool:
        with socket.create_connection((port.host, port.port), timeout=_TRY_S) as stranger, suppress(ConnectionError):
            stranger.sendall(HEARTBEAT)
            return not stranger.recv(1)
        return True

    for port in _ports(arena, "worker", "kv"):

        async def closed(port: Port = port) -> bool:
            return await asyncio.to_thread(ended, port)

        await until(closed, _LISTEN_S, f"{port.process} to end a KV connection of a process without the key")


async def _refused(clients: RpcClients, port: Port, method: Method, order: object) -> None:  # type: ignore[type-arg]
    try:
        said = await clients.to(_address(port)).call(method, order, timeout_s=5 * _TRY_S)
    except NotConnected:
        return
    except PolyphaseError as error:
        raise AssertionError(f"{port.process} answers {method.name} of a process without the key: {error}") from error
    raise AssertionError(f"{port.process} carries out {method.name} of a process without the key: {said}")


def _ports(arena: Arena, service: str, purpose: str) -> list[Port]:
    return [port for port in arena.ports if (port.service, port.purpose) == (service, purpose)]


def _address(port: Port) -> str:
    return f"tcp://{port.host}:{port.port}"


STRANGERS = (
    Scenario("stranger-drains", "a process without the key drains and flips every instance", drains),
    Scenario("stranger-fences", "a process without the key sends heartbeats and listens to broadcasts", fences),
    Scenario("stranger-kv", "a process without the key opens KV connections to every instance", opens_kv, REAL),
)
