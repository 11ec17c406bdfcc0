"""References to KV that one instance exports and another imports."""

from enum import StrEnum

import msgspec


class Codec(StrEnum):
    """The encoding of KV on the wire. Only RAW is lossless."""

    RAW = "raw"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"

    @property
    def lossy(self) -> bool:
        """Whether decoded KV differs from the exporter's."""
        return self is not Codec.RAW


# Bytes of a coded transfer besides the elements (the connector's `payload_bytes`; a test compares the two).
# int8, int4: a 16-bit scale and a 16-bit zero for each group, of K 32 tokens of a channel, of V at most 64 channels of
# a token, and a 32-bit unit for each layer's K and V. fp8: a 32-bit scale for each layer's K and V and head.
TOKEN_GROUP, CHANNEL_GROUP = 32, 64
GROUP_BYTES, UNIT_BYTES = 4.0, 4.0


def wire_share(codec: Codec, dtype_bytes: float = 2.0, head_dim: int = 128) -> float:
    """Bytes on the wire per byte of stored KV, for long KV: 8.75 bits an element in int8, 4.75 in int4."""
    if codec is Codec.RAW:
        return 1.0
    groups = 0.0 if codec is Codec.FP8 else GROUP_BYTES * (1.0 / TOKEN_GROUP + 1.0 / channel_group(head_dim)) / 2.0
    return min(coded_bytes(codec) + groups, dtype_bytes) / dtype_bytes


def coded_bytes(codec: Codec) -> float:
    return 0.5 if codec is Codec.INT4 else 1.0


def channel_group(head_dim: int) -> int:
    """Channels of V that share a scale: the largest divisor of a head up to 64."""
    return next(group for group in range(min(CHANNEL_GROUP, head_dim), 0, -1) if head_dim % group == 0)


STAGING_SHARE = 0.25
EXPORT_SHARE = 0.2  # of an engine's time while it computes, that copies of KV from its cache may take


# How long, and in at most which share of its KV, an engine keeps KV of sessions by default.
SESSION_KEEP_S, SESSION_SHARE = 30.0, 0.1


def default_staging(kv: int, longest: int) -> int:
    """Default size of a rank's staging memory on the host: a quarter of its KV cache, and at least the longest prompt.
    All in bytes, or all in tokens.
    """
    return max(int(kv * STAGING_SHARE), longest)


class KvHandle(msgspec.Struct, frozen=True):
    """Opaque reference to KV that an instance stages for one transfer.

    It covers tokens [start, tokens) of the importer's prompt. `generation` is the exporter's: a restarted exporter
    refuses handles of its predecessor. `adapter`: the digest of the LoRA adapter that computed it; empty: the base
    model. `precision`: of the exporter's weights (`InstanceInfo.precision`). `salt`: the cache salt of KV that is not
    what its exporter would have computed itself, because it was imported in a lossy codec or another precision: the
    importer keeps it under this salt, too.
    """

    transfer_id: str
    instance_id: str
    generation: int
    fingerprint: str
    endpoints: tuple[str, ...]  # one a rank of the exporter: those of the first pipeline stage, then of the next
    tokens: int
    dtype: str
    codec: Codec = Codec.RAW
    stages: tuple[int, ...] = ()  # layers of each pipeline stage of the exporter, in order; empty: one stage of all
    lease_s: float = 0.0  # staged KV that is neither pulled nor renewed is kept for this long; 0: without limit
    adapter: str = ""
    precision: str = ""
    start: int = 0
    salt: str = ""


class TransferOutcome(StrEnum):
    """How a KV import ended."""

    PULLED = "pulled"  # all external tokens arrived and were verified
    CACHED = "cached"  # the importer had them already; nothing was pulled
    RECOMPUTED = "recomputed"  # the pull failed; the importer computed the tokens itself
    LOCAL = "local"  # there was no handle


class TransferReport(msgspec.Struct, frozen=True):
    """The import of KV for one job. Times are unix seconds, 0 when the event did not happen.

    ended_s: when the last of its KV had arrived; prefetched KV may wait for the engine after that.
    """

    outcome: TransferOutcome
    tokens: int = 0
    wire_bytes: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    error: str = ""
    transport: str = ""  # what carried it: tcp, nixl, or "nixl+tcp"
