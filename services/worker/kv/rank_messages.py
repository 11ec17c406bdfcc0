"""The messages between a worker process and the KV endpoints of its ranks: structs only.

A worker sends operations, which `rank_control` carries. A rank answers each operation, and publishes events, which
`rank_events` carries.
"""

import time

import msgspec

from services.worker.kv.wire.protocol import Message
from shared.domain.kv import KvHandle

# Operations: worker to rank.


class Release(Message, frozen=True):
    """Drop what is staged or prefetched for the transfer, and refuse later pulls of it. Idempotent."""

    transfer_id: str


class Prefetch(Message, frozen=True):
    """Begin to pull the handle's tokens up to `tokens` before the engine has blocks for them.

    Best effort: without room, without progress, or after `keep_s` without an import of it, nothing of it is left.
    """

    handle: KvHandle
    tokens: int
    keep_s: float


class Drop(Message, frozen=True):
    """Forget a prefetch. An import that the engine has begun goes on."""

    transfer_id: str


class Accepted(Message, frozen=True):
    """The decode of a prefetched transfer was accepted here. From now on the exporters may free what the prefetch has
    received; before, the decode might be refused, and another instance would have to pull the same KV.
    """

    transfer_id: str


class RenewLease(Message, frozen=True):
    """Have the exporters keep the handle while a decode waits for blocks to pull it into. Best effort; a pull that is
    under way renews its lease by itself.
    """

    handle: KvHandle


class Stats(Message, frozen=True):
    """Report counters and levels."""


Operation = Release | Prefetch | Accepted | Drop | RenewLease | Stats


# The answer to `Stats`.


class RankStats(msgspec.Struct):
    """State of one rank. Counts and byte totals are since its start. Each of its threads counts in its own fields."""

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
    nixl_failures: int = 0  # pairs that both have NIXL and fell back to TCP
    nixl_refused: int = 0  # pairs that both have NIXL and may not use it
    host_block_s: float = 0.0  # that the load of a block from the host tier takes; 0: there is none


# The envelopes of an operation and of its answer on a control socket.


class Control(Message, frozen=True):
    """A request to a rank. `key` proves that the rank's owner sent it."""

    call: int
    key: str
    operation: Operation


class Answer(Message, frozen=True):
    """The response of a rank; `error` is empty when the operation was carried out."""

    call: int
    error: str = ""
    stats: RankStats | None = None


# Events: rank to worker.


class StagedChunk(msgspec.Struct, frozen=True, tag=True):
    """Tokens [0, token_end) of a transfer can be pulled from that rank, whose pool holds `staged_bytes` in all."""

    transfer_id: str
    rank: int
    token_end: int
    last: bool
    staged_bytes: int


class TransferEnded(msgspec.Struct, frozen=True, tag=True):
    """A rank has dropped what it held of an export and stages no more of it: all importers have pulled it, it was
    released or refused, or its lease has expired. The rank's pool holds `staged_bytes` now.
    """

    transfer_id: str
    rank: int
    staged_bytes: int


class ThreadEnded(msgspec.Struct, frozen=True, tag=True):
    """A bug ended a thread of that rank's KV endpoint: the instance cannot go on."""

    rank: int
    thread: str
    error: str


class StagingFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank could not stage the transfer; `reason` begins with a KvFault. Its pulls fail, its importers
    recompute.
    """

    transfer_id: str
    rank: int
    reason: str


class PullEnded(msgspec.Struct, frozen=True, tag=True):
    """An import ended on a rank; there is one for each rank and each request that had an import.

    Times are unix seconds; `error` begins with a KvFault unless `ok`. `ended_s` is when the last of its KV arrived: a
    prefetch may be complete long before the engine has blocks for it. `ok` with no tokens: the importer's cache held
    all of them and nothing was pulled.
    """

    transfer_id: str
    rank: int
    ok: bool
    error: str
    tokens: int
    wire_bytes: int
    started_s: float
    ended_s: float
    prefetched: bool
    transport: str = ""  # what carried it: tcp, nixl, or "nixl+tcp"

    @classmethod
    def without_pull(cls, transfer_id: str, rank: int, error: str) -> "PullEnded":
        now = time.time()
        return cls(transfer_id, rank, not error, error, 0, 0, now, now, False)


KvEvent = StagedChunk | TransferEnded | StagingFailed | PullEnded | ThreadEnded
