"""Calls over real sockets on loopback: answers, items, cancellation, deadlines, errors, limits, malformed messages.

`connected()` opens a server (`rpc.server`) and a client of it (`rpc.client`); `rpc.peer` records what the handlers saw.
ECHO answers with the number of the request; COUNT sends that many items before its reply; WAIT runs until cancelled.
REFUSE raises Busy, and CRASH an error that is not ours. A test may replace handlers: `connected(handlers={ECHO: …})`.
"""

import asyncio
import os
from collections.abc import Callable

import pytest
import zmq

from shared.errors import Busy, DeadlineExceeded, InvalidRequest, PeerLost, PolyphaseError
from shared.runtime.wire_version import OURS
from shared.wire.envelope import MAX_MESSAGE_BYTES, Envelope, Kind, encode_body, pack
from shared.wire.messages import Method
from shared.wire.rpc_server import Handler, ServerCall
from shared.wire.sockets import Sockets
from tests.shared.wire.peers import (
    COUNT,
    CRASH,
    ECHO,
    REFUSE,
    WAIT,
    Answer,
    Ask,
    call_message,
    connected,
    new_curve,
    receive,
    until,
)


def coroutine_handler(act: Callable[[], object]) -> Handler:
    """A handler that the server runs in a task."""

    async def handle(_: Ask, __: ServerCall) -> object:
        return act()

    return handle


def plain_handler(act: Callable[[], object]) -> Handler:
    """A handler that the server runs where it reads the call."""

    def handle(_: Ask, __: ServerCall) -> object:
        return act()

    return handle


# Answers and items


async def test_each_of_many_concurrent_calls_gets_its_own_answer() -> None:
    async with connected() as rpc:
        answers = await asyncio.gather(*(rpc.client.call(ECHO, Ask(n), timeout_s=20) for n in range(200)))
        assert [answer.number for answer in answers] == list(range(200))


async def test_items_arrive_in_order_and_before_the_reply() -> None:
    async with connected() as rpc:
        items: list[int] = []
        reply = await rpc.client.call(COUNT, Ask(1000), timeout_s=5, on_item=lambda item: items.append(item.number))
        assert items == list(range(1000))
        assert reply.number == 1000


async def test_items_of_one_turn_of_the_loop_leave_as_one_message() -> None:
    async with connected() as rpc:
        dealer = rpc.raw_socket(zmq.DEALER)
        dealer.connect(rpc.address)
        dealer.send(call_message(COUNT, 1, Ask(500)))
        messages = [await receive(dealer)]
        while messages[-1][-1].kind != Kind.REPLY:
            messages.append(await receive(dealer))
        assert sum(len(message) for message in messages) == 501
        assert len(messages) <= 2  # the items, and the reply if it came in a turn of its own


async def test_calls_with_curve_keys_are_answered_and_a_client_without_keys_is_refused() -> None:
    async with connected(Sockets(new_curve())) as rpc, connected() as without_keys:
        assert (await rpc.client.call(ECHO, Ask(7), timeout_s=20)).number == 7
        stranger = without_keys.connect(rpc.address)
        with pytest.raises(PeerLost):
            await stranger.call(ECHO, Ask(1), timeout_s=20)


# The end of a call


async def test_cancelling_a_call_cancels_its_handler() -> None:
    async with connected() as rpc:
        call = asyncio.create_task(rpc.client.call(WAIT, Ask(1), timeout_s=30))
        await asyncio.wait_for(rpc.peer.waiting.wait(), 20)
        call.cancel()
        await asyncio.wait_for(rpc.peer.cancelled.wait(), 20)
        await until(lambda: rpc.server.calls == 0)


async def test_the_deadline_of_a_call_ends_it_at_the_client_and_at_the_server() -> None:
    async with connected() as rpc:
        async with asyncio.timeout(20):
            while not rpc.peer.waiting.is_set():  # on a busy machine the time may be over before the call is sent
                with pytest.raises(DeadlineExceeded):
                    await rpc.client.call(WAIT, Ask(1), timeout_s=0.2)
        await asyncio.wait_for(rpc.peer.cancelled.wait(), 20)
        await until(lambda: rpc.server.calls == 0)


@pytest.mark.parametrize(
    ("method", "kind"), [(REFUSE, Busy), (CRASH, PolyphaseError), (Method("nope", Ask, Answer, Answer), InvalidRequest)]
)
async def test_an_error_at_the_server_keeps_its_class_at_the_client(
    method: Method[Ask, Answer, Answer], kind: type[PolyphaseError]
) -> None:
    async with connected() as rpc:
        with pytest.raises(PolyphaseError) as caught:
            await rpc.client.call(method, Ask(1), timeout_s=20)
        assert type(caught.value) is kind


@pytest.mark.parametrize("handler", [coroutine_handler, plain_handler])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), TimeoutError(), PolyphaseError("\udcff")])
async def test_a_handler_that_raises_an_unusual_error_fails_its_call(
    error: BaseException, handler: Callable[[Callable[[], object]], Handler]
) -> None:
    def fail() -> object:
        raise error

    async with connected(handlers={ECHO: handler(fail)}) as rpc:
        with pytest.raises(PolyphaseError) as caught:
            await asyncio.wait_for(rpc.client.call(ECHO, Ask(1), timeout_s=30), 10)
        assert type(caught.value) is PolyphaseError


