"""Connected sockets as streams: plain, TLS with the cluster's certificate on both sides, or plain with a proof of the
cluster's key. Addresses are resolved without blocking the thread of the transport.

For TLS, both sides show a certificate that follows from the cluster's key pair, and accept no other. There is no
authority to run and nothing to distribute: every process with the pair of the cluster file can make the certificate,
and proves by its handshake that it has the secret half. Certificate and key are the same on every host.
"""

import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from services.worker.kv.wire.tcp_framing import Stream, prefix

_CERTIFICATE_PURPOSE = b"polyphase kv tls 1"
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "polyphase-kv")])
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_UNANSWERED_MS = 30_000  # data that is not acknowledged by then: the peer's host is gone
_PROOF_PURPOSE = b"polyphase kv proof 1"
_MAGIC = b"PKA1"
_NUMBER_BYTES = _PROOF_BYTES = 32
_IN_TURN = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
Where = tuple[int, tuple[object, ...]]  # family and socket address
OnResolved = Callable[[list[Where], str], None]  # places, or none of them and the reason


class TlsContexts:
    """The TLS contexts of the two sides of connections."""

    def __init__(self, curve: tuple[str, str]) -> None:
        """`curve` is the cluster's pair (public, secret; Z85). Raises ValueError for an invalid pair."""
        key, certificate = identity(curve)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, key, certificate)
        self.server.num_tickets = 0  # no session is resumed
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate)


