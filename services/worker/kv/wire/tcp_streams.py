"""Messages on a TCP connection: how they are framed, and connections that are plain, TLS, or plain with a proof of the
cluster's key.

A message is a prefix, a header, and optionally a payload with its checksum. The prefix has 16 bytes, little-endian: a
mark, the sizes of header and payload, and a checksum over these, so that a reader notices flipped bits before it waits
for bytes that are not sent. A prefix without header and payload is a heartbeat, which a listener sends back. The
payload is followed by its xxh3_64, 8 bytes, little-endian: the reader hashes a piece while it is in the cache. So does
the writer of a payload whose checksum it does not know, and sends the first bytes before it has hashed the last ones.

For TLS, both sides show a certificate that follows from the cluster's key pair, and accept no other. There is no
authority to run and nothing to distribute: every process with the pair of the cluster file can make the certificate,
and proves by its handshake that it has the secret half. Certificate and key are the same on every host.
"""

import hmac
import os
import secrets
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256

import numpy as np
import xxhash
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from services.worker.kv.wire.protocol import MAX_MESSAGE_BYTES, Buffer, Placement, Received

PREFIX = struct.Struct("<4sIII")
_SIZES = struct.Struct("<4sII")
MARK = b"PKV2"
DIGEST_BYTES = 8
_VIEWS = 64  # of one call of a connection: more gain nothing
_AHEAD_BYTES = 4096  # read along with a prefix: at most this much of a payload is copied once more
_READ_BYTES = 512 << 10  # read at once: the data is still in the cache when it is hashed
_MORE_BYTES = 128 << 10  # a read of this much takes so long that more has arrived meanwhile
_WORTH_BYTES = _READ_BYTES  # of a payload: less is not worth a wake-up, unless it is the rest
_WRITE_BYTES = 512 << 10  # sent at once, so that the first piece leaves early
PlacePayload = Callable[[Buffer, int], Placement | None]  # the memory of a payload, by its header and size; None: any


class WireError(Exception):
    """The stream holds no valid message here, so nothing behind this point can be read either."""


class Untrusted(Exception):
    """The other side does not hold the cluster's keys, or says that this side does not."""


def prefix(header_bytes: int, payload_bytes: int) -> bytes:
    sizes = _SIZES.pack(MARK, header_bytes, payload_bytes)
    return sizes + xxhash.xxh32_intdigest(sizes).to_bytes(4, "little")


HEARTBEAT = prefix(0, 0)


