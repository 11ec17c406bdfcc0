"""Messages of the KV protocol, msgpack-coded msgspec structs.

Importer to exporter: `Pull`, `Credit`, `Cancel`, `Confirm`, `Renew`. Exporter to importer: `Frame` (followed by its
payload as a second part), `Sent`, `Failed`, `Unread`. Worker process to its own ranks: `Control`, answered by `Answer`.

A pull names the tokens and heads it wants and grants an amount of payload bytes; the exporter sends frames as
they become staged while the grant lasts; the importer grants more as it consumes. Every frame describes
itself, and the importer knows by the ranges when it has everything.

Every message ends with a checksum over it: bits that flip on the way may leave one that reads well and names another
transfer, for which somebody would wait.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import xxhash

from services.worker.kv.errors import KvError, KvFault
from shared.domain.kv import Codec, KvHandle
from shared.wire.envelope import MALFORMED

FRAME_BYTES = 2 << 20  # target of a payload: what a frame costs beside its bytes is then a tenth of it
MAX_FRAME_BYTES = 8 << 20  # bound of a payload that a receiver accepts
MAX_MESSAGE_BYTES = 64 << 10  # bound of everything else
WINDOW_BYTES = 8 << 20  # payload in flight for one pull and peer
MAX_WINDOW_BYTES = 64 << 20  # an exporter grants no more than this, whatever is asked
MAX_LIFE_S = 86_400.0  # what somebody may ask to be kept for

Buffer = bytes | bytearray | memoryview
Decoded = TypeVar("Decoded")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the tag is the class name."""


class Pull(Message, frozen=True):
    """Wants tokens [token_start, token_end) of layers [layer_start, layer_end) and heads [head_start, head_end), both
    numbered over the whole model.

    It wants them coded by `codec`. `rank` of `ranks` importers asks; `consumers` of those pull from this exporter rank.
    The exporter forgets the pull when it has heard nothing of the importer for `timeout_s`.
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


class Credit(Message, frozen=True):
    """What the exporter may have sent in all: one that is lost or comes twice does no harm, as the next one says it
    again. One comes twice a second while anything is missing; `Sent`, or `Failed` for a pull that is not known, answers
    one that grants nothing new.
    """

    pull_id: int
    granted_bytes: int


class Cancel(Message, frozen=True):
    """The importer does not want the rest."""

    pull_id: int


class Confirm(Message, frozen=True):
    """Importer `rank` is done with the transfer, well or not; after `consumers` of these it is released."""

    transfer_id: str
    generation: int
    rank: int
    consumers: int


class Renew(Message, frozen=True):
    """A decode waits for blocks and will pull the transfer, or part of it, then: its lease begins again. No answer."""

    transfer_id: str
    generation: int


class Frame(Message, frozen=True):
    """Header of one payload: KV [layer_end - layer_start, 2, tokens, heads, head_dim] in `dtype`, coded by
    `codec`.

    Tokens, layers and heads are ranges numbered over the prompt and the whole model; `rank` of `ranks` exporters
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
    layers: int  # of the model
    token_start: int
    token_end: int
    head_start: int
    head_end: int
    head_dim: int
    rank: int
    ranks: int
    checksum: int  # xxh3_64 of the payload; 0 where the transport sends it behind the payload

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the KV."""
        layers = self.layer_end - self.layer_start
        return layers, 2, self.token_end - self.token_start, self.head_end - self.head_start, self.head_dim


class Sent(Message, frozen=True):
    """So many frames went out before this: whoever has fewer has lost some."""

    pull_id: int
    frames: int


class Failed(Message, frozen=True):
    """The pull ends here; `fault` is a KvFault."""

    pull_id: int
    fault: str
    message: str


class Unread(Message, frozen=True):
    """Something came that could not be read: it may have been a pull, or a grant. Who waits may ask again at once."""


class Release(Message, frozen=True):
    """Control: drop what is staged for the transfer."""

    transfer_id: str


class Prefetch(Message, frozen=True):
    """Control: pull tokens [0, tokens) of the handle into the inbox."""

    handle: KvHandle
    tokens: int
    timeout_s: float


class Drop(Message, frozen=True):
    """Control: forget a prefetch."""

    transfer_id: str


class RenewLease(Message, frozen=True):
    """Control: send `Renew` to the exporters of the handle, unless it is being pulled."""

    handle: KvHandle


class Stats(Message, frozen=True):
    """Control: report counters and levels."""


class Control(Message, frozen=True):
    """A control operation for this rank. `key` proves that its owner asks."""

    call: int
    key: str
    operation: Release | Prefetch | Drop | RenewLease | Stats


class RankStats(msgspec.Struct, frozen=True):
    """State of one rank. Counts and byte totals are since its start."""

    rank: int = 0
    staged_bytes: int = 0
    staging_limit_bytes: int = 0
    transfers: int = 0  # staged, in part or in full
    serving: int = 0  # pulls of peers under way
    pulling: int = 0  # own pulls under way, prefetches included
    inbox_bytes: int = 0  # prefetched payload that waits for its blocks
    sent_bytes: int = 0
    received_bytes: int = 0
    pulls_served: int = 0
    pulls_refused: int = 0  # of peers, with an error
    pulls_ok: int = 0
    pulls_failed: int = 0
    prefetches: int = 0  # begun
    staging_failed: int = 0
    leases_expired: int = 0
    leases_renewed: int = 0  # by importers whose decodes wait for blocks
    dropped_messages: int = 0  # garbage, oversized or unknown
    events_lost: int = 0
    nixl_sent_bytes: int = 0  # of `sent_bytes`
    nixl_received_bytes: int = 0  # of `received_bytes`
    nixl_failures: int = 0  # of pairs that both have NIXL: their KV goes over TCP
    nixl_refused: int = 0  # pairs that both have NIXL and may not use it


class Answer(Message, frozen=True):
    """To a control operation; `error` is empty when it was done."""

    call: int
    error: str = ""
    stats: RankStats | None = None


_encoder = msgspec.msgpack.Encoder()
Request = Pull | Credit | Cancel | Confirm | Renew | Control
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
Reply = Frame | Sent | Failed | Unread
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_answers = msgspec.msgpack.Decoder(Answer)
_SEAL_BYTES = 8


def decoded(decoder: "msgspec.msgpack.Decoder[Decoded]", part: Buffer) -> Decoded | None:
    """What anybody may have sent; None for garbage (seen: one such frame ended the thread that read it)."""
    try:
        return decoder.decode(part)
    except MALFORMED:
        return None


def encode_message(message: Message) -> bytes:
    """Any message as bytes."""
    return sealed(_encoder.encode(message))


def sealed(body: bytes) -> bytes:
    """A message's body and its checksum."""
    return body + _seal(body)