def identity(curve: tuple[str, str]) -> tuple[bytes, bytes]:
    """Key and certificate (PEM) that follow from a pair: the same for the same pair. Raises ValueError."""
    public, secret = (z85.decode(half) for half in curve)
    if len(public) != 32 or len(secret) != 32:
        raise ValueError("a CurveZMQ pair has two keys of 40 characters")
    key = Ed25519PrivateKey.from_private_bytes(HKDF(hashes.SHA256(), 32, public, _CERTIFICATE_PURPOSE).derive(secret))
    certificate = (
        x509.CertificateBuilder(_NAME, _NAME, key.public_key(), 1, _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    secret_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret_pem, certificate.public_bytes(pem)


def _context(protocol: int, key: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a peer is identified by its certificate
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    file = os.memfd_create("polyphase-kv")  # Python's ssl takes files only; this one is in memory
    try:
        os.write(file, key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


class Untrusted(Exception):
    """The other side does not hold the cluster's keys, or says that this side does not."""


class Connection(Stream, Protocol):
    """A stream that may need a handshake first."""

    def ready(self) -> bool:
        """Go on with the handshake; whether it is done. Raises OSError or Untrusted."""

    def fileno(self) -> int:
        """The socket's descriptor."""

    def close(self) -> None:
        """Close the socket."""


def prepared(made: socket.socket) -> socket.socket:
    """Configured as all connections here: non-blocking, nothing held back, and the kernel notices peers that are
    gone.
    """
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
    """A key that both sides prove to have; nothing is encrypted with it."""

    key: bytes


Keys = TlsContexts | ProofKey | None


def keys_of(curve: tuple[str, str] | None, *, encrypted: bool) -> Keys:
    """The keys of connections, from the cluster's pair. Raises ValueError for an invalid pair."""
    if curve is None or encrypted:
        return TlsContexts(curve) if curve else None
    return ProofKey(sha256(_PROOF_PURPOSE + "".join(curve).encode()).digest())


def connection_of(made: socket.socket, keys: Keys, *, server: bool) -> Connection:
    match keys:
        case None:
            return PlainConnection(made)
        case ProofKey(key):
            return ProvenConnection(made, key, server=server)
        case _:
            return TlsConnection(made, keys.server if server else keys.client, server=server)


class PlainConnection:
    """Plain TCP."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self._expected = 1

    def ready(self) -> bool:
        return True

    def read(self, views: list[memoryview]) -> int:
        try:
            got = self._socket.recv_into(views[0]) if len(views) == 1 else self._socket.recvmsg_into(views)[0]
        except BlockingIOError:
            return 0
        if not got:
            raise ConnectionResetError("the peer has closed the connection")
        return got

    def expect(self, count: int) -> None:
        if count != self._expected:
            self._expected = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def write(self, views: list[memoryview]) -> int:
        try:
            return self._socket.sendmsg(views)
        except BlockingIOError:
            return 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class ProvenConnection(PlainConnection):
    """Plain TCP, after each side has shown by an HMAC over both sides' random numbers that it has the key.

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
        if self._done:
            return True
        if not self._server and not self._begun:
            self._send_proof_message(self._number)
        self._begun = True
        if not self._theirs:
            body = self._receive_proof_message(_NUMBER_BYTES if self._server else _NUMBER_BYTES + _PROOF_BYTES)
            if body is None:
                return False
            self._theirs = body[:_NUMBER_BYTES]
            if not self._server:
                self._check(body[_NUMBER_BYTES:], b"server")
                self._send_proof_message(self._proof(b"client"))
                self._done = True
                return True
            self._send_proof_message(self._number + self._proof(b"server"))
        body = self._receive_proof_message(_PROOF_BYTES)
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

    def _send_proof_message(self, body: bytes) -> None:
        """The kernel takes these some hundred bytes whole: the connection is new."""
        message = prefix(len(_MAGIC) + len(body), 0) + _MAGIC + body
        if self._socket.send(message) != len(message):
            raise ConnectionResetError("the peer takes nothing")

    def _receive_proof_message(self, size: int) -> bytes | None:
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
    """TLS 1.3. Records have at most 16 KB, so reads and writes take many calls."""

    def __init__(self, made: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self._socket = context.wrap_socket(
            made, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        self._done = False

    def ready(self) -> bool:
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
        """No effect: each record makes the socket readable."""

    def write(self, views: list[memoryview]) -> int:
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
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def host_and_port(address: str) -> tuple[str, int]:
    """Of `scheme://host:port`; a port of `*` is 0. Raises OSError for another form."""
    _, found, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not host or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise OSError(f"{address!r} is not an address of the form scheme://host:port")
    return host, 0 if port == "*" else int(port)


def numeric(host: str, port: int) -> list[Where]:
    """The socket address of a numeric host; empty for a name."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return []
    return [(socket.AF_INET, (host, port)) if version == 4 else (socket.AF_INET6, (host, port, 0, 0))]


def resolve(host: str, port: int) -> list[Where]:
    """The socket addresses of a host, IPv4 first. May take seconds. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty or overlong label
        raise OSError(f"{host!r} is not a valid host name: {error}") from error
    places: list[Where] = [(int(family), where) for family, _, _, _, where in found]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET)


class Resolver:
    """Resolves names in threads of their own, so that a silent name server holds up only the links that need it.

    One thread resolves a name at a time, however many links request it.
    """

    def __init__(self, on_done: Callable[[Callable[[], None]], None]) -> None:
        """`on_done(deliver)` is called in such a thread; the owner's thread must then call `deliver`."""
        self._on_done = on_done
        self._waiting: dict[tuple[str, int], list[OnResolved]] = {}

    def look_up(self, host: str, port: int, on_resolved: OnResolved) -> None:
        """Call `on_resolved(places, error)` once the name is resolved."""
        waiting = self._waiting.get((host, port))
        if waiting is not None:
            waiting.append(on_resolved)
            return
        self._waiting[host, port] = [on_resolved]
        threading.Thread(target=self._run, args=(host, port), name="kv-resolve", daemon=True).start()

    def _run(self, host: str, port: int) -> None:
        places: list[Where] = []
        try:
            places, error = resolve(host, port), ""
        except OSError as failure:
            error = f"{host}: {failure}"

        def deliver() -> None:
            for each in self._waiting.pop((host, port)):
                each(places, error)

        self._on_done(deliver)
