"""Scenarios of the network.

Links are silent, slow or broken; frames on the sockets are corrupt, stale or replayed; and a process of the same host
that does not have the suite's key tries to be obeyed.
"""

import asyncio
import socket
from contextlib import ExitStack, suppress

from benchmarks.chaos import hostile
from benchmarks.chaos.arena import Arena
from benchmarks.chaos.clusters import KEYED, OPEN, REAL
from benchmarks.chaos.faults import FAULT_S, NOTICED_S, link_fault, replay
from benchmarks.chaos.proxy import Port, Proxy, Wire, disturb
from benchmarks.chaos.scenario import Scenario
from services.launcher.suite import until
from services.worker.kv.wire.tcp_streams import HEARTBEAT
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, Role
from shared.errors import NotConnected, PolyphaseError
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, Heartbeat, Method, ResumeRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets

_PLACEMENT_S = 2.0  # the time for which a gateway waits for a scheduler's answer
_HALF_OPEN = 10  # connections to each port


def _of_first_gateway(arena: Arena, service: str) -> list[Wire]:
    return [wire for wire in arena.wires.touching(arena.named("gateway")[0]) if wire.port.service == service]


async def _gateway_without_workers(arena: Arena) -> None:
    with arena.outage():
        await disturb(_of_first_gateway(arena, "worker"), lambda proxy: proxy.cut(refuse=True), FAULT_S)


async def _gateway_without_schedulers(arena: Arena) -> None:
    with arena.outage(_PLACEMENT_S):
        await disturb(_of_first_gateway(arena, "scheduler"), Proxy.stall, FAULT_S)


