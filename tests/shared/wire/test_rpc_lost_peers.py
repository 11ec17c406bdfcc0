"""Lost peers: each side notices that the other is killed, frozen, cut off or not reading, and no call waits for it."""

import asyncio
import time

import msgspec
import pytest
import zmq

from shared.errors import DeadlineExceeded, NotConnected, PeerLost, PolyphaseError
from shared.wire import rpc_client
from shared.wire.envelope import Envelope, Kind, encode_body, pack, unpack
from shared.wire.rpc_client import CONNECT_S, RpcClient
from shared.wire.rpc_server import ServerCall
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.shared.wire.peers import (
    COUNT,
    ECHO,
    FLOOD,
    WAIT,
    Answer,
    Ask,
    Loopback,
    Peer,
    call_message,
    caller_process,
    connected,
    new_curve,
    next_message,
    receive,
    until,
    until_disconnected,
)
from tests.shared.wire.proxy import Proxy


class ShortQueues(Sockets):
    """For peers that do not read: what cannot be sent is soon left to our code, and not to libzmq and the kernel.

    There are no heartbeats, because libzmq does not answer them while its queue is full.
    """

    def __init__(self, queued_messages: int) -> None:
        super().__init__()
        self._queued_messages = queued_messages

    def unbound(self, kind: int) -> zmq.Socket[bytes]:
        return self._shortened(super().unbound(kind))

    def unconnected(self, kind: int) -> zmq.Socket[bytes]:
        return self._shortened(super().unconnected(kind))

    def _shortened(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        socket.setsockopt(zmq.SNDHWM, self._queued_messages)
        socket.setsockopt(zmq.SNDBUF, 65_536)
        return socket


def slow_reader(rpc: Loopback) -> zmq.Socket[bytes]:
    """A caller with almost no room for what it has not read."""
    dealer = rpc.raw_socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.RCVBUF, 4096)
    dealer.connect(rpc.address)
    return dealer


# The server is lost


async def test_a_call_to_an_address_without_a_server_fails_before_its_deadline() -> None:
    async with connected() as rpc:
        client = rpc.connect(free_address())
        with pytest.raises(PeerLost):
            await client.call(ECHO, Ask(1), timeout_s=30)


async def test_calls_of_a_lost_server_fail_at_once_and_later_ones_reach_its_successor() -> None:
    async with connected() as rpc:
        lost = asyncio.Event()
        rpc.client.on_lost(lost.set)
        call = asyncio.create_task(rpc.client.call(WAIT, Ask(1), timeout_s=30))
        await asyncio.wait_for(rpc.peer.waiting.wait(), 20)
        await rpc.stop_server()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(call, 20)
        assert lost.is_set()
        successor = Peer()
        await rpc.start_server(successor)
        assert (await rpc.client.call(ECHO, Ask(2), timeout_s=20)).number == 2
        assert successor.seen == [2]
        assert not successor.waiting.is_set()  # the call that failed does not arrive late


async def test_unsent_calls_reach_a_server_that_comes_back_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "RECONNECT_S", 20.0)  # in which a busy machine starts the server again
    async with connected() as rpc:
        await rpc.client.call(ECHO, Ask(0), timeout_s=20)
        await rpc.stop_server()
        await until_disconnected(rpc.client)
        calls = [asyncio.create_task(rpc.client.call(ECHO, Ask(number), timeout_s=30)) for number in range(1, 4)]
        await until(lambda: rpc.client.busy)
        await rpc.start_server(Peer())
        assert [(await call).number for call in calls] == [1, 2, 3]


async def test_calls_wait_less_for_a_lost_server_than_for_one_that_was_never_connected() -> None:
    async with connected() as rpc:
        never, lost = rpc.connect(free_address()), rpc.client
        await lost.call(ECHO, Ask(0), timeout_s=20)
        await rpc.stop_server()
        await until_disconnected(lost)
        ended: list[RpcClient] = []

        async def call(client: RpcClient) -> None:
            with pytest.raises(NotConnected):
                await client.call(ECHO, Ask(1), timeout_s=20)
            ended.append(client)

        began_mono = time.monotonic()
        await asyncio.gather(call(never), call(lost))
        assert ended == [lost, never]
        assert time.monotonic() >= began_mono + CONNECT_S  # a timer, so true on a busy machine, too


