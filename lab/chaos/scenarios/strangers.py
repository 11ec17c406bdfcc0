"""A process of this host that does not have the suite's key: it gets nothing, and no process obeys it."""

import asyncio
import socket
from contextlib import suppress

from lab.chaos.arena import Arena
from lab.chaos.clusters import REAL
from lab.chaos.scenario import Scenario
from lab.chaos.wires import Port
from services.launcher.suite import until
from services.worker.kv.wire.tcp_framing import HEARTBEAT
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, Role
from shared.errors import NotConnected, PolyphaseError
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, Heartbeat, Method, ResumeRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets

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
