"""Who is gone is noticed by both sides, and nothing waits for it: peers killed, frozen, cut off, or not reading."""

import asyncio
import signal
import time

import msgspec
import pytest
import zmq

from shared.errors import NotConnected, PeerLost
from shared.wire.envelope import Envelope, Kind, encode_body, pack, unpack
from shared.wire.rpc_client import CONNECT_S, RpcClient
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address
from tests.shared.wire.peers import ECHO, FLOOD, WAIT, Answer, Ask, Peer, caller, connected, until


class WithoutHeartbeats(Sockets):
    """For raw peers that do not read: libzmq answers no heartbeat while its queue is full."""

    def _new(self, kind: int) -> zmq.Socket[bytes]:
        socket = super()._new(kind)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        return socket


def raw(kind: int, **options: object) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket


def call_frame(method: str, number: int, ask: Ask | None = None, timeout_s: float = 30.0) -> bytes:
    return pack([Envelope(Kind.CALL, number, method, timeout_s, encode_body(ask or Ask(number)))])


async def read(socket: zmq.Socket[bytes]) -> bytes:
    await until(lambda: socket.poll(0))
    return socket.recv_multipart()[-1]


# The server's side: its callers.


async def test_a_killed_caller_is_noticed_though_nothing_is_sent_to_it() -> None:
    async with connected() as (peer, server, client, _):
        async with caller(client.address, WAIT) as child:
            await asyncio.wait_for(peer.waiting.wait(), 30)
            child.kill()
            await until(lambda: peer.gone)
            await asyncio.wait_for(peer.cancelled.wait(), 20)
        assert (await client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        assert peer.callers[0] not in peer.gone
        assert len(peer.gone) == 1
        assert server.calls == 0
        assert server.dropped["peer_gone"] == 1


async def test_one_that_has_no_call_under_way_is_noticed_too() -> None:
    async with connected() as (peer, _, client, _), caller(client.address, ECHO) as child:
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), 30) == b"answered\n"
        child.kill()
        await until(lambda: peer.gone)
        assert peer.gone == peer.callers


async def test_curve_changes_nothing() -> None:
    public, secret = zmq.curve_keypair()
    async with connected(Curve(public.decode(), secret.decode())) as (peer, _, client, sockets):
        other = RpcClient(sockets, client.address)
        call = asyncio.create_task(other.call(WAIT, Ask(1), timeout_s=30))
        await asyncio.wait_for(peer.waiting.wait(), 20)
        other.close()
        with pytest.raises(PeerLost):
            await call
        await until(lambda: peer.gone)
        await asyncio.wait_for(peer.cancelled.wait(), 20)


async def test_a_frozen_caller_is_noticed_by_heartbeat_and_told_when_it_thaws() -> None:
    async with connected() as (peer, _, client, _), caller(client.address, WAIT) as child:
        await asyncio.wait_for(peer.waiting.wait(), 30)
        child.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: peer.gone, 20)
            assert peer.cancelled.is_set()
        finally:
            child.send_signal(signal.SIGCONT)
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), 20) == b"peer_lost\n"


