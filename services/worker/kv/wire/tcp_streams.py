"""Connected sockets as streams: plain, TLS with the cluster's certificate on both sides, or plain after both sides have
proved that they have the cluster's key.
"""

import hmac
import secrets
import socket
import ssl
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from services.worker.kv.wire.tcp_framing import Stream, prefix
from services.worker.kv.wire.tls import TlsContexts

_UNANSWERED_MS = 30_000  # what was sent and is not acknowledged by then: the peer's host is gone
_PURPOSE = b"polyphase kv proof 1"
_MAGIC = b"PKA1"
_NUMBER_BYTES = _PROOF_BYTES = 32
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


@dataclass(frozen=True, slots=True)
class ProofKey:
    """What both sides prove that they have; nothing is encrypted with it."""

    key: bytes


Keys = TlsContexts | ProofKey | None


def keys_of(curve: tuple[str, str] | None, *, encrypted: bool) -> Keys:
    """What connections agree on, from the cluster's pair. Raises ValueError for a pair that is none."""
    if curve is None or encrypted:
        return TlsContexts(curve) if curve else None
    return ProofKey(sha256(_PURPOSE + "".join(curve).encode()).digest())


def connection_of(made: socket.socket, keys: Keys, *, server: bool) -> Connection:
    """A stream over a socket that is connected."""
    match keys:
        case None:
            return PlainConnection(made)
        case ProofKey(key):
            return ProvenConnection(made, key, server=server)
        case _:
            return TlsConnection(made, keys.server if server else keys.client, server=server)


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


class ProvenConnection(PlainConnection):
    """TCP as it is, after each side has shown by an HMAC over both sides' random numbers that it has the key.

    Framed as messages of the protocol, which a peer without a key reads as such: the client's number; the server's
    number and proof; the client's proof.
    """

    def __init__(self, made: socket.socket, key: bytes, *, server: bool) -> None:
        super().__init__(made)
        self._key = key
        self._server = server
        self._number = secrets.token_bytes(_NUMBER_BYTES)
        self._theirs = b""
        self._got = b""
        self._begun = self._done = False

    def ready(self) -> bool:
        """See Connection."""
        if self._done:
            return True
        if not self._server and not self._begun:
            self._say(self._number)
        self._begun = True
        if not self._theirs:
            body = self._take(_NUMBER_BYTES if self._server else _NUMBER_BYTES + _PROOF_BYTES)
            if body is None:
                return False
            self._theirs = body[:_NUMBER_BYTES]
            if not self._server:
                self._check(body[_NUMBER_BYTES:], b"server")
                self._say(self._proof(b"client"))
                self._done = True
                return True
            self._say(self._number + self._proof(b"server"))
        body = self._take(_PROOF_BYTES)
        if body is None:
            return False
        self._check(body, b"client")
        self._done = True
        return True

    def _proof(self, who: bytes) -> bytes:
        client, server = (self._theirs, self._number) if self._server else (self._number, self._theirs)
        return hmac.digest(self._key, who + client + server, "sha256")

    def _check(self, proof: bytes, who: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(who)):
            raise Untrusted("the peer has another key")

    def _say(self, body: bytes) -> None:
        """Some hundred bytes on a new connection: the kernel takes them whole."""
        message = prefix(len(_MAGIC) + len(body), 0) + _MAGIC + body
        if self._socket.send(message) != len(message):
            raise ConnectionResetError("the peer takes nothing")

    def _take(self, size: int) -> bytes | None:
        """A message of that many bytes behind its magic; None until it is here. Raises Untrusted for anything else."""
        begin = prefix(len(_MAGIC) + size, 0) + _MAGIC
        wanted = len(begin) + size
        while len(self._got) < wanted:
            try:
                got = self._socket.recv(wanted - len(self._got))
            except BlockingIOError:
                return None
            if not got:
                raise ConnectionResetError("the peer has closed the connection")
            self._got += got
            if not begin.startswith(self._got[: len(begin)]):
                raise Untrusted("the peer shows no key")
        body, self._got = self._got[len(begin) :], b""
        return body


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
