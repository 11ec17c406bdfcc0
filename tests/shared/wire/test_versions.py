"""Processes of different wire versions: those that are compatible serve together, others are not connected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from shared.domain.cluster import ClusterDelta
from shared.errors import BY_CODE, NotConnected, PeerLost, WireVersionMismatch
from shared.runtime.wire_version import HEADER_BYTES, OURS, WireVersions
from shared.wire.broadcast import ClusterFeed, ClusterPublisher, Publisher, Subscriber
from shared.wire.envelope import MALFORMED, Envelope, Kind, encode_body, pack, unpack
from shared.wire.messages import Method
from shared.wire.rpc_client import RpcClient
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.shared.wire.peers import ECHO, Answer, Ask, Peer, until

NOW = WireVersions(20, 20)
NEXT = WireVersions(21, 20)  # it still speaks with 20
LATER = WireVersions(22, 22)


class NextAsk(msgspec.Struct):
    number: int
    padding: bytes = b""
    added: str = ""


class NextAnswer(msgspec.Struct):
    number: int
    padding: bytes = b""
    added: str = ""


NEXT_ECHO = Method("echo", NextAsk, NextAnswer, NextAnswer)


@asynccontextmanager
async def serving(wire: WireVersions, peer: Peer) -> AsyncIterator[tuple[str, RpcServer]]:
    sockets, address = Sockets(wire=wire), free_address()
    try:
        async with peer.server(sockets, address) as server:
            yield address, server
    finally:
        sockets.close()


@asynccontextmanager
async def calling(wire: WireVersions, address: str) -> AsyncIterator[RpcClient]:
    sockets = Sockets(wire=wire)
    client = RpcClient(sockets, address)
    try:
        yield client
    finally:
        client.close()
        sockets.close()


def test_two_versions_agree_whether_they_speak_with_each_other() -> None:
    assert NOW.speaks_with(NEXT)
    assert NEXT.speaks_with(NOW)
    assert NEXT.speaks_with(NEXT)
    for other in (NOW, NEXT):
        assert not other.speaks_with(LATER)
        assert not LATER.speaks_with(other)
    assert OURS.minimum <= OURS.version


async def test_an_older_client_is_served_by_the_next_version() -> None:
    peer = Peer()

    async def echo(ask: NextAsk, _: ServerCall) -> NextAnswer:
        return NextAnswer(ask.number, added=f"{ask.added or 'nothing'} was added")

    sockets, address = Sockets(wire=NEXT), free_address()
    try:
        async with RpcServer(sockets, address, {NEXT_ECHO: echo}) as server, calling(NOW, address) as client:
            assert await client.call(ECHO, Ask(1), timeout_s=20) == Answer(1)
            async with calling(NEXT, address) as newer:
                answer = await newer.call(NEXT_ECHO, NextAsk(2, added="more"), timeout_s=20)
                assert answer.added == "more was added"
            assert not server.dropped
    finally:
        sockets.close()
    async with serving(NOW, peer) as (address, server), calling(NEXT, address) as client:
        assert (await client.call(NEXT_ECHO, NextAsk(3, added="more"), timeout_s=20)).number == 3
        assert not server.dropped
    assert peer.seen == [3]


@pytest.mark.parametrize(("ours", "theirs"), [(NOW, LATER), (LATER, NOW), (NEXT, LATER)], ids=str)
async def test_an_incompatible_server_is_not_connected(ours: WireVersions, theirs: WireVersions) -> None:
    peer = Peer()
    async with serving(theirs, peer) as (address, server), calling(ours, address) as client:
        calls = [client.call(ECHO, Ask(number), timeout_s=20) for number in range(3)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, WireVersionMismatch)
            assert isinstance(outcome, NotConnected)  # which every caller takes for: try another one
            assert outcome.retriable
            assert outcome.http_status == 503
            assert address in outcome.message
            assert f"wire_version {ours.version} " in outcome.message
            assert f"wire_version {theirs.version} " in outcome.message
        client.notify(ECHO, Ask(4))
        dropped = server.dropped["wire_version"]
        await until(lambda: server.dropped["wire_version"] > dropped or dropped > 1)
        assert not peer.seen
        assert set(server.dropped) == {"wire_version"}
    assert BY_CODE[WireVersionMismatch.code] is WireVersionMismatch


async def test_a_client_whose_messages_state_no_version_is_answered_at_once() -> None:
    peer = Peer()
    async with serving(NOW, peer) as (address, server):
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        try:
            dealer.connect(address)
            dealer.send(msgspec.msgpack.encode([Envelope(Kind.CALL, 1, "echo", 5.0, encode_body(Ask(1)))]))
            assert await asyncio.to_thread(dealer.poll, 20_000)
            assert [envelope.kind for envelope in unpack(dealer.recv(), NOW)] == [Kind.RESET]
        finally:
            dealer.close()
            context.term()
        assert server.dropped["wire_version"] == 1
        assert not peer.seen


async def test_a_reply_that_states_no_version_loses_the_call_alone() -> None:
    """The call may have been carried out, so this is not the error of a call that nobody has seen."""
    sockets, address = Sockets(), free_address()
    router = sockets.bind(zmq.ROUTER, address)
    client = RpcClient(sockets, address)
    try:
        call = asyncio.create_task(client.call(ECHO, Ask(1), timeout_s=20))
        await until(lambda: router.poll(0))
        identity = router.recv_multipart()[0]
        router.send_multipart([identity, b"\x00\x00\x00"])
        with pytest.raises(PeerLost) as lost:
            await call
        assert not isinstance(lost.value, NotConnected)
    finally:
        client.close()
        router.close()
        sockets.close()


def test_a_flipped_bit_is_no_version() -> None:
    message = pack([Envelope(Kind.RESET, 0, "", 0.0, encode_body(1))])
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MALFORMED):
            unpack(bytes(flipped))


async def test_state_of_an_incompatible_publisher_is_dropped() -> None:
    sockets, newer, later, address = Sockets(wire=NOW), Sockets(wire=NEXT), Sockets(wire=LATER), free_address()
    got: list[int] = []
    subscriber = Subscriber(sockets, address, Ask, lambda ask: got.append(ask.number))
    publishers = [Publisher(newer, address), Publisher(later, address)]
    try:
        async with asyncio.timeout(20):
            while not (got and subscriber.dropped):
                publishers[0].publish(NextAsk(1, added="more"))
                publishers[1].publish(Ask(2))
                await asyncio.sleep(0.01)
        assert set(got) == {1}
        assert set(subscriber.dropped) == {"wire_version"}
    finally:
        subscriber.close()
        for each in publishers:
            each.close()
        for own in (sockets, newer, later):
            own.close()


@pytest.mark.parametrize(("wire", "heard"), [(NEXT, True), (LATER, False)])
async def test_a_monitor_is_heard_where_it_is_compatible(wire: WireVersions, heard: bool) -> None:
    sockets, theirs, address = Sockets(wire=NOW), Sockets(wire=wire), free_address()
    got: list[ClusterDelta] = []

    def take(delta: ClusterDelta) -> bool:
        got.append(delta)
        return True

    publisher = ClusterPublisher(theirs, address)
    feed = ClusterFeed(sockets, address, take)
    try:
        async with asyncio.timeout(20):
            while not (got or feed.dropped):
                publisher.whole(ClusterDelta(1, 1.0, whole=True))
                await asyncio.sleep(0.01)
        assert bool(got) is heard
        assert set(feed.dropped) == (set() if heard else {"wire_version"})
    finally:
        feed.close()
        publisher.close()
        sockets.close()
        theirs.close()