async def test_a_call_is_not_left_running_when_its_caller_is_gone_before_it_is_read() -> None:
    async with connected() as (peer, server, client, _):
        for number in range(30):
            context = zmq.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(client.address)
            dealer.send(call_frame(WAIT.name, number + 1))
            dealer.close(linger=5000)
            if number % 2:
                context.term()  # the loop sees the message and the end of the connection at once
            else:
                await asyncio.to_thread(context.term)
        assert (await client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        await until(lambda: server.calls == 0)
        assert len(peer.gone) <= 30


async def test_a_caller_that_does_not_read_is_given_up_and_told() -> None:
    sockets, peer, address = WithoutHeartbeats(), Peer(), free_address()
    dealer = raw(zmq.DEALER, RCVHWM=1, RCVBUF=4096)
    async with peer.server(sockets, address) as server:
        dealer.connect(address)
        dealer.send(call_frame(WAIT.name, 6))
        dealer.send(call_frame(FLOOD.name, 7, Ask(30_000)))
        await until(lambda: peer.gone, 30)
        await until(lambda: server.calls == 0)
        assert server.dropped["peer_slow"] == 1
        assert peer.cancelled.is_set()
        dealer.send(call_frame(ECHO.name, 8))  # the connection lives
        kinds = []
        while True:
            for envelope in unpack(await read(dealer)):
                kinds.append(envelope.kind)
                if envelope.kind == Kind.RESET:
                    assert envelope.call == 0
                    assert msgspec.msgpack.decode(envelope.body) == 7
            if kinds[-1] == Kind.REPLY:
                break
        assert kinds.count(Kind.RESET) == 1
        assert kinds[-2] == Kind.RESET
        assert len(peer.gone) == 1
        dealer.close()
        await until(lambda: len(peer.gone) == 2)
    sockets.close()


async def test_a_caller_that_is_stuck_hears_that_its_call_is_lost() -> None:
    """Its libzmq lives while its interpreter does nothing: it may be given up, or cut off by heartbeat; it is told."""
    async with connected() as (peer, _, client, _), caller(client.address, FLOOD, stuck=True) as child:
        await until(lambda: peer.gone, 60)
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdin.write(b"x" * 100_000)
        assert await asyncio.wait_for(child.stdout.readline(), 30) == b"peer_lost\n"


async def test_what_waits_for_a_slow_reader_arrives_in_order() -> None:
    sockets, peer, address = WithoutHeartbeats(), Peer(), free_address()
    dealer = raw(zmq.DEALER, RCVHWM=1, RCVBUF=4096)

    async def send(ask: Ask, call: object) -> Answer:
        for number in range(2000):
            call.send(Answer(number, bytes(3000)))  # type: ignore[attr-defined]
            for _ in range(4):
                await asyncio.sleep(0)
        return Answer(ask.number)

    peer.count = send  # type: ignore[method-assign, assignment]
    async with peer.server(sockets, address) as server:
        dealer.connect(address)
        dealer.send(call_frame("count", 1))
        await until(lambda: server._router._blocked, 30)
        numbers: list[int] = []
        while len(numbers) < 2001:
            numbers += [msgspec.msgpack.decode(each.body, type=Answer).number for each in unpack(await read(dealer))]
        assert numbers == [*range(2000), 1]
        assert not peer.gone
        dealer.close()
    sockets.close()


async def test_nobody_brings_an_identity_or_gets_the_answers_of_another() -> None:
    async with connected() as (peer, server, client, _):
        liars = [raw(zmq.DEALER, IDENTITY=b"gateway") for _ in range(2)]
        for liar in liars:
            liar.connect(client.address)
            liar.send(call_frame(ECHO.name, 1))
        await until(lambda: server.dropped["frame"])
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2
        assert peer.seen == [2]
        for liar in liars:
            liar.close()


# The client's side: whom it calls.


async def test_unsent_calls_get_no_more_than_the_time_to_connect_when_their_peer_dies() -> None:
    sockets, address = WithoutHeartbeats(), free_address()
    router = raw(zmq.ROUTER, RCVHWM=1, RCVBUF=4096)
    router.bind(address)
    client = RpcClient(sockets, address)
    await until(lambda: client.connected)
    calls: list[asyncio.Task[Answer]] = []
    full_s = 0.0
    while not full_s or time.monotonic() < full_s + 1.0:  # until the peer takes no more
        if not client._outgoing:
            calls.append(asyncio.create_task(client.call(WAIT, Ask(1, bytes(20_000)), timeout_s=600)))
            full_s = time.monotonic()
        await asyncio.sleep(0.001)
    router.close()
    ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    busy = client.busy
    client.close()  # before anything is asserted: a context that is left open ends in another test, and blocks it
    sockets.close()
    assert {type(error) for error in ended} == {PeerLost, NotConnected}  # sent already, and not yet
    assert not busy


async def test_calls_of_a_lost_peer_are_given_up_sooner_than_those_of_one_that_was_never_there() -> None:
    sockets, address, peer = Sockets(), free_address(), Peer()
    never, lost = RpcClient(sockets, free_address()), RpcClient(sockets, address)
    async with peer.server(sockets, address):
        await lost.call(ECHO, Ask(0), timeout_s=20)
    await until(lambda: not lost.connected)
    ended: list[RpcClient] = []

    async def call(client: RpcClient) -> None:
        with pytest.raises(NotConnected):
            await client.call(ECHO, Ask(1), timeout_s=20)
        ended.append(client)

    began_s = time.monotonic()
    await asyncio.gather(call(never), call(lost))
    assert ended == [lost, never]
    assert time.monotonic() >= began_s + CONNECT_S
    for client in (never, lost):
        client.close()
    sockets.close()


async def test_unsent_calls_go_to_a_peer_that_comes_back_in_time() -> None:
    sockets, address, peer = Sockets(), free_address(), Peer()
    server = await peer.server(sockets, address).__aenter__()
    client = RpcClient(sockets, address)
    await client.call(ECHO, Ask(0), timeout_s=20)
    await server.__aexit__(None, None, None)
    await until(lambda: not client.connected)
    calls = [asyncio.create_task(client.call(ECHO, Ask(number), timeout_s=30)) for number in range(1, 4)]
    await asyncio.sleep(0)
    async with peer.server(sockets, address):
        assert [(await call).number for call in calls] == [1, 2, 3]
    client.close()
    sockets.close()


async def test_calls_that_the_peer_gave_up_fail_and_later_ones_do_not() -> None:
    sockets, address = Sockets(), free_address()
    router = raw(zmq.ROUTER)
    router.bind(address)
    client = RpcClient(sockets, address)
    first, second = (asyncio.create_task(client.call(WAIT, Ask(n), timeout_s=600)) for n in range(2))
    calls: list[Envelope] = []
    while len(calls) < 2:
        await until(lambda: router.poll(0))
        identity, frame = router.recv_multipart()
        calls += unpack(frame)
    reply = Envelope(Kind.REPLY, calls[1].call, "", 0.0, encode_body(Answer(5)))
    reset = Envelope(Kind.RESET, 0, "", 0.0, encode_body(calls[0].call))
    router.send_multipart([identity, pack([reset, reply])])
    with pytest.raises(PeerLost):
        await asyncio.wait_for(first, 20)
    assert (await asyncio.wait_for(second, 20)).number == 5
    router.close()
    client.close()
    sockets.close()


# Both sides, with a network between them.