class Inbound:
    """Reads messages from a connection, each payload directly into its memory."""

    def __init__(self, max_payload_bytes: int, place: PlacePayload = lambda *_: None) -> None:
        self.heartbeats = 0
        self.readable = True  # whether the connection may have more; its owner sets this when it has again
        self._max_payload_bytes = max_payload_bytes
        self._place = place
        self._head = memoryview(bytearray(2 * _AHEAD_BYTES))  # grows with a header that needs more
        self._filled = 0  # bytes in `_head`
        self._spare = memoryview(b"")  # for payloads without a placement
        self._views: list[memoryview] = []  # of the present payload, still to be filled, the next one last
        self._header = b""
        self._size = self._missing = 0  # bytes of the present payload, and those still to come
        self._placement: Placement | None = None
        self._unwanted = False  # the present payload is discarded
        self._hash = xxhash.xxh3_64()

    @property
    def first_byte(self) -> int:
        """The first byte of data that could not be read."""
        return self._head[0]

    def receive(self, connection: "Connection") -> Received | None:
        """The next message; None when the connection has no more at the moment. Raises WireError or OSError."""
        read = False
        while True:
            message = self._end_payload() if self._header else self._begin_message()
            if message is not None or not self.readable:
                break
            read = True
            if self._missing:
                self._read_payload(connection)
            else:
                self._read_head(connection)
        if read and not self.readable:  # only then: a caller that expects less has a reason
            connection.expect(min(_WORTH_BYTES, self._missing + DIGEST_BYTES) if self._missing else 1)
        return message

    def keep(self) -> None:
        """The payload that was received last must not be overwritten."""
        self._spare = memoryview(b"")

    def divert(self, owner: object) -> None:
        """If that owner placed the present payload, discard the rest of it."""
        if self._placement is not None and self._placement.owner is owner:
            self._placement, self._unwanted = None, True
            self._views = [self._room(self._missing)]

    def _begin_message(self) -> Received | None:
        """A message without a payload, if one is here; for a payload its memory is prepared."""
        if self._filled < PREFIX.size:
            return None
        mark, header_bytes, payload_bytes, _ = PREFIX.unpack_from(self._head)
        if mark != MARK or self._head[: PREFIX.size] != prefix(header_bytes, payload_bytes):
            raise WireError("not a message")
        if header_bytes > MAX_MESSAGE_BYTES or payload_bytes > self._max_payload_bytes:
            raise WireError(f"a message of {header_bytes} and {payload_bytes} bytes")
        end = PREFIX.size + header_bytes
        if self._filled < end:
            return None
        header = bytes(self._head[PREFIX.size : end])
        if not header_bytes:
            if payload_bytes:
                raise WireError("a payload without a header")
            self.heartbeats += 1
            self._drop(end)
            return self._begin_message()
        if not payload_bytes:
            self._drop(end)
            return Received(header)
        self._begin_payload(header, payload_bytes, end)
        return self._end_payload()

    def _begin_payload(self, header: bytes, payload_bytes: int, end: int) -> None:
        """Begin a payload with the part of it that was read with its header."""
        self._header, self._size, self._missing = header, payload_bytes, payload_bytes
        self._placement = self._place(header, payload_bytes)
        self._views = [self._room(payload_bytes)] if self._placement is None else self._placement.views[::-1]
        self._hash.reset()
        ahead = self._head[end : min(self._filled, end + payload_bytes)]
        copied = 0
        while copied < len(ahead):
            view = self._views[-1]
            part = ahead[copied : copied + len(view)]
            view[: len(part)] = part
            copied += len(part)
            self._advance(len(part))
        self._drop(end + copied)

    def _end_payload(self) -> Received | None:
        if self._missing or self._filled < DIGEST_BYTES:
            return None
        sent = int.from_bytes(self._head[:DIGEST_BYTES], "little")
        self._drop(DIGEST_BYTES)
        payload = None if self._placement is not None else self._spare[: self._size]
        message = Received(self._header, payload, self._size, self._hash.intdigest(), sent)
        unwanted, self._unwanted = self._unwanted, False
        self._header, self._placement = b"", None
        return self._begin_message() if unwanted else message

    def _read_head(self, connection: "Connection") -> None:
        begun = self._filled >= PREFIX.size and not self._header
        wanted = PREFIX.size + (PREFIX.unpack_from(self._head)[1] if begun else 0)
        if wanted > len(self._head):
            grown = memoryview(bytearray(wanted + _AHEAD_BYTES))
            grown[: self._filled] = self._head[: self._filled]
            self._head = grown
        self._filled += connection.read([self._head[self._filled :]])
        self.readable = self._filled == len(self._head)

    def _read_payload(self, connection: "Connection") -> None:
        """Read what is missing, and in the same call what may follow it."""
        views: list[memoryview] = []
        room = _READ_BYTES
        for view in self._views[: -_VIEWS - 1 : -1]:
            room -= len(view)
            views.append(view if room >= 0 else view[:room])
            if room <= 0:
                break
        wanted = _READ_BYTES - max(0, room)
        if wanted == self._missing:
            wanted += _AHEAD_BYTES
            views.append(self._head[:_AHEAD_BYTES])
        got = connection.read(views)
        ours = min(got, self._missing)
        self._advance(ours)
        self.readable = got == wanted or (self._missing > 0 and got >= _MORE_BYTES)
        self._filled = got - ours

    def _advance(self, count: int) -> None:
        """Account for that many more bytes of the payload."""
        self._missing -= count
        views, update = self._views, self._hash.update
        while count:
            view = views.pop()
            size = len(view)
            if count < size:
                update(view[:count])
                views.append(view[count:])
                return
            update(view)
            count -= size

    def _drop(self, end: int) -> None:
        """Drop the first bytes of what was read ahead."""
        if end < self._filled:
            rest = bytes(self._head[end : self._filled])
            self._head[: len(rest)] = rest
        self._filled -= end

    def _room(self, size: int) -> memoryview:
        if len(self._spare) < size:
            self._spare = np.empty(size, np.uint8).data
        return self._spare[:size]


