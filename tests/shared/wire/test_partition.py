"""Connections that break on the way, both ends living."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.errors import DeadlineExceeded, PeerLost, PolyphaseError
from shared.wire.rpc_client import RpcClient
from tests.shared.wire.peers import ECHO, FLOOD, WAIT, Answer, Ask, Peer, connected, free_address, until


class Proxy:
    """TCP between two addresses. `alter(data)` says what of it passes on; `hold` lets nothing pass, and nothing end."""

    def __init__(self, target: str) -> None:
        self.address = free_address()
        self._target = target
        self.hold = False
        self.alter: Callable[[bytes], bytes] = lambda data: data
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.removeprefix("tcp://").split(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, there_writer]
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                while self.hold:
                    await asyncio.sleep(0.01)
                sink.write(self.alter(data))
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            while self.hold:
                await asyncio.sleep(0.01)
            sink.close()

    def cut(self) -> None:
        """End all connections rudely."""
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def running(self) -> "AsyncIterator[Proxy]":
        host, port = self.address.removeprefix("tcp://").split(":")
        server = await asyncio.start_server(self._accept, host, int(port))
        try:
            yield self
        finally:
            server.close()
            self.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


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

        proxy.alter = alter
        outcomes = []
        for number in range(20):
            call = client.call(ECHO, Ask(number), timeout_s=30)
            outcomes += await asyncio.gather(call, return_exceptions=True)
        failed = [outcome for outcome in outcomes if not isinstance(outcome, Answer)]
        assert len(failed) <= 3
        assert all(isinstance(each, PolyphaseError) for each in failed)
        assert not any(isinstance(each, DeadlineExceeded) for each in failed)  # lost without a word
        assert (await client.call(ECHO, Ask(2), timeout_s=20)).number == 2
