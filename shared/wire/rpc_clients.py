"""The clients of a process, by address: made on first use, closed when nobody uses them."""

import time
from collections.abc import Collection
from types import TracebackType
from typing import Self

import zmq

from shared.errors import Unavailable
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets

LOST_S = 30.0  # how long an unused client tries to reach an address where nobody is
IDLE_S = 600.0  # how long it keeps a connection that nobody uses
SWEEP_S = 5.0


class RpcClients:
    """Clients by address, made on first use. Use as a context manager, and call `sweep` every SWEEP_S.

    Those of `keep` stay connected, used or not.
    """

    def __init__(self, sockets: Sockets, keep: Collection[str] = ()) -> None:
        self._sockets = sockets
        self._keep = frozenset(keep)
        self._clients: dict[str, RpcClient] = {}
        self._used_s: dict[str, float] = {}  # monotonic, by address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    def __len__(self) -> int:
        return len(self._clients)

    def to(self, address: str) -> RpcClient:
        """The client of that address, to be used now: one that is kept may be closed some time. Raises Unavailable when
        the address makes no sense.
        """
        self._used_s[address] = time.monotonic()
        client = self._clients.get(address)
        if client is None:
            try:
                client = self._clients[address] = RpcClient(self._sockets, address)
            except zmq.ZMQError as error:
                del self._used_s[address]
                raise Unavailable(f"no connection to {address!r}: {error}") from error
        return client

    def sweep(self) -> None:
        """Close clients that nobody has used for a while: instances come and go, each with addresses of its own."""
        now_s = time.monotonic()
        for address, client in list(self._clients.items()):
            unused_s = now_s - self._used_s[address]
            if address not in self._keep and not client.busy and unused_s > (IDLE_S if client.connected else LOST_S):
                client.close()
                del self._clients[address], self._used_s[address]