class Outbound:
    """Messages that wait to be sent, in order; nothing is copied."""

    def __init__(self) -> None:
        # And whether it is a payload whose checksum is to be computed, or what is left of one.
        self._waiting: deque[tuple[memoryview, bool]] = deque()
        self._ready: deque[memoryview] = deque()  # goes first
        self._hash = xxhash.xxh3_64()  # of the payload at the front

    def __len__(self) -> int:
        return len(self._ready) + len(self._waiting)

    def put(self, header: bytes, payload: Buffer | None = None, digest: int | None = None) -> None:
        """`digest`: the checksum of the payload, which is computed where it is missing."""
        size = len(payload) if payload is not None else 0
        message = memoryview(prefix(len(header), size) + header)
        if not size and not self._waiting and len(self._ready) < _VIEWS:
            self._ready.append(message)
            return
        self._waiting.append((message, False))
        if payload is None or not size:
            return
        self._waiting.append((memoryview(payload).cast("B"), digest is None))
        if digest is not None:
            self._waiting.append((memoryview(digest.to_bytes(DIGEST_BYTES, "little")), False))

    def heartbeat(self) -> None:
        self._waiting.append((memoryview(HEARTBEAT), False))

    def flush(self, connection: "Connection") -> bool:
        """Write as much as the connection accepts; whether that was all. Raises OSError."""
        ready = self._ready
        while ready or self._waiting:
            if not ready:
                self._prepare()
            left = connection.write(ready)
            while ready and left >= len(ready[0]):
                left -= len(ready.popleft())
            if ready:
                ready[0] = ready[0][left:]
                return False
        return True

    def clear(self) -> None:
        self._waiting.clear()
        self._ready.clear()
        self._hash.reset()

    def _prepare(self) -> None:
        """Make messages ready, and one piece of a payload: it is in the cache when the kernel copies it."""
        ready, waiting = self._ready, self._waiting
        while waiting and len(ready) < _VIEWS:
            data, hashed = waiting.popleft()
            if not hashed:
                ready.append(data)
                continue
            piece, rest = data[:_WRITE_BYTES], data[_WRITE_BYTES:]
            self._hash.update(piece)
            ready.append(piece)
            if rest:
                waiting.appendleft((rest, True))
            else:
                ready.append(memoryview(self._hash.intdigest().to_bytes(DIGEST_BYTES, "little")))
                self._hash.reset()
            return


_CERTIFICATE_PURPOSE = b"polyphase kv tls 1"
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "polyphase-kv")])
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_PROOF_PURPOSE = b"polyphase kv proof 1"
_MAGIC = b"PKA1"
_NONCE_BYTES = _PROOF_BYTES = 32
_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsContexts:
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


