"""Scenarios of the network.

Links are silent, slow or broken; frames on the sockets are corrupt, stale or replayed; and a process of the same host
that does not have the suite's key gives orders and listens.
"""

import asyncio
import socket
from contextlib import ExitStack, suppress
from functools import partial

from benchmarks.chaos.faults import (
    FAULT_S,
    NOTICED_S,
    decode,
    flap,
    garbage,
    link_fault,
    links,
    links_of,
    replay,
    services,
    silence,
    spoil,
)
from benchmarks.chaos.garbage import rpc_clients
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import KEYED, OPEN, REAL
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.chaos.wires import Port
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

link = partial(scenario, "links")
frame = partial(scenario, "frames")
stranger = partial(scenario, "strangers")

_RPC, _STATE = links("rpc"), links("heartbeats", "broadcasts")
_GATEWAY, _SCHEDULER = services("gateway", count=1), services("scheduler", count=1)

link(
    "link-silent",
    "one decode instance's RPC is silent for 4 s",
    silence(links("rpc", target=decode(1))),
    outage_s=NOTICED_S,
)
link(
    "link-gateway-workers",
    "one of two gateways cannot reach any instance for 4 s",
    link_fault(links_of(_GATEWAY, "worker"), lambda proxy: proxy.cut(refuse=True), outage_s=0.0),
)
link(
    "link-gateway-schedulers",
    "one of two gateways is cut off from all schedulers for 4 s",
    silence(links_of(_GATEWAY, "scheduler"), outage_s=_PLACEMENT_S),
)
link(
    "link-one-scheduler",
    "one of two schedulers is silent for 4 s",
    silence(links("rpc", target=_SCHEDULER)),
    outage_s=NOTICED_S,
)
link(
    "link-heartbeats", "one instance's heartbeats do not arrive for 4 s", silence(links("heartbeats", source=decode(1)))
)
link("link-monitor", "the monitor is cut off from all other processes for 4 s", silence(links_of(services("monitor"))))
link(
    "link-instance",
    "a decode instance is cut off from all other processes for 4 s",
    silence(links_of(decode(1))),
    outage_s=NOTICED_S,
)
link(
    "link-slow",
    "all RPC takes 100 ms longer, at 200 kB/s, for 4 s",
    link_fault(_RPC, lambda proxy: proxy.slow(latency_s=0.1, bytes_per_s=200_000)),
    outage_s=1.0,
)
link(
    "link-flap",
    "an eighth of all connections is reset twice a second for 4 s",
    flap(links(), share=1 / 8),
    outage_s=2.0,
    errors=True,
)

_garbage_everywhere = garbage(lambda s: s.ports)
frame("garbage", "noise and well-framed nonsense on every port", _garbage_everywhere, bed=OPEN)


@frame("half-open", "ten connections a port that say half a word and stay for 4 s")
async def _half_open(suite: SuiteUnderTest) -> None:
    with ExitStack() as stack:
        for port in suite.ports:
            for number in range(_HALF_OPEN):
                with suppress(ConnectionRefusedError):  # an emulated instance has no KV port
                    peer = stack.enter_context(socket.create_connection(port.address, timeout=2.0))
                    peer.sendall(b"\xff\x00\x00"[: number % 4] if port.purpose != "http" else b"POST /v1/comp"[:number])
        await asyncio.sleep(FAULT_S)


frame(
    "corrupt-state",
    "bits flip in 30 % of heartbeats and broadcasts",
    spoil(_STATE, "corrupted", 0.3),
    bed=OPEN,
    outage_s=2.0,
)
frame("replay-state", "old heartbeats and broadcasts come again", replay(_STATE, 0.5), bed=OPEN, outage_s=2.0)
frame(
    "corrupt-rpc",
    "bits flip in 0.5 % of RPC messages, with keys",
    spoil(_RPC, "corrupted", 0.005),
    bed=KEYED,
    outage_s=2.0,
    errors=True,
)
frame("replay-rpc", "old calls come again, twice a second", replay(_RPC, 0.5, back=False), bed=OPEN, outage_s=1.0)
frame("garbage-keyed", "noise and nonsense of a process without the keys", _garbage_everywhere, bed=KEYED)

_EPOCH = 1 << 40  # of a monitor that would replace all others
_TRY_S = 1.0
_LISTEN_S = 3.0
_FALSE_INSTANCE = "false-instance"


@stranger("stranger-drains", "a process without the key drains and flips every instance")
async def _drains(suite: SuiteUnderTest) -> None:
    orders: tuple[tuple[Method, object], ...] = (  # type: ignore[type-arg]
        (DRAIN, DrainRequest(_TRY_S, _EPOCH)),
        (FLIP, FlipRequest(Role.PREFILL, _EPOCH)),
        (RESUME, ResumeRequest(_EPOCH)),
    )
    ports = suite.ports_for("worker", "rpc")
    with rpc_clients() as clients:
        await asyncio.gather(*(_refused(clients, port, *order) for port in ports for order in orders))
    await suite.until_ready()


async def _refused(clients: RpcClients, port: Port, method: Method, order: object) -> None:  # type: ignore[type-arg]
    try:
        answer = await clients.to(port.url).call(method, order, timeout_s=5 * _TRY_S)
    except NotConnected:
        return
    except PolyphaseError as error:
        raise AssertionError(f"{port.process} answers {method.name} of a process without the key: {error}") from error
    raise AssertionError(f"{port.process} carries out {method.name} of a process without the key: {answer}")


@stranger("stranger-fences", "a process without the key sends heartbeats and listens to broadcasts")
async def _fences(suite: SuiteUnderTest) -> None:
    sockets, received = Sockets(), list[ClusterDelta]()
    publishers = [Publisher(sockets, port.url) for port in suite.ports_for("monitor", "heartbeats")]
    feeds = [
        ClusterFeed(sockets, port.url, lambda delta: not received.append(delta))  # type: ignore[func-returns-value]
        for port in suite.ports_for("monitor", "broadcasts")
    ]
    victims = [Heartbeat(name, 1, Role.DECODE, True, InstanceLoad()) for name in (_FALSE_INSTANCE, *suite.decode)]
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
    assert not received, f"a process without the key received {len(received)} broadcasts"
    listed = _FALSE_INSTANCE in await suite.instances()
    assert not listed, "the monitor lists an instance that a process without the key made up"


@stranger("stranger-kv", "a process without the key opens KV connections to every instance", bed=REAL)
async def _opens_kv(suite: SuiteUnderTest) -> None:
    """Open a KV connection to every rank and send a heartbeat: the worker ends each without an answer."""

    def ended(port: Port) -> bool:
        with socket.create_connection(port.address, timeout=_TRY_S) as peer, suppress(ConnectionError):
            peer.sendall(HEARTBEAT)
            return not peer.recv(1)
        return True

    for port in suite.ports_for("worker", "kv"):
        what = f"{port.process} to end a KV connection of a process without the key"
        await until(partial(asyncio.to_thread, ended, port), _LISTEN_S, what)
