"""Wire versions: which processes may communicate, and how every message states the version of its sender.

`WIRE_VERSION` increases only for an incompatible change of a message; an added optional field keeps it, and
receivers ignore fields that they do not know. `MIN_WIRE_VERSION` is the oldest version that this code still speaks
with. Two processes communicate if neither is older than the other's minimum. Both sides apply this rule to the same
numbers, so that they agree.

Every message of RPC and publish/subscribe begins with a header of fixed shape, and every HTTP call that changes
something carries the same numbers in `HTTP_HEADER`. A message of an incompatible peer is refused before it is decoded.
"""

import struct
from dataclasses import dataclass, field

from shared.errors import WireVersionMismatch

WIRE_VERSION = 12
MIN_WIRE_VERSION = 12
HTTP_HEADER = "Polyphase-Wire-Version"
HEADER_BYTES = 4
_FIELDS = struct.Struct("BBB")
_MARK = 0xC1  # a byte that msgpack never uses; up to version 11 messages began with msgpack


@dataclass(frozen=True, slots=True)
class WireVersions:
    """The version of a process and the oldest version that it speaks with, each between 0 and 255."""

    version: int
    minimum: int
    header: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = _FIELDS.pack(_MARK, self.version, self.minimum)
        object.__setattr__(self, "header", fields + bytes([_check(fields)]))

    def __str__(self) -> str:
        return f"wire_version {self.version} (speaks with {self.minimum} and later)"

    def speaks_with(self, other: "WireVersions") -> bool:
        """Whether messages of each are understood by the other."""
        return self.version >= other.minimum and other.version >= self.minimum

    def mismatch(self, who: str, theirs: "WireVersions | str") -> WireVersionMismatch:
        """The error that names both versions. `who`: the peer."""
        return WireVersionMismatch(
            f"{who} has {theirs}, this process has {self}: not connected; run both from compatible releases"
        )

    def body(self, message: bytes | memoryview, who: str = "the peer") -> memoryview | None:
        """A message behind its header; None for one that has none.

        Raises WireVersionMismatch when the sender has an incompatible version.
        """
        view = memoryview(message)
        if view[:HEADER_BYTES].tobytes() != self.header:  # faster than to compare the view
            theirs = _read(view[:HEADER_BYTES])
            if theirs is None:
                return None
            if not self.speaks_with(theirs):
                raise self.mismatch(who, theirs)
        return view[HEADER_BYTES:]

    @property
    def http(self) -> dict[str, str]:
        return {HTTP_HEADER: f"{self.version}/{self.minimum}"}

    def check_http(self, said: str, who: str) -> WireVersionMismatch | None:
        """Why an HTTP call with this value of `HTTP_HEADER` is refused; None: it is accepted."""
        version, _, minimum = said.partition("/")
        try:
            theirs = WireVersions(int(version), int(minimum))
        except (ValueError, struct.error):
            return self.mismatch(who, f"wire_version {said[:40]!r} (not `version/minimum`)")
        return None if self.speaks_with(theirs) else self.mismatch(who, theirs)


def _check(fields: bytes) -> int:
    """A check byte, which distinguishes a flipped bit from another version."""
    value = 0x5A
    for byte in fields:
        value ^= byte
    return value


def _read(header: memoryview) -> WireVersions | None:
    if len(header) != HEADER_BYTES or header[0] != _MARK or header[-1] != _check(bytes(header[:-1])):
        return None
    _, version, minimum = _FIELDS.unpack(header[:-1])
    return WireVersions(version, minimum)


OURS = WireVersions(WIRE_VERSION, MIN_WIRE_VERSION)
