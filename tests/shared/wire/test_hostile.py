"""Whatever comes over a socket, nothing of it reaches the event loop as an exception, and the socket serves on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidRequest, PolyphaseError
from shared.wire.broadcast import Publisher, Subscriber
from shared.wire.envelope import Envelope, Kind, encode_body, pack, unpack
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.shared.wire.peers import ECHO, WAIT, Answer, Ask, Peer, connected, until

DEEP = b"\x91" * 100_000
bodies = st.one_of(
    st.sampled_from(
        [b"", DEEP, b"\xa4\xff\xfe\xfd\xfc", b"\x81\xa6number\xa4\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc1"]
    ),
    st.binary(max_size=50),
    st.builds(encode_body, st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=5), st.lists)).map(bytes),
    st.just(bytes(encode_body(Ask(1)))),
)
envelopes = st.builds(
    Envelope,
    st.integers(-2, 9),
    st.integers(-2, 5) | st.just(1 << 63),
    st.sampled_from([ECHO.name, "wait", "", "nobody"]),
    st.floats() | st.just(5.0),
    bodies.map(msgspec.Raw),
)
frames = st.one_of(
    st.sampled_from([b"", DEEP, b"\xff" * 9, b"\x91\x95\x00\x01\xa4\xff\xff\xff\xff\x01\xc0"]),
    st.binary(max_size=60),
    st.lists(envelopes, max_size=4).map(pack),
    st.tuples(st.lists(envelopes, min_size=1, max_size=2).map(pack), st.integers(0, 60), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :]
    ),
)
messages = st.lists(st.lists(frames, min_size=1, max_size=2), min_size=1, max_size=20)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it; what reached the event loop, or was only caught at its edge, is an error."""
    escaped: list[object] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
        await test()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shared.wire.sockets.log.error", lambda *_, **told: escaped.append(told))
        asyncio.run(watched())
    assert not escaped


@settings(max_examples=60)
@given(messages)
def test_a_server_serves_on(messages: list[list[bytes]]) -> None:
    async def test() -> None:
        async with connected() as rpc:
            dealer = rpc.raw_socket(zmq.DEALER)
            dealer.connect(rpc.address)
            for message in messages:
                dealer.send_multipart(message)
            dealer.send(pack([Envelope(Kind.CALL, 77, "echo", 5.0, encode_body(Ask(77)))]))
            answered = False
            while not answered:  # after all that came before it
                await until(lambda: dealer.poll(0))
                answered = any(each.call == 77 and each.kind == Kind.REPLY for each in unpack(dealer.recv()))
            assert (await rpc.client.call(ECHO, Ask(1), timeout_s=20)).number == 1
            dealer.close()
            await until(lambda: rpc.server.calls == 0)

    run(test)


@settings(max_examples=60)
@given(messages)
def test_a_client_fails_its_call_or_has_its_answer(messages: list[list[bytes]]) -> None:
    async def test() -> None:
        sockets, address = Sockets(), free_address()
        router = sockets.bind(zmq.ROUTER, address)
        client = RpcClient(sockets, address)
        items: list[Answer] = []
        call = asyncio.create_task(client.call(ECHO, Ask(1), timeout_s=5, on_item=items.append))
        await until(lambda: router.poll(0))
        identity, frame = router.recv_multipart()
        number = unpack(frame)[0].call
        for message in messages:
            router.send_multipart([identity, *message])
        router.send_multipart([identity, pack([Envelope(Kind.REPLY, number, "", 0.0, encode_body(Answer(5)))])])
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(outcome, Answer | PolyphaseError)
        assert "no answer within" not in str(outcome)
        assert all(isinstance(item, Answer) for item in items)
        assert not client.busy
        router.close()
        client.close()
        sockets.close()

    run(test)


