"""References to KV that one instance exports and another imports."""

from enum import StrEnum

import msgspec


class Codec(StrEnum):
    """How KV is coded on the wire. Only RAW is exact."""

    RAW = "raw"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"

    @property
    def lossy(self) -> bool:
        """Whether decoded KV differs from the exporter's."""
        return self is not Codec.RAW


class KvHandle(msgspec.Struct, frozen=True):
    """Opaque reference to KV that a prefill instance stages for one transfer.

    Covers tokens [0, tokens) of the prompt. `generation` is the exporter's: a restarted exporter never
    answers for its predecessor.
    """

    transfer_id: str
    instance_id: str
    generation: int
    fingerprint: str
    endpoints: tuple[str, ...]  # one a tensor-parallel rank of the exporter, in rank order
    tokens: int
    dtype: str
    codec: Codec = Codec.RAW


class TransferOutcome(StrEnum):
    """How a KV import ended."""

    PULLED = "pulled"  # all external tokens arrived and were verified
    CACHED = "cached"  # the importer had them already; nothing was pulled
    RECOMPUTED = "recomputed"  # the pull failed; the importer computed the tokens itself
    LOCAL = "local"  # there was no handle


class TransferReport(msgspec.Struct, frozen=True):
    """What the importer did for one job. Times are unix seconds, 0 when it did not happen."""

    outcome: TransferOutcome
    tokens: int = 0
    wire_bytes: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    error: str = ""
