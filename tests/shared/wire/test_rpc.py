"""Calls over real sockets on loopback: answers, streams, cancellation, deadlines, lost peers, garbage."""

import asyncio
import os

import pytest
import zmq

from shared.errors import Busy, DeadlineExceeded, InvalidRequest, PeerLost, PolyphaseError
from shared.wire.envelope import MAX_MESSAGE_BYTES, Envelope, Kind, encode_body, pack, unpack
from shared.wire.messages import Method
from shared.wire.rpc_client import RpcClient
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address
from tests.shared.wire.peers import COUNT, CRASH, ECHO, REFUSE, WAIT, Answer, Ask, Peer, connected, until


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
