"""Clients by address: those of addresses that are gone do not pile up."""

import asyncio
import os
from collections.abc import Iterator

import pytest
import zmq

from shared.errors import PeerLost, Unavailable
from shared.wire import rpc_client
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.shared.wire.peers import ECHO, WAIT, Ask, Peer, until


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_hundreds_of_replaced_instances_leave_nothing(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
    peer, before = Peer(), 0
    with RpcClients(sockets) as clients:
        for number in range(400):
            address = free_address()
            async with peer.server(sockets, address):
                assert (await clients.to(address).call(ECHO, Ask(number), timeout_s=20)).number == number
            client = clients.to(address)
            await until(lambda client=client: not client.connected)  # type: ignore[misc]
            clients.sweep()
            if number == 9:
                before = open_files()
        assert len(clients) == 0
        await until(lambda: open_files() <= before + 20)  # libzmq closes in its own time


async def test_more_instances_than_libzmq_has_sockets_by_default(sockets: Sockets) -> None:
    with RpcClients(sockets) as clients:
        for port in range(20_000, 20_400):
            clients.to(f"tcp://127.0.0.1:{port}")
        assert len(clients) == 400


async def test_what_is_used_or_to_be_kept_stays(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, address, kept, gone = Peer(), free_address(), free_address(), free_address()
    with RpcClients(sockets, keep=[kept]) as clients:
        async with peer.server(sockets, address):
            call = asyncio.create_task(clients.to(address).call(WAIT, Ask(1), timeout_s=30))
            await asyncio.wait_for(peer.waiting.wait(), 20)
            clients.to(kept)
            clients.to(gone)
            clients.sweep()
            assert len(clients) == 3  # not yet
            monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
            clients.sweep()
            assert len(clients) == 2
            monkeypatch.setattr(rpc_client, "IDLE_S", 0.0)
            clients.sweep()
            assert len(clients) == 2  # a call is under way
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not clients.to(address).busy)
            clients.sweep()
            assert len(clients) == 1
            assert (await clients.to(address).call(ECHO, Ask(2), timeout_s=20)).number == 2


async def test_a_closed_client_fails_at_once(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
    with RpcClients(sockets) as clients:
        client = clients.to(free_address())
        clients.sweep()
        with pytest.raises(PeerLost, match="closed"):
            await client.call(ECHO, Ask(1), timeout_s=600)


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "", "tcp://256.1.1.1:x"])
async def test_an_address_that_makes_no_sense_is_a_clear_error(sockets: Sockets, address: str) -> None:
    with RpcClients(sockets) as clients:
        before = 0
        for _ in range(10):
            with pytest.raises(Unavailable, match="no connection to"):
                clients.to(address)
            before = before or open_files()  # libzmq's own ones included
        assert len(clients) == 0
        await until(lambda: open_files() <= before + 3)


async def test_an_address_that_is_taken_leaves_no_socket_behind(sockets: Sockets) -> None:
    peer, address = Peer(), free_address()
    async with peer.server(sockets, address):
        before = open_files()
        for _ in range(10):
            with pytest.raises(zmq.ZMQError):
                await peer.server(sockets, address).__aenter__()
        await until(lambda: open_files() <= before + 3)
