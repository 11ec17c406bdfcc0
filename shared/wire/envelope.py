"""The content of an RPC message: the sender's wire version (`shared.runtime.wire_version`) and a list of envelopes.

All envelopes that are due to one peer in one turn of the event loop leave as one message: an engine step that yields
tokens for fifty jobs of one gateway is one message, not fifty.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from shared.domain.numbers import Finite
from shared.runtime.wire_version import OURS, WireVersions


class Kind(IntEnum):
    """The effect of an envelope on its call."""

    CALL = 0
    CANCEL = 1
    ITEM = 2
    REPLY = 3
    ERROR = 4
    NOTIFY = 5
    RESET = 6  # of call 0, from the server: it gives up all calls up to the number in the body


ITEM = Kind.ITEM.value  # as a plain int, which is faster: most envelopes are items


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """One step of a call. `body` stays encoded until its call is found. `timeout_s` is the caller's remaining time,
    relative because clocks of hosts differ.
    """

    kind: int
    call: int
    method: str
    timeout_s: float  # checked by the server, which answers a bad one with an error
    body: msgspec.Raw


class ErrorBody(msgspec.Struct):
    """An error on the wire; `code` names its class in `shared.errors`."""

    code: str
    message: str
    retry_after_s: Finite | None = None


NO_BODY = msgspec.Raw(msgspec.msgpack.encode(None))
MAX_MESSAGE_BYTES = 48 << 20  # a server takes no larger one
MAX_BODY_BYTES = MAX_MESSAGE_BYTES - 1024  # of one envelope to a server
_BATCH_BYTES = 1 << 20
ALL_CALLS = (1 << 63) - 1  # as the number of a RESET
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for malformed bytes."""

_encoder = msgspec.msgpack.Encoder()
# A batch holds fewer: even empty ones take ten bytes each.
_decoder = msgspec.msgpack.Decoder(Annotated[list[Envelope], msgspec.Meta(max_length=_BATCH_BYTES // 8)])


def encode_body(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


def pack(envelopes: list[Envelope], wire: WireVersions = OURS) -> bytes:
    return wire.header + _encoder.encode(envelopes)


def pack_batches(envelopes: list[Envelope], wire: WireVersions = OURS) -> list[tuple[list[Envelope], bytes]]:
    """The messages for envelopes, each with its envelopes: one, or several where one would be large and might exceed
    the limit of the peer.
    """
    message = pack(envelopes, wire)
    if len(message) <= _BATCH_BYTES or len(envelopes) == 1:
        return [(envelopes, message)]
    middle = len(envelopes) // 2
    return pack_batches(envelopes[:middle], wire) + pack_batches(envelopes[middle:], wire)


def reset(last_call: int) -> Envelope:
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
