"""Connections that libzmq gives up for good: what came over them was no message."""

import asyncio

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


async def test_messages_of_an_unwatched_subscriber_wait_until_they_are_taken() -> None:
    sockets, address, got = Sockets(), free_address(), []
    subscriber = Subscriber(sockets, address, int, got.append, watched=False)
    publisher = Publisher(sockets, address)
    try:
        while not subscriber.take(1):  # until the subscription has arrived
            publisher.publish(-1)
            await asyncio.sleep(0.01)
        for number in range(300):
            publisher.publish(number)
        got.clear()
        await asyncio.sleep(0.05)
        assert got == []
        async with asyncio.timeout(20):
            while got[-1:] != [299]:
                before = len(got)
                assert subscriber.take(100) == len(got) - before <= 100
                await asyncio.sleep(0.001)
        assert [number for number in got if number >= 0] == list(range(300))
        assert subscriber.take(100) == 0
    finally:
        publisher.close()
        subscriber.close()
        sockets.close()
    assert subscriber.take(100) == 0