class Connection:
    """A connected socket that never blocks: plain TCP, and the base of those with keys."""

    def __init__(self, raw: socket.socket) -> None:
        self._socket = raw
        self._expected = 1

    def ready(self) -> bool:
        """Go on with the handshake; whether it is done. Raises OSError or Untrusted."""
        return True

    def read(self, views: list[memoryview]) -> int:
        """Bytes read into the views, in order: fewer than they hold when no more are available. Raises OSError, at
        the stream's end too.
        """
        try:
            got = self._socket.recv_into(views[0]) if len(views) == 1 else self._socket.recvmsg_into(views)[0]
        except BlockingIOError:
            return 0
        if not got:
            raise ConnectionResetError("the peer has closed the connection")
        return got

    def expect(self, count: int) -> None:
        """The connection need not become readable before that many bytes are available."""
        if count != self._expected:
            self._expected = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def write(self, views: Sequence[memoryview]) -> int:
        """Bytes written of the views, in order; fewer than they hold when there is no more room. Raises OSError."""
        try:
            return self._socket.send(views[0]) if len(views) == 1 else self._socket.sendmsg(views)
        except BlockingIOError:
            return 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class ProvenConnection(Connection):
    """Plain TCP, after each side has shown by an HMAC over both sides' random numbers that it has the key.

    Framed as messages of the protocol, which a peer without a key reads as such: the client's number; the server's
    number and proof; the client's proof.
    """

    def __init__(self, raw: socket.socket, key: bytes, *, server: bool) -> None:
        super().__init__(raw)
        self._key = key
        self._server = server
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._peer_nonce = b""
        self._received = b""
        self._begun = self._done = False

    def ready(self) -> bool:
        if not self._done:
            if not self._begun and not self._server:
                self._send(self._nonce)
            self._begun = True
            self._done = self._serve() if self._server else self._prove()
        return self._done

    def _prove(self) -> bool:
        body = self._receive(_NONCE_BYTES + _PROOF_BYTES)
        if body is None:
            return False
        self._peer_nonce = body[:_NONCE_BYTES]
        self._check(body[_NONCE_BYTES:], b"server")
        self._send(self._proof(b"client"))
        return True

    def _serve(self) -> bool:
        if not self._peer_nonce:
            nonce = self._receive(_NONCE_BYTES)
            if nonce is None:
                return False
            self._peer_nonce = nonce
            self._send(self._nonce + self._proof(b"server"))
        proof = self._receive(_PROOF_BYTES)
        if proof is None:
            return False
        self._check(proof, b"client")
        return True

    def _proof(self, side: bytes) -> bytes:
        client, server = (self._peer_nonce, self._nonce) if self._server else (self._nonce, self._peer_nonce)
        return hmac.digest(self._key, side + client + server, "sha256")

    def _check(self, proof: bytes, side: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(side)):
            raise Untrusted("the peer has another key")

    def _send(self, body: bytes) -> None:
        """The kernel takes these some hundred bytes whole: the connection is new."""
        message = prefix(len(_MAGIC) + len(body), 0) + _MAGIC + body
        if self._socket.send(message) != len(message):
            raise ConnectionResetError("the peer takes nothing")

    def _receive(self, size: int) -> bytes | None:
        """A message of that many bytes behind its magic; None until it is here. Raises Untrusted for anything else."""
        begin = prefix(len(_MAGIC) + size, 0) + _MAGIC
        wanted = len(begin) + size
        while len(self._received) < wanted:
            try:
                got = self._socket.recv(wanted - len(self._received))
            except BlockingIOError:
                return None
            if not got:
                raise ConnectionResetError("the peer has closed the connection")
            self._received += got
            if not begin.startswith(self._received[: len(begin)]):
                raise Untrusted("the peer shows no key")
        body, self._received = self._received[len(begin) :], b""
        return body


class TlsConnection(Connection):
    """TLS 1.3. Records have at most 16 KB, so reads and writes take many calls."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        super().__init__(raw)
        self._tls = context.wrap_socket(
            raw, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        self._socket = self._tls
        self._done = False

    def ready(self) -> bool:
        if self._done:
            return True
        try:
            self._tls.do_handshake()
        except _WAITS:
            return False
        except ssl.SSLError as error:
            raise Untrusted(error.reason or str(error)) from error
        self._done = True
        return True

    def read(self, views: list[memoryview]) -> int:
        """See Connection. Raises Untrusted where the peer refuses our certificate, which TLS 1.3 reports late."""
        got = 0
        try:
            for view in views:
                while view:
                    some = self._tls.recv_into(view)
                    if not some and got:
                        return got  # the end is found by the next call
                    if not some:
                        raise ConnectionResetError("the peer has closed the connection")
                    got += some
                    view = view[some:]
        except _WAITS:
            return got
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise Untrusted(error.reason) from error
            raise
        return got

    def expect(self, count: int) -> None:
        """No effect: each record makes the socket readable."""

    def write(self, views: Sequence[memoryview]) -> int:
        sent = 0
        try:
            for view in views:
                while view:
                    some = self._tls.send(view)
                    sent += some
                    view = view[some:]
        except _WAITS:
            return sent
        return sent


def connection_of(raw: socket.socket, keys: Keys, *, server: bool) -> Connection:
    match keys:
        case None:
            return Connection(raw)
        case ProofKey(key):
            return ProvenConnection(raw, key, server=server)
        case _:
            return TlsConnection(raw, keys.server if server else keys.client, server=server)