@settings(max_examples=30)
@given(messages)
def test_a_subscriber_goes_on(messages: list[list[bytes]]) -> None:
    async def test() -> None:
        sockets, address = Sockets(), free_address()
        got: list[Answer] = []
        subscriber = Subscriber(sockets, address, Answer, got.append)
        publisher = Publisher(sockets, address)
        await _until_heard(publisher, got)
        for message in messages:
            publisher._sockets[0].send_multipart(message)
        publisher.publish(Answer(7))
        await until(lambda: got[-1].number == 7)
        publisher.close()
        subscriber.close()
        sockets.close()

    run(test)


async def _until_heard(publisher: Publisher, got: list[Any]) -> None:
    async with asyncio.timeout(5):
        while not got:
            publisher.publish(Answer(0))
            await asyncio.sleep(0.01)


async def test_one_message_that_breaks_its_handler_leaves_none_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr("shared.wire.sockets.log.error", lambda text, **_: logged.append(text))
    sockets, address = Sockets(), free_address()
    seen: list[int] = []

    def fail(value: Answer) -> None:
        seen.append(value.number)
        raise ZeroDivisionError("a bug")

    subscriber = Subscriber(sockets, address, Answer, fail)
    publisher = Publisher(sockets, address)
    await _until_heard(publisher, seen)
    for number in range(1, 200):
        publisher.publish(Answer(number))
    await until(lambda: seen[-1] == 199)
    assert seen[-199:] == list(range(1, 200))
    assert len(logged) == len(seen)
    publisher.close()
    subscriber.close()
    sockets.close()


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0.0, -1.0, 1e30])
async def test_a_call_without_a_sane_deadline_is_refused(timeout_s: float) -> None:
    async with connected() as rpc:
        dealer = rpc.raw_socket(zmq.DEALER)
        dealer.connect(rpc.address)
        dealer.send(pack([Envelope(Kind.CALL, 1, ECHO.name, timeout_s, encode_body(Ask(1)))]))
        await until(lambda: dealer.poll(0))
        (answer,) = unpack(dealer.recv())
        assert answer.kind == Kind.ERROR
        assert InvalidRequest.code.encode() in bytes(answer.body)
        assert not rpc.peer.seen
        dealer.close()
        await until(lambda: rpc.server.calls == 0)


async def test_a_call_that_comes_again_is_not_carried_out_again() -> None:
    """Neither one that is under way nor one that is over; what the caller does next goes on."""
    async with connected() as rpc:
        dealer = rpc.raw_socket(zmq.DEALER)
        dealer.connect(rpc.address)
        done = pack([Envelope(Kind.CALL, 1, ECHO.name, 30.0, encode_body(Ask(1)))])
        under_way = pack([Envelope(Kind.CALL, 2, WAIT.name, 30.0, encode_body(Ask(2)))])
        heard: list[tuple[int, int]] = []

        async def hear(kind: Kind, number: int) -> None:
            while (kind, number) not in heard:
                await until(lambda: dealer.poll(0))
                heard.extend((each.kind, each.call) for each in unpack(dealer.recv()))

        dealer.send(done)
        await hear(Kind.REPLY, 1)
        for message in (under_way, done, under_way, done):
            dealer.send(message)
        dealer.send(pack([Envelope(Kind.CALL, 3, ECHO.name, 30.0, encode_body(Ask(3)))]))
        await hear(Kind.REPLY, 3)
        assert heard == [(Kind.REPLY, 1), (Kind.ERROR, 1), (Kind.ERROR, 1), (Kind.REPLY, 3)]
        assert rpc.peer.seen == [1, 3]
        assert rpc.server.calls == 1
        dealer.close()
        await until(lambda: rpc.server.calls == 0)


async def test_who_sends_what_cannot_be_read_is_told_that_its_calls_are_lost() -> None:
    """The message may have held one."""
    sockets, peer, address = Sockets(), Peer(), free_address()
    async with peer.server(sockets, address):
        client = RpcClient(sockets, address)
        await client.call(ECHO, Ask(1), timeout_s=20)
        client._socket.send([b"\xff"])
        with pytest.raises(PolyphaseError, match="gave the call up"):
            await asyncio.wait_for(client.call(WAIT, Ask(1), timeout_s=600), 10)
        client.close()
    sockets.close()
