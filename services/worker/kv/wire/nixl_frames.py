"""What the two ends of a connection say to each other about NIXL, beside the KV messages.

The importer begins, with `Meet`; the exporter answers with `Met` and its agent's metadata as the payload, or says why
not. The importer reads a few bytes as a trial, and says `Ready`, or, whenever it cannot read, `Part`. From `Ready` on a
payload is not sent but offered: the importer reads it and says `Taken`, after which the exporter may use that memory
for something else.

A mark that begins no msgpack value tells them from KV messages.
"""

import msgspec

from services.worker.kv.wire.frames import Buffer, opened, sealed

VERSION = 1
_MARK = b"\xc1"


class NixlMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all; the tag is the class name."""


class Meet(NixlMessage, frozen=True):
    """The importer has NIXL. `host` is `nixl_agent.this_host()`; `trusted` whether its agent uses other networks."""

    version: int
    host: str
    trusted: bool


class Met(NixlMessage, frozen=True):
    """The answer: why the exporter's memory is not to be read, or what to try with: `size_bytes` at `address`, of that
    checksum.
    """

    refusal: str
    address: int = 0
    size_bytes: int = 0
    checksum: int = 0


class Ready(NixlMessage, frozen=True):
    """The trial went well."""


class Part(NixlMessage, frozen=True):
    """No reads any more, and those under way have come to nothing."""

    reason: str


class Offer(NixlMessage, frozen=True):
    """In place of a KV message with a payload: its header, and where the payload lies. Numbered from 1."""

    number: int
    address: int
    size_bytes: int
    header: bytes


class Taken(NixlMessage, frozen=True):
    """Offers up to that one have been read."""

    number: int


AnyMessage = Meet | Met | Ready | Part | Offer | Taken
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: NixlMessage) -> bytes:
    """Any message as bytes."""
    return _MARK + sealed(_encoder.encode(message))


def decode(part: Buffer) -> AnyMessage | None:
    """None for what is no message of these."""
    if part[:1] != _MARK:
        return None
    return opened(_decoder, memoryview(part)[1:])
