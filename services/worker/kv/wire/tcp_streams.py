"""Connected sockets as streams: plain, or TLS with the cluster's certificate on both sides."""

import socket
import ssl
from typing import Protocol

from services.worker.kv.wire.tcp_framing import Stream

_UNANSWERED_MS = 30_000  # what was sent and is not acknowledged by then: the peer's host is gone
_IN_TURN = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Untrusted(Exception):
    """The other side does not hold the cluster's keys, or says that we do not."""


class Connection(Stream, Protocol):
    """A stream that may have to agree on keys first."""

    def ready(self) -> bool:
        """Go on with the handshake; whether it is done. Raises OSError or Untrusted."""

    def fileno(self) -> int:
        """The socket's descriptor."""

    def close(self) -> None:
        """Close the socket."""


def prepared(made: socket.socket) -> socket.socket:
    """As all connections here are: never blocking, nothing held back, gone peers noticed by the kernel in the end."""
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    return made


def connection_of(made: socket.socket, tls: ssl.SSLContext | None, *, server: bool) -> Connection:
    """A stream over a socket that is connected."""
    return PlainConnection(made) if tls is None else TlsConnection(made, tls, server=server)


class PlainConnection:
    """TCP as it is."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self._expected = 1

    def ready(self) -> bool:
        """There is nothing to agree on."""
        return True

    def read(self, views: list[memoryview]) -> int:
        """See Stream."""
        try:
            got = self._socket.recv_into(views[0]) if len(views) == 1 else self._socket.recvmsg_into(views)[0]
        except BlockingIOError:
            return 0
        if not got:
            raise ConnectionResetError("the peer has closed the connection")
        return got

    def expect(self, count: int) -> None:
        """See Stream."""
        if count != self._expected:
            self._expected = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def write(self, views: list[memoryview]) -> int:
        """See Stream."""
        try:
            return self._socket.sendmsg(views)
        except BlockingIOError:
            return 0

    def fileno(self) -> int:
        """See Connection."""
        return self._socket.fileno()

    def close(self) -> None:
        """See Connection."""
        self._socket.close()


class TlsConnection:
    """TLS 1.3. A record is 16 KB at most, so that calls are many."""

    def __init__(self, made: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self._socket = context.wrap_socket(
            made, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        self._done = False

    def ready(self) -> bool:
        """See Connection."""
        if self._done:
            return True
        try:
            self._socket.do_handshake()
        except _IN_TURN:
            return False
        except ssl.SSLError as error:
            raise Untrusted(error.reason or str(error)) from error
        self._done = True
        return True

    def read(self, views: list[memoryview]) -> int:
        """See Stream. Raises Untrusted where the other side refuses our certificate, of which TLS 1.3 tells late."""
        got = 0
        try:
            for view in views:
                while view:
                    some = self._socket.recv_into(view)
                    if not some and got:
                        return got  # the end is found by the next call
                    if not some:
                        raise ConnectionResetError("the peer has closed the connection")
                    got += some
                    view = view[some:]
        except _IN_TURN:
            return got
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise Untrusted(error.reason) from error
            raise
        return got

    def expect(self, count: int) -> None:
        """Records are told of one by one."""

    def write(self, views: list[memoryview]) -> int:
        """See Stream."""
        sent = 0
        try:
            for view in views:
                while view:
                    some = self._socket.send(view)
                    sent += some
                    view = view[some:]
        except _IN_TURN:
            return sent
        return sent

    def fileno(self) -> int:
        """See Connection."""
        return self._socket.fileno()

    def close(self) -> None:
        """See Connection."""
        self._socket.close()
