"""What one ZeroMQ message of the RPC helper holds: a short list of envelopes.

Everything that is due to one peer in one turn of the event loop leaves as one message. So an engine step that
yields tokens for fifty jobs of one gateway is one message, not fifty.
"""

from enum import IntEnum

import msgspec


class Kind(IntEnum):
    """What an envelope does to its call."""

    CALL = 0
    CANCEL = 1
    ITEM = 2
    REPLY = 3
    ERROR = 4
    NOTIFY = 5


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """`body` stays encoded until the handler of the call asks for it.

    `timeout_s` is the time the caller still has, relative, since clocks of hosts differ.
    """

    kind: int
    call: int
    method: str
    timeout_s: float
    body: msgspec.Raw


class ErrorBody(msgspec.Struct):
    """An error as it travels; `code` names the class in `shared.errors`."""

    code: str
    message: str


NO_BODY = msgspec.Raw(msgspec.msgpack.encode(None))

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Envelope])


def encode_body(value: object) -> msgspec.Raw:
    """A value as an opaque body."""
    return msgspec.Raw(_encoder.encode(value))


def pack(envelopes: list[Envelope]) -> bytes:
    """One message."""
    return _encoder.encode(envelopes)


def unpack(frame: bytes) -> list[Envelope]:
    """The envelopes of a message. Raises msgspec.MsgspecError on anything else."""
    return _decoder.decode(frame)