def _seal(body: Buffer) -> bytes:
    return checksum(body).to_bytes(_SEAL_BYTES, "little")


def opened(decoder: "msgspec.msgpack.Decoder[Decoded]", part: Buffer) -> Decoded | None:
    """A sealed message; None for garbage."""
    body, seal = memoryview(part)[:-_SEAL_BYTES], memoryview(part)[-_SEAL_BYTES:]
    return decoded(decoder, body) if seal == _seal(body) else None


def decode_request(part: Buffer) -> Request | None:
    """What an importer or the worker sent; None for garbage."""
    return opened(_requests, part)


def decode_reply(part: Buffer) -> Reply | None:
    """What an exporter sent; None for garbage."""
    return opened(_replies, part)


def decode_answer(part: Buffer) -> Answer | None:
    """What a rank answered to its worker; None for garbage."""
    return opened(_answers, part)


def checksum(payload: Buffer) -> int:
    """Checksum of a payload or a message."""
    return xxhash.xxh3_64_intdigest(payload)


def verify(frame: Frame, digest: int, sent_digest: int | None = None) -> None:
    """Raise KvError(CHECKSUM) unless the payload, of that checksum, is what was sent.

    `sent_digest` is what the transport has sent along; then the frame need not tell, but must not tell otherwise.
    """
    sent = {frame.checksum} if sent_digest is None else {sent_digest, frame.checksum or sent_digest}
    if sent != {digest}:
        raise KvError(KvFault.CHECKSUM, f"layers {frame.layer_start}.. tokens {frame.token_start}..")


# MERGED transport.py
# How KV messages move: one small protocol, with an implementation for each scheme of an address (`transports`).
#
# A `Transport` belongs to one thread, which waits on it, and drains what is ready; only `wake` may be called from
# elsewhere.


@dataclass(frozen=True, slots=True)
class Received:
    """A message of an exporter. The payload is no copy: it lasts until the link's next `receive`; see `Link.keep`."""

    header: Buffer
    payload: Buffer | None = None  # None where there is none, or it lies where `Place` wanted it
    payload_bytes: int = 0
    checksum: int = 0  # of the payload, as it came
    sent_checksum: int | None = None  # of the payload, as it was sent, where the transport sends it: see Listener.seals


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a payload goes that has not come yet: memory in order, as large as the payload in all."""

    owner: object  # who wanted it there, and may want so no more: see Link.divert
    views: list[memoryview]


class Place(Protocol):
    """Says where a payload goes, once its header is here; None: anywhere. Not every transport asks."""

    def __call__(self, link: "Link", header: Buffer, size_bytes: int) -> Placement | None:
        """Called on the transport's thread; raises nothing."""


class Listener(Protocol):
    """Export side: many peers, each with an identity."""

    address: str
    seals: bool  # payloads are followed by their checksum: nobody else need take it

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message with its sender, or None when there is none at the moment."""

    def takes(self, peer: bytes) -> bool:
        """Whether a payload for that peer would be on its way at once, not behind others; true of one that is gone."""

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        """Send without blocking or copying the payload, which must not change later; False when the peer is
        gone.
        """


class Link(Protocol):
    """Import side: one connection to a peer. Reconnects by itself; `losses` rises with each lost connection."""

    address: str

    @property
    def losses(self) -> int:
        """Connections that were lost."""
        ...

    @property
    def stranger(self) -> str:
        """Why the peer and we do not trust each other; empty as long as nothing says so."""
        ...

    @property
    def carrier(self) -> str:
        """What has brought the message that was received last: "tcp", "zeromq" or "nixl"."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the peer has greeted us over the present connection."""

    def receive(self) -> Received | None:
        """The next message, or None when there is none at the moment."""

    def keep(self) -> None:
        """The payload of the message that was received last stays as it is."""

    def send(self, message: bytes) -> bool:
        """Send without blocking; False when it cannot be taken."""

    def divert(self, owner: object) -> None:
        """What is on its way to where this owner placed it goes nowhere; that memory is not touched again."""

    def close(self) -> None:
        """Disconnect."""


class Transport(Protocol):
    """Makes listeners and links, and waits for all of them at once."""

    def listen(self, address: str) -> Listener:
        """Bind. Raises OSError when the address cannot be had."""

    def connect(self, address: str, place: Place | None = None) -> Link:
        """A link of its own to an address, which need not be up yet. Raises OSError when the address makes no sense."""

    def wait(self, timeout_s: float) -> list[Link]:
        """Wait until a listener or link has something or `wake` is called; the links that have."""

    def wake(self) -> None:
        """End the current or next wait. Callable from any thread."""

    def close(self) -> None:
        """Close everything."""
