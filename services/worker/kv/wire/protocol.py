"""The KV protocol between instances: its messages, msgpack-coded msgspec structs.

Importer to exporter: `Pull`, `Credit`, `Cancel`, `Confirm`, `Renew`. Exporter to importer: `Frame` (followed by its
payload as a second part), `Sent`, `Failed`, `Unread`.

A pull names the tokens and heads it wants and grants an amount of payload bytes; the exporter sends frames as they
become staged while the grant lasts; the importer grants more as it consumes. Every frame describes itself, and the
importer knows by the ranges when it has everything.

Every message ends with a checksum: flipped bits may leave a message that can be decoded and names another transfer.
"""

from dataclasses import dataclass
from typing import TypeVar

import msgspec
import xxhash

from shared.domain.kv import Codec
from shared.wire.envelope import MALFORMED

FRAME_BYTES = 2 << 20  # target of a payload: the fixed cost of a frame is then a tenth of it
MAX_FRAME_BYTES = 8 << 20  # bound of a payload that a receiver accepts
MAX_MESSAGE_BYTES = 64 << 10  # bound of everything else
WINDOW_BYTES = 8 << 20  # payload in flight for one pull and peer
MAX_WINDOW_BYTES = 64 << 20  # the most that a pull may grant beyond what was sent
MAX_LIFE_S = 86_400.0  # bound of the times that a peer may request

Buffer = bytes | bytearray | memoryview
Decoded = TypeVar("Decoded")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the tag is the class name."""


class Pull(Message, frozen=True):
    """Request tokens [token_start, token_end) of layers [layer_start, layer_end) and heads [head_start, head_end) of a
    component (`kv.shards`), both numbered over all of it, coded by `codec`.

    `rank` of `ranks` importers requests them; `consumers` of these pull from this exporter rank. The exporter
    forgets the pull when it has received nothing from the importer for `timeout_s`.
    """

    pull_id: int
    transfer_id: str
    generation: int
    fingerprint: str
    codec: Codec
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    head_start: int
    head_end: int
    rank: int
    ranks: int
    consumers: int
    credit_bytes: int
    timeout_s: float
    component: int = 0


class Credit(Message, frozen=True):
    """The payload bytes that the exporter may have sent in total, so that a lost or repeated grant does no harm.

    The grant is repeated twice a second while anything is missing. `Sent` answers a repetition, `Failed` one for an
    unknown pull.
    """

    pull_id: int
    granted_bytes: int


class Cancel(Message, frozen=True):
    """The importer wants no more frames of this pull."""

    pull_id: int


class Confirm(Message, frozen=True):
    """Importer `rank` is done with the transfer, whether or not it succeeded; after `consumers` of these it is
    released.
    """

    transfer_id: str
    generation: int
    rank: int
    consumers: int


class Renew(Message, frozen=True):
    """A decode waits for blocks and will then pull the transfer, or part of it: its lease begins again. No answer."""

    transfer_id: str
    generation: int


class Frame(Message, frozen=True):
    """Header of one payload: [layer_end - layer_start, sides, tokens, heads, head_dim] of a component in `dtype`, coded
    by `codec`.

    Tokens, layers and heads are ranges numbered over the prompt and the whole component; `rank` of `ranks` exporters
    sent it.
    """

    pull_id: int
    sequence: int
    transfer_id: str
    generation: int
    codec: Codec
    dtype: str
    layer_start: int
    layer_end: int
    layers: int  # of the component
    token_start: int
    token_end: int
    head_start: int
    head_end: int
    head_dim: int
    rank: int
    ranks: int
    checksum: int  # xxh3_64 of the payload; 0 where the transport sends it behind the payload
    component: int = 0
    sides: int = 2
    scales: tuple[float, ...] = ()  # of the layers, side by side, of KV in eight bits; empty: 1

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        layers = self.layer_end - self.layer_start
        return layers, self.sides, self.token_end - self.token_start, self.head_end - self.head_start, self.head_dim


class Sent(Message, frozen=True):
    """How many frames of the pull were sent before this message: an importer with fewer has lost some."""

    pull_id: int
    frames: int


class Failed(Message, frozen=True):
    """The pull ends here; `fault` is a KvFault."""

    pull_id: int
    fault: str
    message: str


class Unread(Message, frozen=True):
    """A message could not be read; it may have been a pull or a grant. An importer that waits may repeat its grants."""


_encoder = msgspec.msgpack.Encoder()
Request = Pull | Credit | Cancel | Confirm | Renew
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
Reply = Frame | Sent | Failed | Unread
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_SEAL_BYTES = 8


def decoded(decoder: "msgspec.msgpack.Decoder[Decoded]", part: Buffer) -> Decoded | None:
    """Decode data of any origin; None for malformed data (seen: one such frame ended the thread that read it)."""
    try:
        return decoder.decode(part)
    except MALFORMED:
        return None


def checksum(payload: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def sealed(body: Buffer) -> bytes:
    """The body with its checksum behind it."""
    return bytes(body) + checksum(body).to_bytes(_SEAL_BYTES, "little")


def opened(decoder: "msgspec.msgpack.Decoder[Decoded]", part: Buffer) -> Decoded | None:
    """The message in a sealed body; None where it is malformed."""
    body, seal = memoryview(part)[:-_SEAL_BYTES], memoryview(part)[-_SEAL_BYTES:]
    return decoded(decoder, body) if seal == checksum(body).to_bytes(_SEAL_BYTES, "little") else None


def encode_message(message: Message) -> bytes:
    return sealed(_encoder.encode(message))


def decode_request(part: Buffer) -> Request | None:
    return opened(_requests, part)


def decode_reply(part: Buffer) -> Reply | None:
    return opened(_replies, part)


@dataclass(frozen=True, slots=True)
class Received:
    """A message of an exporter. The payload is not copied: it lasts until the link's next `receive`; see
    `TcpLink.keep`.
    """

    header: Buffer
    payload: Buffer | None = None  # None where there is none, or a `Placement` has received it
    payload_bytes: int = 0
    checksum: int = 0  # of the payload that arrived
    sent_checksum: int | None = None  # of the payload that was sent, where the transport sends it: TcpListener.seals


@dataclass(frozen=True, slots=True)
class Placement:
    """Memory for a payload that is about to arrive: views in order, as large as the payload in all."""

    owner: object  # the import that placed it, which may withdraw: see TcpLink.divert
    views: list[memoryview]
