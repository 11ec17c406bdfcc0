"""The framing of KV over TCP (`services.worker.kv.wire.tcp_framing`), message by message."""

from dataclasses import dataclass, field
from random import Random

from lab.chaos.framing import Piece, Raw, flip_bit
from services.worker.kv.wire.frames import checksum
from services.worker.kv.wire.tcp_framing import DIGEST_BYTES, PREFIX, prefix

_MARK = prefix(0, 0)[:4]


@dataclass(frozen=True, slots=True)
class Message:
    """A message; a heartbeat has neither header nor payload. `digest` comes with a payload."""

    header: bytes
    payload: bytes = b""
    digest: bytes = b""
    ends_message = True

    @property
    def is_command(self) -> bool:
        """Whether it is a heartbeat."""
        return not self.header

    def encode(self) -> bytes:
        """As bytes on the wire."""
        return prefix(len(self.header), len(self.payload)) + self.header + self.payload + self.digest

    def flipped(self, rng: Random) -> "Message":
        """See Piece: the prefix stays true, as nobody could read on otherwise."""
        body = flip_bit(self.header + self.payload + self.digest, rng)
        header, payload = len(self.header), len(self.header) + len(self.payload)
        return Message(body[:header], body[header:payload], body[payload:])


def said(header: bytes, payload: bytes = b"") -> bytes:
    """As an honest peer's transport sends it."""
    digest = checksum(payload).to_bytes(DIGEST_BYTES, "little") if payload else b""
    return Message(header, payload, digest).encode()


@dataclass(slots=True)
class KvSplitter:
    """See Splitter. What is no such framing (TLS, a stranger) passes as it comes, from there on."""

    _rest: bytearray = field(default_factory=bytearray)
    _strange: bool = False

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        """See Splitter."""
        self._rest += data
        pieces: list[Piece] = []
        while (piece := self._next()) is not None:
            pieces.append(piece)
        return b"", pieces

    def _next(self) -> Piece | None:
        self._strange = self._strange or not _MARK.startswith(bytes(self._rest[: len(_MARK)]))
        if self._strange:
            return Raw(self._take(len(self._rest))) if self._rest else None
        if len(self._rest) < PREFIX.size:
            return None
        _, header_bytes, payload_bytes, _ = PREFIX.unpack_from(self._rest)
        digest_bytes = DIGEST_BYTES if payload_bytes else 0
        if len(self._rest) < PREFIX.size + header_bytes + payload_bytes + digest_bytes:
            return None
        self._take(PREFIX.size)
        return Message(self._take(header_bytes), self._take(payload_bytes), self._take(digest_bytes))

    def _take(self, size: int) -> bytes:
        taken = bytes(self._rest[:size])
        del self._rest[:size]
        return taken
