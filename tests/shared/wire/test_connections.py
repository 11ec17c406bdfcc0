"""Connections that libzmq gives up for good: what came over them was no message."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq

from shared.errors import PeerLost
from shared.wire.broadcast import Publisher, Subscriber
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Curve, Sockets
from tests.shared.wire.peers import ECHO, Ask, Peer, free_address, until

Change = Callable[[bytes], bytes]
_HEARTBEAT = 12  # bytes at most
TOO_LARGE = b"\x02" + b"\x7f" * 8  # a frame of more bytes than there are


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


class BadWire:
    """A proxy that spoils the next long piece of what the server says, or the client."""

    def __init__(self, address: str) -> None:
        self.down: Change | None = None
        self.up: Change | None = None
        self.connections = 0
        self._target = int(address.rpartition(":")[2])

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        async with server:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, onward = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(self._pipe(reader, onward, "up"), self._pipe(there, writer, "down"))
        finally:
            onward.close()
            writer.close()

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, side: str) -> None:
        try:
            while data := await source.read(65_536):
                change = getattr(self, side)
                if change is not None and len(data) > _HEARTBEAT:
                    setattr(self, side, None)
                    data = change(data)
                sink.write(data)
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            sink.close()


def keys() -> Curve:
    public, secret = zmq.curve_keypair()
    return Curve(public.decode(), secret.decode())


WAYS = [
    pytest.param(True, flipped, "down", id="answers with keys"),
    pytest.param(True, flipped, "up", id="calls with keys"),
    pytest.param(False, lambda data: TOO_LARGE + data, "down", id="answers without"),
    pytest.param(False, lambda data: TOO_LARGE + data, "up", id="calls without"),
]


@pytest.mark.parametrize(("keyed", "change", "side"), WAYS)
async def test_a_call_over_a_spoiled_connection_fails_and_the_next_one_does_not(
    keyed: bool, change: Change, side: str
) -> None:
    sockets, peer, address = Sockets(keys() if keyed else None), Peer(), free_address()
    wire = BadWire(address)
    async with peer.server(sockets, address), wire.open() as by:
        client, losses = RpcClient(sockets, by), []
        client.on_lost(lambda: losses.append(1))
        await client.call(ECHO, Ask(1, b"x" * 100), timeout_s=20)
        setattr(wire, side, change)
        with pytest.raises(PeerLost):
            await asyncio.wait_for(client.call(ECHO, Ask(2, b"x" * 100), timeout_s=600), 20)
        assert losses
        assert (await client.call(ECHO, Ask(3), timeout_s=20)).number == 3
        client.close()
    sockets.close()


@pytest.mark.parametrize(("keyed", "change", "side"), WAYS)
@pytest.mark.parametrize("publisher_binds", [True, False])
async def test_state_goes_on_arriving(keyed: bool, change: Change, side: str, publisher_binds: bool) -> None:
    """`side` up is what a subscription says where the publisher listens, and state where it connects."""
    sockets, address, got = Sockets(keys() if keyed else None), free_address(), []
    wire = BadWire(address)
    async with wire.open() as by:
        where = (address, by) if publisher_binds else (by, address)
        subscriber = Subscriber(sockets, where[1], Ask, got.append, bind=not publisher_binds)
        publisher = Publisher(sockets, where[0], bind=publisher_binds)

        def heard() -> bool:
            publisher.publish(Ask(1, b"x" * 100))
            return len(got) > 2

        for _ in range(3):
            got.clear()
            await until(heard)
            setattr(wire, side, change)
        publisher.close()
        subscriber.close()
    sockets.close()
