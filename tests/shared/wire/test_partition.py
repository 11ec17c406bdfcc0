"""Connections that break on the way, both ends living."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.errors import DeadlineExceeded, PeerLost, PolyphaseError
from shared.wire.rpc_client import RpcClient
from tests.shared.wire.peers import ECHO, FLOOD, WAIT, Answer, Ask, Peer, connected, until
from tests.shared.wire.proxy import Proxy


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