async def _flap(arena: Arena) -> None:
    for _ in range(10):
        for wire in arena.rng.sample(arena.wires.all, len(arena.wires.all) // 8):
            wire.proxy.cut()
        await asyncio.sleep(0.5)


LINKS = (
    Scenario(
        "link-silent",
        "one decode instance's RPC is silent for 4 s",
        link_fault(lambda arena: arena.wires.between(target=arena.decode[0], purpose="rpc"), Proxy.stall),
        outage_s=NOTICED_S,
    ),
    Scenario("link-gateway-workers", "one of two gateways cannot reach any instance for 4 s", _gateway_without_workers),
    Scenario(
        "link-gateway-schedulers", "one of two gateways hears of no scheduler for 4 s", _gateway_without_schedulers
    ),
    Scenario(
        "link-one-scheduler",
        "one of two schedulers is silent for 4 s",
        link_fault(lambda arena: arena.wires.between(target=arena.named("scheduler")[0], purpose="rpc"), Proxy.stall),
        outage_s=NOTICED_S,
    ),
    Scenario(
        "link-heartbeats",
        "one instance's heartbeats do not arrive for 4 s",
        link_fault(lambda arena: arena.wires.between(arena.decode[0], purpose="heartbeats"), Proxy.stall),
    ),
    Scenario(
        "link-monitor",
        "the monitor is cut off from everybody for 4 s",
        link_fault(lambda arena: arena.wires.touching(*arena.named("monitor")), Proxy.stall),
    ),
    Scenario(
        "link-instance",
        "a decode instance is cut off from everybody for 4 s",
        link_fault(lambda arena: arena.wires.touching(arena.decode[0]), Proxy.stall),
        outage_s=NOTICED_S,
    ),
    Scenario(
        "link-slow",
        "all RPC takes 100 ms longer, at 200 kB/s, for 4 s",
        link_fault(
            lambda arena: arena.wires.between(purpose="rpc"),
            lambda proxy: proxy.slow(latency_s=0.1, bytes_per_s=200_000),
        ),
        outage_s=1.0,
    ),
    Scenario(
        "link-flap", "an eighth of all connections is reset twice a second for 4 s", _flap, outage_s=2.0, errors=True
    ),
)


def _state(arena: Arena) -> tuple[Wire, ...]:
    return (*arena.wires.between(purpose="heartbeats"), *arena.wires.between(purpose="broadcasts"))


async def _garbage_everywhere(arena: Arena) -> None:
    await hostile.make_noise(arena.ports, arena.rng)
    await hostile.send_messages([port for port in arena.ports if port.purpose != "http"], arena.rng)


async def _half_open(arena: Arena) -> None:
    """Connections that send a part of a message, or nothing, and stay."""
    with ExitStack() as stack:
        for port in arena.ports:
            for number in range(_HALF_OPEN):
                with suppress(ConnectionRefusedError):  # an emulated instance has no KV port
                    peer = stack.enter_context(socket.create_connection(port.address, timeout=2.0))
                    peer.sendall(b"\xff\x00\x00"[: number % 4] if port.purpose != "http" else b"POST /v1/comp"[:number])
        await asyncio.sleep(FAULT_S)


FRAMES = (
    Scenario("garbage", "noise and well-framed nonsense on every port", _garbage_everywhere, OPEN),
    Scenario("half-open", "ten connections a port that say half a word and stay for 4 s", _half_open),
    Scenario(
        "corrupt-state",
        "bits flip in 30 % of heartbeats and broadcasts",
        link_fault(_state, lambda proxy: proxy.corrupt(0.3), "corrupted"),
        OPEN,
        outage_s=2.0,
    ),
    Scenario("replay-state", "old heartbeats and broadcasts come again", replay(_state, 0.5), OPEN, outage_s=2.0),
    Scenario(
        "corrupt-rpc",
        "bits flip in 0.5 % of RPC messages, with keys",
        link_fault(lambda arena: arena.wires.between(purpose="rpc"), lambda proxy: proxy.corrupt(0.005), "corrupted"),
        KEYED,
        outage_s=2.0,
        errors=True,
    ),
    Scenario(
        "replay-rpc",
        "old calls come again, twice a second",
        replay(lambda arena: arena.wires.between(purpose="rpc"), 0.5, back=False),
        OPEN,
        outage_s=1.0,
    ),
    Scenario("garbage-keyed", "noise and nonsense of a stranger without the keys", _garbage_everywhere, KEYED),
)

_EPOCH = 1 << 40  # of a monitor that would replace all others
_TRY_S = 1.0
_LISTEN_S = 3.0
_FALSE_INSTANCE = "false-instance"


async def _drains(arena: Arena) -> None:
    """Order every instance by RPC to drain, flip and resume, as a monitor of a very high epoch."""
    orders: tuple[tuple[Method, object], ...] = (  # type: ignore[type-arg]
        (DRAIN, DrainRequest(_TRY_S, _EPOCH)),
        (FLIP, FlipRequest(Role.PREFILL, _EPOCH)),
        (RESUME, ResumeRequest(_EPOCH)),
    )
    sockets = Sockets()
    try:
        with RpcClients(sockets) as clients:
            await asyncio.gather(
                *(
                    _refused(clients, port, method, order)
                    for port in arena.ports_for("worker", "rpc")
                    for method, order in orders
                )
            )
    finally:
        sockets.close()
    for name in (*arena.prefill, *arena.decode):
        await arena.roles.ready(name)


async def _refused(clients: RpcClients, port: Port, method: Method, order: object) -> None:  # type: ignore[type-arg]
    try:
        answer = await clients.to(port.url).call(method, order, timeout_s=5 * _TRY_S)
    except NotConnected:
        return
    except PolyphaseError as error:
        raise AssertionError(f"{port.process} answers {method.name} of a process without the key: {error}") from error
    raise AssertionError(f"{port.process} carries out {method.name} of a process without the key: {answer}")


async def _fences(arena: Arena) -> None:
    """Publish heartbeats of an instance that does not exist, and subscribe to the monitors' broadcasts."""
    sockets, received = Sockets(), list[ClusterDelta]()
    publishers = [Publisher(sockets, port.url) for port in arena.ports_for("monitor", "heartbeats")]
    feeds = [
        ClusterFeed(sockets, port.url, lambda delta: not received.append(delta))  # type: ignore[func-returns-value]
        for port in arena.ports_for("monitor", "broadcasts")
    ]
    victims = [Heartbeat(name, 1, Role.DECODE, True, InstanceLoad()) for name in (_FALSE_INSTANCE, *arena.decode)]
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_S):
                while True:
                    for publisher in publishers:
                        for victim in victims:
                            publisher.publish(victim)
                    await asyncio.sleep(0.02)
    finally:
        for publisher in publishers:
            publisher.close()
        for feed in feeds:
            feed.close()
        sockets.close()
    if received:
        raise AssertionError(f"a process without the key received {len(received)} broadcasts")
    if _FALSE_INSTANCE in await arena.suite.instances():
        raise AssertionError("the monitor lists an instance that a process without the key made up")


async def _opens_kv(arena: Arena) -> None:
    """Open a KV connection to every rank and send a heartbeat: the worker ends each without an answer."""

    def ended(port: Port) -> bool:
        with socket.create_connection(port.address, timeout=_TRY_S) as stranger, suppress(ConnectionError):
            stranger.sendall(HEARTBEAT)
            return not stranger.recv(1)
        return True

    for port in arena.ports_for("worker", "kv"):

        async def closed(port: Port = port) -> bool:
            return await asyncio.to_thread(ended, port)

        await until(closed, _LISTEN_S, f"{port.process} to end a KV connection of a process without the key")


STRANGERS = (
    Scenario("stranger-drains", "a process without the key drains and flips every instance", _drains),
    Scenario("stranger-fences", "a process without the key sends heartbeats and listens to broadcasts", _fences),
    Scenario("stranger-kv", "a process without the key opens KV connections to every instance", _opens_kv, REAL),
)
