"""Clients by address: those that are no longer used are closed, and leave nothing open."""

import asyncio
import os

import pytest
import zmq

from shared.errors import PeerLost, Unavailable
from shared.wire import rpc_client
from shared.wire.rpc_client import RpcClients
from tests.ports import free_address
from tests.shared.wire.peers import ECHO, WAIT, Ask, Peer, connected, until, until_disconnected


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_clients_of_hundreds_of_replaced_servers_leave_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
    async with connected() as rpc:
        with RpcClients(rpc.sockets) as clients:

            async def call_a_server_that_stops(number: int) -> None:
                address = free_address()
                async with rpc.peer.server(rpc.sockets, address):
                    assert (await clients.to(address).call(ECHO, Ask(number), timeout_s=20)).number == number
                await until_disconnected(clients.to(address))
                clients.sweep()

            for number in range(10):
                await call_a_server_that_stops(number)
            before = open_files()  # with those that libzmq opens once
            for number in range(10, 400):
                await call_a_server_that_stops(number)
            assert len(clients) == 0
            await until(lambda: open_files() <= before + 20)  # libzmq closes in its own time


async def test_there_may_be_more_clients_than_libzmq_has_sockets_for_by_default() -> None:
    async with connected() as rpc:
        with RpcClients(rpc.sockets) as clients:
            for port in range(20_000, 20_400):
                clients.to(f"tcp://127.0.0.1:{port}")
            assert len(clients) == 400


async def test_sweep_closes_a_client_that_has_found_no_server_for_a_while_unless_its_address_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, gone = free_address(), free_address()
    async with connected() as rpc:
        with RpcClients(rpc.sockets, keep=[kept]) as clients:
            clients.to(kept)
            clients.to(gone)
            clients.sweep()
            assert len(clients) == 2  # not yet
            monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
            clients.sweep()
            assert len(clients) == 1
            clients.to(kept)
            assert len(clients) == 1  # so it was the other one


async def test_sweep_closes_an_idle_client_but_none_with_a_call_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as rpc:
        with RpcClients(rpc.sockets) as clients:
            call = asyncio.create_task(clients.to(rpc.address).call(WAIT, Ask(1), timeout_s=30))
            await asyncio.wait_for(rpc.peer.waiting.wait(), 20)
            monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
            clients.sweep()
            assert len(clients) == 1  # it is connected
            monkeypatch.setattr(rpc_client, "IDLE_S", 0.0)
            clients.sweep()
            assert len(clients) == 1  # its call is under way
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: not clients.to(rpc.address).busy)
            clients.sweep()
            assert len(clients) == 0
            assert (await clients.to(rpc.address).call(ECHO, Ask(2), timeout_s=20)).number == 2


async def test_a_call_of_a_client_that_was_closed_by_sweep_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "LOST_S", 0.0)
    async with connected() as rpc:
        with RpcClients(rpc.sockets) as clients:
            client = clients.to(free_address())
            clients.sweep()
            with pytest.raises(PeerLost, match="closed"):
                await client.call(ECHO, Ask(1), timeout_s=600)


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "", "tcp://256.1.1.1:x"])
async def test_a_client_of_an_invalid_address_is_refused_and_leaves_no_file_open(address: str) -> None:
    async with connected() as rpc:
        with RpcClients(rpc.sockets) as clients:
            with pytest.raises(Unavailable, match="no connection to"):
                clients.to(address)
            before = open_files()  # with those that libzmq opens once
            for _ in range(9):
                with pytest.raises(Unavailable, match="no connection to"):
                    clients.to(address)
            assert len(clients) == 0
            await until(lambda: open_files() <= before + 3)


async def test_a_server_whose_address_is_taken_leaves_no_file_open() -> None:
    async with connected() as rpc:
        before = open_files()
        for _ in range(10):
            with pytest.raises(zmq.ZMQError):
                await Peer().server(rpc.sockets, rpc.address).__aenter__()
        await until(lambda: open_files() <= before + 3)
