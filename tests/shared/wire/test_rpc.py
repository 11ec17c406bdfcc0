"""Calls over real sockets on loopback: answers, streams, cancellation, deadlines, lost peers, garbage."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from shared.errors import Busy, DeadlineExceeded, InvalidRequest, NotConnected, PeerLost, PolyphaseError, Unavailable
from shared.wire import rpc_client
from shared.wire.envelope import MAX_MESSAGE_BYTES, Envelope, Kind, encode_body, pack, unpack
from shared.wire.messages import Method
from shared.wire.rpc_client import CONNECT_S, RpcClient, RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address
from tests.shared.wire.peers import COUNT, CRASH, ECHO, FLOOD, REFUSE, WAIT, Answer, Ask, Peer, caller, connected, until
from tests.shared.wire.proxy import Proxy


async def test_a_call_is_answered() -> None:
    async with connected() as (_, _, client, _):
        answers = await asyncio.gather(*(client.call(ECHO, Ask(n), timeout_s=20) for n in range(200)))
        assert [answer.number for answer in answers] == list(range(200))


async def test_items_come_in_order_and_before_the_reply() -> None:
    async with connected() as (_, _, client, _):
        items: list[int] = []
        reply = await client.call(COUNT, Ask(1000), timeout_s=5, on_item=lambda item: items.append(item.number))
        assert items == list(range(1000))
        assert reply.number == 1000


async def test_curve_encrypts_and_refuses_strangers() -> None:
    public, secret = zmq.curve_keypair()
    async with connected(Curve(public.decode(), secret.decode())) as (_, _, client, _):
        assert (await client.call(ECHO, Ask(7), timeout_s=20)).number == 7
        strangers = Sockets()
        plain = RpcClient(strangers, client.address)
        with pytest.raises(PeerLost):
            await plain.call(ECHO, Ask(1), timeout_s=20)
        plain.close()
        strangers.close()


async def test_cancelling_the_caller_cancels_the_handler() -> None:
    async with connected() as (peer, server, client, _):
        call = asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=30))
        await asyncio.wait_for(peer.waiting.wait(), 20)
        call.cancel()
        await asyncio.wait_for(peer.cancelled.wait(), 20)
        await until(lambda: server.calls == 0)


async def test_deadline_ends_both_sides() -> None:
    async with connected() as (peer, server, client, _):
        async with asyncio.timeout(20):
            while not peer.waiting.is_set():  # on a busy machine the time may be over before it is sent
                with pytest.raises(DeadlineExceeded):
                    await client.call(WAIT, Ask(1), timeout_s=0.2)
        await asyncio.wait_for(peer.cancelled.wait(), 20)
        await until(lambda: server.calls == 0)


@pytest.mark.parametrize(
    ("method", "kind"), [(REFUSE, Busy), (CRASH, PolyphaseError), (Method("nope", Ask, Answer, Answer), InvalidRequest)]
)
async def test_errors_keep_their_class(method: Method[Ask, Answer, Answer], kind: type[PolyphaseError]) -> None:
    async with connected() as (_, _, client, _):
        with pytest.raises(PolyphaseError) as caught:
            await client.call(method, Ask(1), timeout_s=20)
        assert type(caught.value) is kind


async def test_no_peer_fails_soon() -> None:
    sockets = Sockets()
    client = RpcClient(sockets, free_address())
    with pytest.raises(PeerLost):
        await client.call(ECHO, Ask(1), timeout_s=30)
    client.close()
    sockets.close()


async def test_a_lost_peer_fails_its_calls_at_once_and_a_new_one_is_found() -> None:
    sockets, address = Sockets(), free_address()
    peer, lost = Peer(), asyncio.Event()
    server = await peer.server(sockets, address).__aenter__()
    client = RpcClient(sockets, address)
    client.on_lost(lost.set)
    call = asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=30))
    await asyncio.wait_for(peer.waiting.wait(), 20)
    await server.__aexit__(None, None, None)
    with pytest.raises(PeerLost):
        await asyncio.wait_for(call, 20)
    assert lost.is_set()
    second = Peer()
    async with second.server(sockets, address):
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2
        assert second.seen == [2]  # what was given up does not arrive late
    client.close()
    sockets.close()


async def _garbage(sockets: Sockets, address: str) -> None:
    dealer = sockets.unconnected(zmq.DEALER)
    dealer.connect(address)
    valid = Envelope(Kind.CALL, 1, ECHO.name, 1.0, encode_body({"number": "no number"}))
    for frames in (
        [b""],
        [b"\xff" * 100],
        [b"a", b"b", b"c"],
        [os.urandom(1000)],
        [b"\x91" * 5000],
        [b"x" * (MAX_MESSAGE_BYTES + 1)],
        [pack([Envelope(99, 1, ECHO.name, 1.0, encode_body(None))])],
        [pack([valid])],
    ):
        dealer.send_multipart(frames)
    kinds: list[int] = []
    while Kind.ERROR not in kinds:  # the malformed request, the last of them, is answered
        assert dealer.poll(20_000)
        kinds += [envelope.kind for envelope in unpack(dealer.recv())]
    assert kinds.count(Kind.RESET) == len(kinds) - 1 > 0
    dealer.close()


async def test_garbage_is_dropped_and_counted() -> None:
    async with connected() as (_, server, client, sockets):
        assert (await client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        await asyncio.to_thread(_garbage_in_thread, sockets, client.address)
        await until(lambda: sum(server.dropped.values()) >= 8)
        assert server.dropped["garbage"] >= 3
        assert server.dropped["request"] == 1
        assert server.dropped["frame"] == 2
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2


def _garbage_in_thread(sockets: Sockets, address: str) -> None:
    asyncio.run(_garbage(sockets, address))


async def test_a_plain_tcp_client_does_no_harm() -> None:
    async with connected() as (_, _, client, _):
        host, port = client.address.removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        await writer.drain()
        writer.close()
        assert (await client.call(ECHO, Ask(3), timeout_s=20)).number == 3


async def test_items_of_one_turn_leave_as_one_message() -> None:
    async with connected() as (_, _, client, sockets):
        dealer = sockets.unconnected(zmq.DEALER)
        dealer.connect(client.address)
        dealer.send(pack([Envelope(Kind.CALL, 1, COUNT.name, 5.0, encode_body(Ask(500)))]))
        messages: list[list[Envelope]] = []
        while not messages or messages[-1][-1].kind != Kind.REPLY:
            await until(lambda: dealer.poll(0))
            messages.append(unpack(dealer.recv()))
        assert sum(len(message) for message in messages) == 501
        assert len(messages) <= 2  # the items, and the reply if it came in a turn of its own
        dealer.close()


async def test_calls_that_together_are_larger_than_a_message_are_all_answered() -> None:
    async with connected() as (_, _, client, _):
        asks = [Ask(number, bytes(1_200_000)) for number in range(16)]
        answers = await asyncio.gather(*(client.call(ECHO, ask, timeout_s=30) for ask in asks))
        assert [answer.number for answer in answers] == list(range(16))


async def test_a_request_that_no_server_takes_is_refused_at_once() -> None:
    async with connected() as (_, _, client, _):
        with pytest.raises(InvalidRequest, match=r"echo: .* bytes, more than"):
            await client.call(ECHO, Ask(1, bytes(MAX_MESSAGE_BYTES)), timeout_s=30)
        assert not client.busy


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("reply", [Answer(1 << 80), Answer(1, bytes(64 << 20)), object()])
async def test_an_answer_that_cannot_be_sent_is_an_error_of_its_call(reply: object, waits: bool) -> None:
    sockets, address = Sockets(), free_address()

    async def answer(_: Ask, __: ServerCall) -> object:
        return reply

    async with RpcServer(sockets, address, {ECHO: answer if waits else lambda _, __: reply}):
        client = RpcClient(sockets, address)
        with pytest.raises(PolyphaseError, match=r"echo failed|too large"):
            await client.call(ECHO, Ask(1), timeout_s=30)
        client.close()
    sockets.close()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), TimeoutError(), PolyphaseError("\udcff")])
async def test_whatever_a_handler_raises_is_answered(error: BaseException, waits: bool) -> None:
    sockets, address = Sockets(), free_address()

    async def fail(_: Ask, __: ServerCall) -> Answer:
        raise error

    def fail_at_once(_: Ask, __: ServerCall) -> Answer:
        raise error

    async with RpcServer(sockets, address, {ECHO: fail if waits else fail_at_once}):
        client = RpcClient(sockets, address)
        with pytest.raises(PolyphaseError) as caught:
            await asyncio.wait_for(client.call(ECHO, Ask(1), timeout_s=30), 10)
        assert type(caught.value) is PolyphaseError
        client.close()
    sockets.close()


async def test_too_many_calls_are_refused_and_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.wire.rpc_server.MAX_CALLS_A_PEER", 3)
    async with connected() as (_, server, client, _):
        calls = [asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=30)) for _ in range(3)]
        await until(lambda: server.calls == 3)
        with pytest.raises(Busy):
            await client.call(ECHO, Ask(1), timeout_s=30)
        for call in calls:
            call.cancel()
        await until(lambda: server.calls == 0)
        assert (await client.call(ECHO, Ask(1), timeout_s=30)).number == 1


# Clients by address: those of addresses that are gone do not pile up


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_hundreds_of_replaced_instances_leave_nothing(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
    peer, before = Peer(), 0
    with RpcClients(sockets) as clients:
        for number in range(400):
            address = free_address()
            async with peer.server(sockets, address):
                assert (await clients.to(address).call(ECHO, Ask(number), timeout_s=20)).number == number
            client = clients.to(address)
            await until(lambda client=client: not client.connected)  # type: ignore[misc]
            clients.sweep()
            if number == 9:
                before = open_files()
        assert len(clients) == 0
        await until(lambda: open_files() <= before + 20)  # libzmq closes in its own time


async def test_more_instances_than_libzmq_has_sockets_by_default(sockets: Sockets) -> None:
    with RpcClients(sockets) as clients:
        for port in range(20_000, 20_400):
            clients.to(f"tcp://127.0.0.1:{port}")
        assert len(clients) == 400


async def test_what_is_used_or_to_be_kept_stays(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, address, kept, gone = Peer(), free_address(), free_address(), free_address()
    with RpcClients(sockets, keep=[kept]) as clients:
        async with peer.server(sockets, address):
            call = asyncio.create_task(clients.to(address).call(WAIT, Ask(1), timeout_s=30))
            await asyncio.wait_for(peer.waiting.wait(), 20)
            clients.to(kept)
            clients.to(gone)
            clients.sweep()
            assert len(clients) == 3  # not yet
            monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
            clients.sweep()
            assert len(clients) == 2
            monkeypatch.setattr(rpc_client, "IDLE_S", 0.0)
            clients.sweep()
            assert len(clients) == 2  # a call is under way
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not clients.to(address).busy)
            clients.sweep()
            assert len(clients) == 1
            assert (await clients.to(address).call(ECHO, Ask(2), timeout_s=20)).number == 2


async def test_a_closed_client_fails_at_once(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
    with RpcClients(sockets) as clients:
        client = clients.to(free_address())
        clients.sweep()
        with pytest.raises(PeerLost, match="closed"):
            await client.call(ECHO, Ask(1), timeout_s=600)


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "", "tcp://256.1.1.1:x"])
async def test_an_address_that_makes_no_sense_is_a_clear_error(sockets: Sockets, address: str) -> None:
    with RpcClients(sockets) as clients:
        before = 0
        for _ in range(10):
            with pytest.raises(Unavailable, match="no connection to"):
                clients.to(address)
            before = before or open_files()  # libzmq's own ones included
        assert len(clients) == 0
        await until(lambda: open_files() <= before + 3)


async def test_an_address_that_is_taken_leaves_no_socket_behind(sockets: Sockets) -> None:
    peer, address = Peer(), free_address()
    async with peer.server(sockets, address):
        before = open_files()
        for _ in range(10):
            with pytest.raises(zmq.ZMQError):
                await peer.server(sockets, address).__aenter__()
        await until(lambda: open_files() <= before + 3)


# Who is gone is noticed by both sides, and nothing waits for it: peers killed, frozen, cut off, or not reading


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


# Connections that break on the way, both ends living


@asynccontextmanager
async def apart() -> AsyncIterator[tuple[Peer, Proxy, RpcClient]]:
    """A client and a server with a proxy between them."""
    async with connected() as (peer, _, near, sockets), Proxy(near.address).running() as proxy:
        client = RpcClient(sockets, proxy.address)
        try:
            assert (await client.call(ECHO, Ask(1), timeout_s=20)).number == 1
            yield peer, proxy, client
        finally:
            client.close()


async def test_a_partition_is_noticed_on_both_sides_and_healed() -> None:
    async with apart() as (peer, proxy, client):
        call = asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=600))
        await asyncio.wait_for(peer.waiting.wait(), 20)
        proxy.hold = True
        with pytest.raises(PeerLost):
            await asyncio.wait_for(call, 20)
        await until(lambda: peer.gone == peer.callers, 20)
        assert peer.cancelled.is_set()
        proxy.hold = False
        await until(lambda: client.connected, 20)
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2


async def test_a_caller_that_connects_again_is_another_one() -> None:
    async with apart() as (peer, proxy, client):
        call = asyncio.create_task(client.call(FLOOD, Ask(10), timeout_s=600))
        await asyncio.wait_for(peer.waiting.wait(), 20)
        proxy.cut()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(call, 20)
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2
        await until(lambda: peer.gone)
        first, second = peer.callers
        assert peer.gone == [first]
        assert second != first
        assert peer.cancelled.is_set()


@pytest.mark.parametrize("missing", [1, 3, 50])
async def test_bytes_lost_on_the_way_cost_the_calls_under_way_and_no_more(missing: int) -> None:
    async with apart() as (_, proxy, client):
        left = [3]

        def alter(data: bytes) -> bytes:
            left[0] -= 1
            middle = len(data) // 2
            return data if left[0] != 0 else data[:middle] + data[middle + missing :]

        proxy.up = proxy.down = alter
        outcomes = []
        for number in range(20):
            call = client.call(ECHO, Ask(number), timeout_s=30)
            outcomes += await asyncio.gather(call, return_exceptions=True)
        failed = [outcome for outcome in outcomes if not isinstance(outcome, Answer)]
        assert len(failed) <= 3
        assert all(isinstance(each, PolyphaseError) for each in failed)
        assert not any(isinstance(each, DeadlineExceeded) for each in failed)  # lost without a word
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2
