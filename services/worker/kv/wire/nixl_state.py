"""Whether and how a rank uses NIXL, and what it has done with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.kv.arena import Bytes

NIXL_SCHEME = "nixl"


@dataclass(frozen=True, slots=True)
class NixlUse:
    """Of one side of a rank. `staging`: all memory that may hold KV for export; `receiving_bytes`: to read into, 0 for
    the side that exports.
    """

    trusted: bool = False  # nobody but this cluster reaches the networks that UCX uses
    staging: Sequence[Bytes] = ()
    receiving_bytes: int = 0


@dataclass(slots=True)
class NixlCounters:
    """Since the start; written by the transport's thread only."""

    sent_bytes: int = 0
    received_bytes: int = 0
    failures: int = 0  # of pairs that both have NIXL: a trial or a read that did not go well
    refused: int = 0  # pairs that may not use it