async def test_unsent_calls_fail_soon_when_their_server_stops_reading_and_dies() -> None:
    async with connected(ShortQueues(queued_messages=1)) as rpc:
        address = free_address()
        router = rpc.raw_socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVHWM, 1)
        router.setsockopt(zmq.RCVBUF, 65_536)
        router.bind(address)
        client = rpc.connect(address)
        await until(lambda: client.connected)
        # Each call is a message of its own, and there is room for a few between the two.
        ask = Ask(1, bytes(600_000))
        calls = [asyncio.create_task(client.call(WAIT, ask, timeout_s=600)) for _ in range(20)]
        await until(lambda: router.poll(0))
        router.close()
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert {type(error) for error in ended} == {PeerLost, NotConnected}  # sent already, and not yet
        assert not client.busy


async def test_calls_that_the_server_gave_up_fail_and_later_ones_do_not() -> None:
    async with connected() as rpc:
        address = free_address()
        router = rpc.raw_socket(zmq.ROUTER)
        router.bind(address)
        client = rpc.connect(address)
        first, second = (asyncio.create_task(client.call(WAIT, Ask(n), timeout_s=600)) for n in range(2))
        calls: list[Envelope] = []
        while len(calls) < 2:
            await until(lambda: router.poll(0))
            identity, message = router.recv_multipart()
            calls += unpack(message)
        reset = Envelope(Kind.RESET, 0, "", 0.0, encode_body(calls[0].call))
        reply = Envelope(Kind.REPLY, calls[1].call, "", 0.0, encode_body(Answer(5)))
        router.send_multipart([identity, pack([reset, reply])])
        with pytest.raises(PeerLost):
            await asyncio.wait_for(first, 20)
        assert (await asyncio.wait_for(second, 20)).number == 5


# The caller is lost


async def test_the_call_of_a_killed_caller_is_cancelled_though_nothing_is_sent_to_it() -> None:
    async with connected() as rpc:
        async with caller_process(rpc.address, WAIT) as caller:
            await asyncio.wait_for(rpc.peer.waiting.wait(), 90)
            caller.kill()
            await until(lambda: rpc.peer.gone)
            await asyncio.wait_for(rpc.peer.cancelled.wait(), 20)
        assert (await rpc.client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        assert rpc.peer.callers[0] not in rpc.peer.gone
        assert len(rpc.peer.gone) == 1
        assert rpc.server.calls == 0
        assert rpc.server.dropped["peer_gone"] == 1


async def test_a_killed_caller_without_a_call_under_way_is_reported_as_gone() -> None:
    async with connected() as rpc, caller_process(rpc.address, ECHO) as caller:
        assert await caller.outcome() == "answered"
        caller.kill()
        await until(lambda: rpc.peer.gone)
        assert rpc.peer.gone == rpc.peer.callers


async def test_a_caller_with_curve_keys_that_closes_is_reported_as_gone() -> None:
    async with connected(Sockets(new_curve())) as rpc:
        client = rpc.connect(rpc.address)
        call = asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=30))
        await asyncio.wait_for(rpc.peer.waiting.wait(), 20)
        client.close()
        with pytest.raises(PeerLost):
            await call
        await until(lambda: rpc.peer.gone)
        await asyncio.wait_for(rpc.peer.cancelled.wait(), 20)


async def test_a_frozen_caller_is_found_by_heartbeat_and_its_call_fails_when_it_thaws() -> None:
    async with connected() as rpc, caller_process(rpc.address, WAIT) as caller:
        await asyncio.wait_for(rpc.peer.waiting.wait(), 90)
        caller.freeze()
        try:
            await until(lambda: rpc.peer.gone, 20)
            assert rpc.peer.cancelled.is_set()
        finally:
            caller.thaw()
        assert await caller.outcome() == "peer_lost"


