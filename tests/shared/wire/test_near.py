"""Services of one process reach each other without a socket, and find what they would find over one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.domain.cluster import ClusterDelta
from shared.errors import Busy, DeadlineExceeded, NotConnected, PolyphaseError
from shared.wire.broadcast import WHOLE, ClusterFeed
from shared.wire.messages import Method
from shared.wire.rpc_client import NearClient, RpcClients
from shared.wire.rpc_server import ServerCall
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.services.control_plane import until
from tests.shared.wire.peers import COUNT, CRASH, ECHO, REFUSE, WAIT, Answer, Ask, Peer
from tests.shared.wire.test_broadcast import Listener, Monitor

CALLED = "tcp://10.1.2.3:4567"  # how the others name it: nothing listens there
PLAIN = Method("plain", Ask, Answer, Answer)


@asynccontextmanager
async def near() -> AsyncIterator[tuple[Peer, NearClient]]:
    address, peer = free_address(), Peer()
    sockets = Sockets(near={CALLED: address})

    def plain(ask: Ask, _: ServerCall) -> Answer:
        return Answer(ask.number + 1)

    try:
        with RpcClients(sockets) as clients:
            assert clients.near(CALLED) is None  # nothing listens yet
            async with peer.server(sockets, address, {PLAIN: plain}):
                assert clients.near(free_address()) is None
                client = clients.near(CALLED)
                assert client is not None
                assert client.connected
                yield peer, client
            assert clients.near(CALLED) is None
            with pytest.raises(NotConnected):
                await client.call(ECHO, Ask(1), timeout_s=5)
    finally:
        sockets.close()


async def test_replies_and_items_arrive_without_a_socket() -> None:
    async with near() as (peer, client):
        ask = Ask(3)
        assert (await client.call(ECHO, ask, timeout_s=5)).number == 3
        assert peer.callers == [b""]
        assert (await client.call(PLAIN, ask, timeout_s=5)).number == 4
        items: list[int] = []
        reply = await client.call(COUNT, ask, timeout_s=5, on_item=lambda item: items.append(item.number))
        assert (reply.number, items) == (3, [0, 1, 2])


async def test_errors_and_deadlines_are_those_of_a_call_over_a_socket() -> None:
    async with near() as (peer, client):
        with pytest.raises(Busy, match="come back later"):
            await client.call(REFUSE, Ask(1), timeout_s=5)
        with pytest.raises(PolyphaseError, match="crash failed: ZeroDivisionError: a bug"):
            await client.call(CRASH, Ask(1), timeout_s=5)
        with pytest.raises(DeadlineExceeded, match="wait: no answer within"):
            await client.call(WAIT, Ask(1), timeout_s=0.01)
        assert peer.cancelled.is_set()


async def test_a_cancelled_call_is_cancelled_at_its_handler() -> None:
    async with near() as (peer, client):
        call = asyncio.create_task(client.call(WAIT, Ask(1), timeout_s=60))
        await asyncio.wait_for(peer.waiting.wait(), 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert peer.cancelled.is_set()


async def test_a_feed_of_the_same_process_follows_as_one_over_a_socket_does() -> None:
    address, near_one, far = free_address(), Listener(), Listener()
    sockets = Sockets(near={CALLED: address})
    monitor = Monitor(sockets, address)
    feed = ClusterFeed(sockets, CALLED, near_one.state.apply, on_policies=near_one.policies.append)
    other = ClusterFeed(sockets, address, far.state.apply)
    try:
        await until(lambda: near_one.running == 100, "all of it")
        assert near_one.policies[0].revision == 4
        await until(lambda: far.running == 100, "all of it over the socket")
        monitor.step()
        assert near_one.running == 101
        await until(lambda: far.running == 101, "the change over the socket")

        monitor.sequence += 1  # one that was not sent
        asked = monitor.asked.count(WHOLE)
        monitor.step()
        await until(lambda: near_one.running == 103, "all of it again")
        assert feed.dropped == {"gap": 1}
        await until(lambda: far.running == 103, "the same over the socket")
        assert monitor.asked.count(WHOLE) == asked + 2

        monitor.publisher.epoch = 7
        monitor.step()
        monitor.publisher.epoch = 6  # a monitor that has lost its lease
        monitor.publisher.change(ClusterDelta(monitor.sequence + 1, 0.0, gone=("p",)))
        assert near_one.running == monitor.sequence
    finally:
        feed.close()
        other.close()
        monitor.publisher.close()
        sockets.close()
