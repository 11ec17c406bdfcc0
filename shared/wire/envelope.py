"""What one ZeroMQ message of the RPC helper holds: a short list of envelopes.

Everything that is due to one peer in one turn of the event loop leaves as one message. So an engine step that
yields tokens for fifty jobs of one gateway is one message, not fifty. In front of them is the version of the sender,
see `shared.runtime.wire_version`.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from shared.domain.numbers import Finite
from shared.runtime.wire_version import OURS, WireVersions


class Kind(IntEnum):
    """What an envelope does to its call."""

    CALL = 0
    CANCEL = 1
    ITEM = 2
    REPLY = 3
    ERROR = 4
    NOTIFY = 5
    RESET = 6  # of call 0, from the server: each call up to the number in the body is given up, nothing follows


ITEM = Kind.ITEM.value  # as a plain int: tokens are what there are many of


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """`body` stays encoded until the handler of the call asks for it.

    `timeout_s` is the time the caller still has, relative, since clocks of hosts differ.
    """

    kind: int
    call: int
    method: str
    timeout_s: float  # checked by the server, which answers a bad one with an error
    body: msgspec.Raw


class ErrorBody(msgspec.Struct):
    """An error as it travels; `code` names the class in `shared.errors`. retry_after_s: when to come again."""

    code: str
    message: str
    retry_after_s: Finite | None = None


NO_BODY = msgspec.Raw(msgspec.msgpack.encode(None))
MAX_MESSAGE_BYTES = 16 << 20  # a server takes no larger one
MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 1024  # of one envelope to a server
_BATCH_BYTES = 1 << 20
ALL_CALLS = (1 << 63) - 1  # as the number of a RESET
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""

_encoder = msgspec.msgpack.Encoder()
# A batch holds fewer: even empty ones take ten bytes each.
_decoder = msgspec.msgpack.Decoder(Annotated[list[Envelope], msgspec.Meta(max_length=_BATCH_BYTES // 8)])


def encode_body(value: object) -> msgspec.Raw:
    """A value as an opaque body."""
    return msgspec.Raw(_encoder.encode(value))


def pack(envelopes: list[Envelope], wire: WireVersions = OURS) -> bytes:
    """One message."""
    return wire.header + _encoder.encode(envelopes)


def pack_batches(envelopes: list[Envelope], wire: WireVersions = OURS) -> list[tuple[list[Envelope], bytes]]:
    """As one message, or as several where that would be a large one: together they may exceed what a peer takes."""
    message = pack(envelopes, wire)
    if len(message) <= _BATCH_BYTES or len(envelopes) == 1:
        return [(envelopes, message)]
    middle = len(envelopes) // 2
    return pack_batches(envelopes[:middle], wire) + pack_batches(envelopes[middle:], wire)


def reset(last_call: int) -> Envelope:
    """Tells a peer that its calls up to this number are given up."""
    return Envelope(Kind.RESET, 0, "", 0.0, encode_body(last_call))


def unpack(frame: bytes, wire: WireVersions = OURS, who: str = "the peer") -> list[Envelope]:
    """The envelopes of a message of `who`. Raises WireVersionMismatch when its sender has an incompatible version, one
    of MALFORMED on anything else.
    """
    body = wire.body(frame, who)
    if body is None:
        _decoder.decode(frame)
        raise wire.mismatch(who, "a wire_version of 11 or earlier, which messages did not state")
    envelopes: list[Envelope] = _decoder.decode(body)
    return envelopes
