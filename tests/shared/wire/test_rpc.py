"""Calls over real sockets on loopback: answers, streams, cancellation, deadlines, lost peers, garbage."""

import asyncio
import os
import socket as plain_socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from shared.errors import Busy, DeadlineExceeded, InvalidRequest, PeerLost, PolyphaseError
from shared.wire.envelope import Envelope, Kind, encode_body, pack
from shared.wire.methods import Method
from shared.wire.rpc_client import RpcClient
from shared.wire.rpc_server import MAX_MESSAGE_BYTES, RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets


class Ask(msgspec.Struct):
    number: int


class Answer(msgspec.Struct):
    number: int


ECHO = Method("echo", Ask, Answer, Answer)
COUNT = Method("count", Ask, Answer, Answer)
WAIT = Method("wait", Ask, Answer, Answer)
REFUSE = Method("refuse", Ask, Answer, Answer)
CRASH = Method("crash", Ask, Answer, Answer)


class Peer:
    """A server with every kind of handler, and what it saw."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.seen: list[int] = []

    async def echo(self, ask: Ask, _: ServerCall) -> Answer:
        self.seen.append(ask.number)
        return Answer(ask.number)

    async def count(self, ask: Ask, call: ServerCall) -> Answer:
        for number in range(ask.number):
            call.send(Answer(number))
        return Answer(ask.number)

    async def wait(self, ask: Ask, call: ServerCall) -> Answer:
        self.waiting.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()
        raise AssertionError

    async def refuse(self, ask: Ask, _: ServerCall) -> Answer:
        raise Busy("come back later")

    async def crash(self, ask: Ask, _: ServerCall) -> Answer:
        raise ZeroDivisionError("a bug")

    def server(self, sockets: Sockets, address: str) -> RpcServer:
        return RpcServer(
            sockets,
            address,
            {ECHO: self.echo, COUNT: self.count, WAIT: self.wait, REFUSE: self.refuse, CRASH: self.crash},
        )


def free_address() -> str:
    with plain_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def connected(curve: Curve | None = None) -> AsyncIterator[tuple[Peer, RpcServer, RpcClient, Sockets]]:
    sockets, peer, address = Sockets(curve), Peer(), free_address()
    try:
        async with peer.server(sockets, address) as server:
            client = RpcClient(sockets, address)
            try:
                yield peer, server, client, sockets
            finally:
                client.close()
    finally:
        sockets.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll a condition with a bound."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_call_is_answered() -> None:
    async with connected() as (_, _, client, _):
        answers = await asyncio.gather(*(client.call(ECHO, Ask(n), timeout_s=5) for n in range(200)))
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
        assert (await client.call(ECHO, Ask(7), timeout_s=5)).number == 7
        strangers = Sockets()
        plain = RpcClient(strangers, client.address)
        with pytest.raises(PeerLost):
            await plain.call(ECHO, Ask(1), timeout_s=5)
        plain.close()
        strangers.close()


async def test_cancelling_the_caller_cancels_the_handler() -> None:
    async with connected() as (peer, server, client, _):
        call = asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=30))
        await asyncio.wait_for(peer.waiting.wait(), 5)
        call.cancel()
        await asyncio.wait_for(peer.cancelled.wait(), 5)
        await until(lambda: server.calls == 0)


async def test_deadline_ends_both_sides() -> None:
    async with connected() as (peer, server, client, _):
        with pytest.raises(DeadlineExceeded):
            await client.call(WAIT, Ask(1), timeout_s=0.2)
        await asyncio.wait_for(peer.cancelled.wait(), 5)
        await until(lambda: server.calls == 0)


@pytest.mark.parametrize(
    ("method", "kind"), [(REFUSE, Busy), (CRASH, PolyphaseError), (Method("nope", Ask, Answer, Answer), InvalidRequest)]
)
async def test_errors_keep_their_class(method: Method[Ask, Answer, Answer], kind: type[PolyphaseError]) -> None:
    async with connected() as (_, _, client, _):
        with pytest.raises(PolyphaseError) as caught:
            await client.call(method, Ask(1), timeout_s=5)
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
    await asyncio.wait_for(peer.waiting.wait(), 5)
    await server.__aexit__(None, None, None)
    with pytest.raises(PeerLost):
        await asyncio.wait_for(call, 5)
    assert lost.is_set()
    second = Peer()
    async with second.server(sockets, address):
        assert (await client.call(ECHO, Ask(2), timeout_s=5)).number == 2
        assert second.seen == [2]  # what was given up does not arrive late
    client.close()
    sockets.close()


async def test_calls_of_a_vanished_client_are_cancelled() -> None:
    async with connected() as (peer, server, client, sockets):

        async def drip(ask: Ask, call: ServerCall) -> Answer:
            try:
                while True:
                    call.send(Answer(0))
                    await asyncio.sleep(0.01)
            finally:
                peer.cancelled.set()

        server._handlers[ECHO.name] = (ECHO, drip)
        other = RpcClient(sockets, client.address)
        got = asyncio.Event()
        call = asyncio.create_task(other.call(ECHO, Ask(1), timeout_s=30, on_item=lambda _: got.set()))
        await asyncio.wait_for(got.wait(), 5)
        other.close()
        with pytest.raises(PeerLost):
            await call
        await asyncio.wait_for(peer.cancelled.wait(), 5)
        assert server.dropped["peer_gone"] >= 1


async def _garbage(sockets: Sockets, address: str) -> None:
    dealer = sockets.connect(zmq.DEALER, address)
    dealer.connect(address)
    valid = Envelope(Kind.CALL, 1, ECHO.name, 1.0, encode_body({"number": "no number"}))
    for frames in (
        [b""], [b"\xff" * 100], [b"a", b"b", b"c"], [os.urandom(1000)], [b"\x91" * 5000],
        [b"x" * (MAX_MESSAGE_BYTES + 1)], [pack([Envelope(99, 1, ECHO.name, 1.0, encode_body(None))])],
        [pack([valid])],
    ):  # fmt: skip
        dealer.send_multipart(frames)
    reader = dealer.poll(5000)
    assert reader  # the malformed request, the last of them, is answered
    dealer.close()


async def test_garbage_is_dropped_and_counted() -> None:
    async with connected() as (_, server, client, sockets):
        assert (await client.call(ECHO, Ask(1), timeout_s=5)).number == 1
        await asyncio.to_thread(_garbage_in_thread, sockets, client.address)
        await until(lambda: sum(server.dropped.values()) >= 8)
        assert server.dropped["garbage"] >= 3
        assert server.dropped["request"] == 1
        assert server.dropped["frame"] == 2
        assert (await client.call(ECHO, Ask(2), timeout_s=5)).number == 2


def _garbage_in_thread(sockets: Sockets, address: str) -> None:
    asyncio.run(_garbage(sockets, address))


async def test_a_plain_tcp_client_does_no_harm() -> None:
    async with connected() as (_, _, client, _):
        host, port = client.address.removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        await writer.drain()
        writer.close()
        assert (await client.call(ECHO, Ask(3), timeout_s=5)).number == 3


async def test_items_of_one_turn_leave_as_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (_, server, client, _):
        assert (await client.call(ECHO, Ask(1), timeout_s=5)).number == 1
        sent: list[int] = []
        send = server._socket.send
        monkeypatch.setattr(server._socket, "send", lambda frames: (sent.append(len(frames[1])), send(frames)))
        await client.call(COUNT, Ask(500), timeout_s=5)
        assert len(sent) <= 2  # the items, and the reply if it came in a turn of its own