@pytest.mark.parametrize("handler", [coroutine_handler, plain_handler])
@pytest.mark.parametrize("reply", [Answer(1 << 80), Answer(1, bytes(64 << 20)), object()])
async def test_a_reply_that_cannot_be_sent_fails_its_call(
    reply: object, handler: Callable[[Callable[[], object]], Handler]
) -> None:
    async with connected(handlers={ECHO: handler(lambda: reply)}) as rpc:
        with pytest.raises(PolyphaseError, match=r"echo failed|too large"):
            await rpc.client.call(ECHO, Ask(1), timeout_s=30)


# Limits


async def test_concurrent_calls_that_together_exceed_the_largest_message_are_all_answered() -> None:
    async with connected() as rpc:
        asks = [Ask(number, bytes(1_200_000)) for number in range(16)]
        answers = await asyncio.gather(*(rpc.client.call(ECHO, ask, timeout_s=30) for ask in asks))
        assert [answer.number for answer in answers] == list(range(16))


async def test_a_request_that_exceeds_the_largest_message_is_refused_by_the_client() -> None:
    async with connected() as rpc:
        with pytest.raises(InvalidRequest, match=r"echo: .* bytes, more than"):
            await rpc.client.call(ECHO, Ask(1, bytes(MAX_MESSAGE_BYTES)), timeout_s=30)
        assert not rpc.client.busy


async def test_a_client_with_too_many_calls_under_way_is_refused_another_until_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.wire.rpc_server.MAX_CALLS_A_PEER", 3)
    async with connected() as rpc:
        calls = [asyncio.create_task(rpc.client.call(WAIT, Ask(1), timeout_s=30)) for _ in range(3)]
        await until(lambda: rpc.server.calls == 3)
        with pytest.raises(Busy):
            await rpc.client.call(ECHO, Ask(1), timeout_s=30)
        for call in calls:
            call.cancel()
        await until(lambda: rpc.server.calls == 0)
        assert (await rpc.client.call(ECHO, Ask(1), timeout_s=30)).number == 1


# Messages that no client of ours sends

NO_CALL = Envelope(99, 1, ECHO.name, 1.0, encode_body(None))
BAD_REQUEST = Envelope(Kind.CALL, 1, ECHO.name, 1.0, encode_body({"number": "no number"}))


@pytest.mark.parametrize(
    ("frames", "counter", "answer"),
    [
        pytest.param([b""], "garbage", Kind.RESET, id="empty"),
        pytest.param([b"\xff" * 100], "garbage", Kind.RESET, id="no header"),
        pytest.param([b"\x91" * 5000], "garbage", Kind.RESET, id="nested too deeply"),
        pytest.param([OURS.header + b"\xff" * 100], "garbage", Kind.RESET, id="no envelopes after the header"),
        pytest.param([b"a", b"b", b"c"], "frame", Kind.RESET, id="three frames"),
        pytest.param([b"x" * (MAX_MESSAGE_BYTES + 1)], "frame", Kind.RESET, id="too large"),
        pytest.param([pack([NO_CALL])], "kind", None, id="unknown kind"),
        pytest.param([pack([BAD_REQUEST])], "request", Kind.ERROR, id="request of another type"),
    ],
)
async def test_a_malformed_message_is_dropped_and_counted_and_calls_go_on(
    frames: list[bytes], counter: str, answer: Kind | None
) -> None:
    async with connected() as rpc:
        assert (await rpc.client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        dealer = rpc.raw_socket(zmq.DEALER)
        dealer.connect(rpc.address)
        dealer.send_multipart(frames)
        await until(lambda: rpc.server.dropped.total())
        assert rpc.server.dropped == {counter: 1}
        if answer is not None:
            [envelope] = await receive(dealer)
            assert envelope.kind == answer
        assert (await rpc.client.call(ECHO, Ask(2), timeout_s=20)).number == 2


async def test_random_bytes_are_dropped_and_calls_go_on() -> None:
    async with connected() as rpc:
        dealer = rpc.raw_socket(zmq.DEALER)
        dealer.connect(rpc.address)
        dealer.send(os.urandom(1000))
        await until(lambda: rpc.server.dropped.total())
        assert (await rpc.client.call(ECHO, Ask(1), timeout_s=20)).number == 1


async def test_a_plain_tcp_client_does_not_disturb_calls() -> None:
    async with connected() as rpc:
        host, port = rpc.address.removeprefix("tcp://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        await writer.drain()
        writer.close()
        assert (await rpc.client.call(ECHO, Ask(3), timeout_s=20)).number == 3


async def test_callers_that_choose_their_identity_are_not_served() -> None:
    """They could choose the identity of another caller, and get its answers."""
    async with connected() as rpc:
        for _ in range(2):
            liar = rpc.raw_socket(zmq.DEALER)
            liar.setsockopt(zmq.IDENTITY, b"gateway")
            liar.connect(rpc.address)
            liar.send(call_message(ECHO, 1, Ask(1)))
        await until(lambda: rpc.server.dropped["frame"])
        assert (await rpc.client.call(ECHO, Ask(2), timeout_s=20)).number == 2
        assert rpc.peer.seen == [2]
