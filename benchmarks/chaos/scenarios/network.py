"""Scenarios of the network and of KV transfers.

Links are silent, slow or broken; frames on the sockets are corrupt, stale or replayed; a process of the same host that
does not have the suite's key tries to be obeyed; and the ends of KV transfers between real engines die, freeze or lie
while long prompts are on the way.
"""

import asyncio
import socket
from contextlib import ExitStack, suppress
from functools import partial
from random import Random

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import (
    FAULT_S,
    NOTICED_S,
    decode,
    drain_all_decode,
    flap,
    freeze,
    garbage,
    kill,
    link_fault,
    links,
    links_of,
    prefill,
    replay,
    services,
    silence,
    spoil,
)
from benchmarks.chaos.load import describe, fresh
from benchmarks.chaos.proxy import Port
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import KEYED, LEASE_S, NARROW, OPEN, REAL
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.suite import JobRecord, records
from services.launcher.suite import until
from services.worker.kv.wire.tcp_streams import HEARTBEAT
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, Role
from shared.domain.kv import TransferOutcome
from shared.errors import NotConnected, PolyphaseError
from shared.timeline import Span
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, Heartbeat, Method, ResumeRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tools.client import Ending, Request, send

_PLACEMENT_S = 2.0  # the time for which a gateway waits for a scheduler's answer
_HALF_OPEN = 10  # connections to each port

link = partial(scenario, "links")
frame = partial(scenario, "frames")
stranger = partial(scenario, "strangers")


_RPC, _KV, _STATE = links("rpc"), links("kv"), links("heartbeats", "broadcasts")
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
    """Connections that send a part of a message, or nothing, and stay."""
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
    """Order every instance by RPC to drain, flip and resume, as a monitor of a very high epoch."""
    orders: tuple[tuple[Method, object], ...] = (  # type: ignore[type-arg]
        (DRAIN, DrainRequest(_TRY_S, _EPOCH)),
        (FLIP, FlipRequest(Role.PREFILL, _EPOCH)),
        (RESUME, ResumeRequest(_EPOCH)),
    )
    ports = suite.ports_for("worker", "rpc")
    with hostile.rpc_clients() as clients:
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
    """Publish heartbeats of an instance that does not exist, and subscribe to the monitors' broadcasts."""
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


WAITING = 6  # long prompts at once; the decode instance has blocks for one
STORM = 40  # clients that leave

kv = partial(scenario, "KV", bed=REAL)
narrow = partial(scenario, "KV", bed=NARROW, bound_s=90.0)


kv("kv-kill-prefill", "kill -9 of a prefill instance, its KV half pulled", kill(prefill(1)), outage_s=1.0)
kv("kv-kill-decode", "kill -9 of a decode instance that is pulling", kill(decode(1)), outage_s=1.0)
kv("kv-kill-all-decode", "kill -9 of both decode instances under long prompts", kill(decode(), outage=True))
kv("kv-drain-all", "both decode instances drain by force under long prompts", drain_all_decode)
kv("kv-freeze", "a prefill instance stands still for 4 s, its KV half pulled", freeze(prefill(1)), outage_s=NOTICED_S)
kv("kv-garbage", "noise and well-framed nonsense on every KV port", garbage(lambda s: s.ports_for("worker", "kv")))
kv("kv-corrupt", "bits flip in 30 % of KV messages", spoil(_KV, "corrupted", 0.3))
kv("kv-lose", "10 % of KV messages do not arrive", spoil(_KV, "lost", 0.1), outage_s=1.0)
kv("kv-swap", "30 % of KV messages come after the next one", spoil(_KV, "swapped", 0.3), outage_s=1.0)
kv("kv-replay", "old KV messages come again, four times a second", replay(_KV, 0.25))
kv("kv-cut", "all KV connections are reset twice a second", flap(_KV))
kv("kv-silent", "all KV links are silent for 4 s", silence(_KV), outage_s=NOTICED_S)
kv(
    "kv-slow",
    "all KV links carry 4 MB/s",
    link_fault(_KV, lambda proxy: proxy.slow(latency_s=0.02, bytes_per_s=4_000_000)),
    outage_s=1.0,
)


@kv("kv-stale", "an exporter is restarted twice; its predecessors' pulls come again", outage_s=1.0)
async def _stale(suite: SuiteUnderTest) -> None:
    """An exporter restarts under the same address: it must not answer pulls that its predecessor was sent."""
    for _ in range(2):
        await suite.kill_until_back(suite.prefill[1])
        for wire in suite.wires.between("", suite.prefill[1], "kv"):
            wire.proxy.replay()


@narrow("kv-wait-for-blocks", "decodes wait for blocks longer than the lease of their KV, without a prefetch")
async def _wait_for_blocks(suite: SuiteUnderTest) -> None:
    """Long prompts, for one of which the decode instance has blocks: the others wait, with their KV staged."""
    requests = [fresh(hostile.changed(_longest(suite), max_tokens=300)) for _ in range(WAITING)]
    with suite.outage():
        answers = await asyncio.gather(*(send(suite.gateways[0], request) for request in requests))
    same = len({tuple(answer.tokens) for answer in answers}) == 1 and answers[0].ending is Ending.DONE
    assert same, f"different answers to the same prompt: {'; '.join(map(describe, answers))}"
    waits_s = sorted(_waited_s(record) for record in await _require_pulled(suite, requests))
    suite.notes.append(f"decodes waited {', '.join(f'{wait_s:.1f}' for wait_s in waits_s)} s for blocks")
    assert waits_s[-1] >= 2 * LEASE_S, f"decodes waited for {waits_s[-1]:.1f} s at most, less than two leases"


@narrow("kv-cancel-storm", "clients leave while their decodes wait and pull; the report of one that stays is right")
async def _cancel_storm(suite: SuiteUnderTest) -> None:
    """Clients that leave while their decode waits, pulls, or has begun; then a client that stays."""
    rng = Random(suite.rng.getrandbits(32))

    async def client(_: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        await hostile.leave(suite.gateways[0], fresh(_longest(suite)), rng.uniform(0.1, 2.0))

    with suite.outage():
        await hostile.crowd(STORM, client)
        request = fresh(_longest(suite))
        answer = await send(suite.gateways[0], request)
    assert answer.ending is Ending.DONE, f"after the storm: {describe(answer)}"
    await _require_pulled(suite, [request])


def _longest(suite: SuiteUnderTest) -> Request:
    """The request with the longest of the testbed's prompts."""
    key = f"prompt of {max(suite.bed.prompts)}"
    return next(request for request in suite.requests if request.key == key)


async def _require_pulled(suite: SuiteUnderTest, requests: list[Request]) -> list[JobRecord]:
    """The records of requests that have ended, the KV of each of which must have been pulled."""
    found = await records(suite, [request.body["request_id"] for request in requests])
    reports = [report for record in found for report in record.timeline.transfers]
    wrong = [report for report in reports if report.outcome is not TransferOutcome.PULLED or not report.tokens]
    pulled = not wrong and all(record.timeline.transfers for record in found)
    assert pulled, f"staged KV was not reported as pulled: {wrong or found}"
    return found


def _waited_s(record: JobRecord) -> float:
    """From the end of the prefill to the start of the pull."""
    prefilled_s = next(each.ended_s for each in record.timeline.spans if each.span is Span.PREFILL)
    return record.timeline.transfers[-1].started_s - prefilled_s