async def test_no_call_stays_under_way_when_its_caller_is_gone_before_it_is_read() -> None:
    async with connected() as rpc:
        for number in range(30):
            context = zmq.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(rpc.address)
            dealer.send(call_message(WAIT, number + 1, Ask(number + 1)))
            dealer.close(linger=5000)
            if number % 2:
                context.term()  # the loop sees the message and the end of the connection at once
            else:
                await asyncio.to_thread(context.term)
        assert (await rpc.client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        await until(lambda: rpc.server.calls == 0)
        assert len(rpc.peer.gone) <= 30


# The caller lives but does not read


async def test_a_caller_that_does_not_read_is_given_up_and_gets_a_reset_when_it_reads() -> None:
    async with connected(ShortQueues(queued_messages=100)) as rpc:
        dealer = slow_reader(rpc)
        dealer.send(call_message(WAIT, 6, Ask(6)))
        dealer.send(call_message(FLOOD, 7, Ask(30_000)))
        await until(lambda: rpc.peer.gone, 30)
        await until(lambda: rpc.server.calls == 0)
        assert rpc.server.dropped["peer_slow"] == 1
        assert rpc.peer.cancelled.is_set()
        dealer.send(call_message(ECHO, 8, Ask(8)))  # the connection lives
        received = await receive(dealer)
        while received[-1].kind != Kind.REPLY:
            received += await receive(dealer)
        (reset,) = (envelope for envelope in received if envelope.kind == Kind.RESET)
        assert reset is received[-2]
        assert reset.call == 0
        assert msgspec.msgpack.decode(reset.body) == 7  # the last call that is given up
        assert len(rpc.peer.gone) == 1
        dealer.close()
        await until(lambda: len(rpc.peer.gone) == 2)


async def test_the_call_of_a_caller_whose_interpreter_stands_still_fails_when_it_goes_on() -> None:
    """Its libzmq lives: the server gives the caller up because it does not read, or for a missing heartbeat."""
    async with connected() as rpc, caller_process(rpc.address, FLOOD, blocks=True) as caller:
        await until(lambda: rpc.peer.gone, 60)
        caller.unblock()
        assert await caller.outcome() == "peer_lost"


async def test_items_that_waited_for_a_slow_reader_arrive_in_order() -> None:
    half_sent = asyncio.Event()

    async def count_slowly(ask: Ask, call: ServerCall) -> Answer:
        for number in range(2000):
            call.send(Answer(number, bytes(3000)))
            await next_message()
            if number == 1000:  # more than the queues hold, and less than a caller is given up for
                half_sent.set()
        return Answer(ask.number)

    async with connected(ShortQueues(queued_messages=100), handlers={COUNT: count_slowly}) as rpc:
        dealer = slow_reader(rpc)
        dealer.send(call_message(COUNT, 1, Ask(1)))
        await asyncio.wait_for(half_sent.wait(), 30)
        numbers: list[int] = []
        while len(numbers) < 2001:
            numbers += [msgspec.msgpack.decode(each.body, type=Answer).number for each in await receive(dealer)]
        assert numbers == [*range(2000), 1]
        assert not rpc.peer.gone


# The connection breaks on the way, and both ends live


async def test_a_partition_is_noticed_on_both_sides_and_calls_succeed_after_it() -> None:
    async with connected() as rpc, Proxy(rpc.address).running() as proxy:
        client = rpc.connect(proxy.address)
        assert (await client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        call = asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=600))
        await asyncio.wait_for(rpc.peer.waiting.wait(), 20)
        proxy.hold = True
        with pytest.raises(PeerLost):
            await asyncio.wait_for(call, 20)
        await until(lambda: rpc.peer.gone == rpc.peer.callers, 20)
        assert rpc.peer.cancelled.is_set()
        proxy.hold = False
        await until(lambda: client.connected, 20)
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2


async def test_a_caller_that_connects_again_is_another_peer_to_the_server() -> None:
    async with connected() as rpc, Proxy(rpc.address).running() as proxy:
        client = rpc.connect(proxy.address)
        assert (await client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        call = asyncio.create_task(client.call(FLOOD, Ask(10), timeout_s=600))
        await asyncio.wait_for(rpc.peer.waiting.wait(), 20)
        proxy.cut()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(call, 20)
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2
        await until(lambda: rpc.peer.gone)
        first, second = rpc.peer.callers
        assert rpc.peer.gone == [first]
        assert second != first
        assert rpc.peer.cancelled.is_set()


@pytest.mark.parametrize("missing", [1, 3, 50])
async def test_bytes_that_are_lost_on_the_way_fail_the_calls_under_way_and_no_others(missing: int) -> None:
    async with connected() as rpc, Proxy(rpc.address).running() as proxy:
        client = rpc.connect(proxy.address)
        assert (await client.call(ECHO, Ask(1), timeout_s=20)).number == 1
        pieces = 0

        def without_the_middle_of_the_third(data: bytes) -> bytes:
            nonlocal pieces
            pieces += 1
            if pieces != 3:
                return data
            middle = len(data) // 2
            return data[:middle] + data[middle + missing :]

        proxy.up = proxy.down = without_the_middle_of_the_third
        outcomes: list[Answer | BaseException] = []
        for number in range(20):
            call = client.call(ECHO, Ask(number), timeout_s=30)
            outcomes += await asyncio.gather(call, return_exceptions=True)
        failed = [outcome for outcome in outcomes if not isinstance(outcome, Answer)]
        assert len(failed) <= 3
        assert all(isinstance(each, PolyphaseError) for each in failed)
        assert not any(isinstance(each, DeadlineExceeded) for each in failed)  # lost without a word
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2
