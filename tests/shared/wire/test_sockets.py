"""Connections that libzmq gives up for good: what came over them was no message."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from shared.errors import PeerLost
from shared.wire.broadcast import Publisher, Subscriber
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address
from tests.services.control_plane import until
from tests.shared.wire.peers import ECHO, Ask, Peer
from tests.shared.wire.proxy import Change, Proxy

TOO_LARGE = b"\x02" + b"\x7f" * 8  # a frame of more bytes than there are


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


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
    async with peer.server(sockets, address), Proxy(address).running() as wire:
        client, losses = RpcClient(sockets, wire.address), []
        client.on_lost(lambda: losses.append(1))
        await client.call(ECHO, Ask(1, b"x" * 100), timeout_s=20)
        wire.spoil_next(side, change)
        with pytest.raises(PeerLost):
            await asyncio.wait_for(client.call(ECHO, Ask(2, b"x" * 100), timeout_s=600), 20)
        assert losses
        assert (await client.call(ECHO, Ask(3), timeout_s=20)).number == 3
        client.close()
    sockets.close()


@pytest.mark.parametrize(("keyed", "change", "side"), WAYS)
async def test_state_goes_on_arriving(keyed: bool, change: Change, side: str) -> None:
    sockets, address, got = Sockets(keys() if keyed else None), free_address(), []
    async with Proxy(address).running() as wire:
        subscriber = Subscriber(sockets, address, Ask, got.append)
        publisher = Publisher(sockets, wire.address)

        def heard() -> bool:
            publisher.publish(Ask(1, b"x" * 100))
            return len(got) > 2

        for _ in range(3):
            got.clear()
            await until(heard, "a message")
            wire.spoil_next(side, change)
        publisher.close()
        subscriber.close()
    sockets.close()


# State that may wait a moment for more of it: all of it comes, in order, and the process wakes less often
GATHER_S = 0.05


class Heard:
    """What came, and in how many turns of the loop."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.turns = 0
        self._in_turn = False

    def take(self, value: int) -> None:
        """One more."""
        self.values.append(value)
        if not self._in_turn:
            self._in_turn = True
            self.turns += 1
            asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        self._in_turn = False


@asynccontextmanager
async def pair(gather_s: float) -> AsyncIterator[tuple[Publisher, Heard]]:
    """A publisher whose first message has arrived."""
    sockets, address, heard = Sockets(), free_address(), Heard()
    subscriber = Subscriber(sockets, address, int, heard.take, gather_s)
    publisher = Publisher(sockets, address)
    try:
        while not heard.values:
            publisher.publish(-1)
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * gather_s)
        heard.values.clear()
        heard.turns = 0
        yield publisher, heard
    finally:
        publisher.close()
        subscriber.close()
        sockets.close()


async def test_all_come_in_order_and_share_wake_ups() -> None:
    async with pair(GATHER_S) as (publisher, heard):
        began = asyncio.get_running_loop().time()
        for number in range(400):  # more than one turn of the loop takes
            publisher.publish(number)
            if number % 4 == 0:
                await asyncio.sleep(0.002)
        await until(lambda: len(heard.values) == 400, "all are there")
        took = asyncio.get_running_loop().time() - began
    assert heard.values == list(range(400))
    assert heard.turns <= took / GATHER_S + 2 + 400 / 16  # where many come, a batch is enough


async def test_who_was_silent_is_heard_again_and_again() -> None:
    async with pair(GATHER_S) as (publisher, heard):
        for number in range(5):
            await asyncio.sleep(3 * GATHER_S)
            publisher.publish(number)
            await until(lambda number=number: heard.values[-1:] == [number], "it came")
    assert heard.values == list(range(5))


async def test_one_that_closes_while_it_waits() -> None:
    async with pair(GATHER_S) as (publisher, heard):
        publisher.publish(1)
        await until(lambda: heard.values == [1], "it came")
        publisher.publish(2)
    await asyncio.sleep(2 * GATHER_S)  # no timer touches the closed socket
    assert heard.values == [1]
