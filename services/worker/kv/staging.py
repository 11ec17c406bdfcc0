"""The host pool of the export side: KV that was copied out of the engine's blocks waits here for importers, divided
into parts of host memory, unchanged or coded.

The pool is bounded by bytes, and transfers are leased by time. The engine's thread admits chunks, the copies commit
them, the server's thread reads, and any thread may release. A lease begins again with each chunk that is staged, with
each look of a pull, and with each renewal by an importer whose engine has no blocks for the KV yet.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.host_memory import Bytes
from shared.domain.kv import Codec

_REMEMBERED = 4096  # ended transfers whose reason is kept, so that a late pull fails at once
LEASE_RENEWALS = 120  # of one transfer by importers that wait; 20 minutes with leases of 30 s
_FRESH_SHARE = 5 / 6  # a lease of which more than this share is left is not renewed


@dataclass(frozen=True, slots=True)
class Segment:
    """KV of tokens [token_start, token_end): contiguous [layers, 2, tokens, heads, head_dim] on the host."""

    token_start: int
    token_end: int
    kv: torch.Tensor
    data: memoryview = field(init=False)  # its bytes, made here because torch is slow at it and no pull waits yet

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", self.kv.view(torch.uint8).reshape(-1).numpy().data)


@dataclass(frozen=True, slots=True)
class CodedLayers:
    """A payload of layers [start, end), counted from the rank's first: uint8 on the host."""

    start: int
    end: int
    payload: torch.Tensor


@dataclass(frozen=True, slots=True)
class CodedSegment:
    """KV of tokens [token_start, token_end) in payloads of `codec`: those of frames that hold whole segments and
    all of the rank's heads.
    """

    token_start: int
    token_end: int
    codec: Codec
    payloads: tuple[CodedLayers, ...]


Staged = Sequence[Segment | CodedSegment]


@dataclass(slots=True)
class Transfer:
    """The staged KV of one transfer. Its segments follow each other without gaps."""

    transfer_id: str
    expires_s: float = 0.0
    segments: list[Segment | CodedSegment] = field(default_factory=list)
    token_end: int = 0
    complete: bool = False
    size_bytes: int = 0
    renewals: int = 0
    confirmed: set[int] = field(default_factory=set)


class StagingPool:
    """Staged transfers of one rank. Thread-safe; no call waits.

    `on_change` is called after every change that a waiting pull may need; `on_end(transfer_id, staged_bytes)` once
    for each transfer, when it has ended for whatever reason and nothing is being copied for it any more.
    """

    def __init__(
        self,
        limit_bytes: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
        on_end: Callable[[str, int], None] = lambda *_: None,
        renewals: int = LEASE_RENEWALS,
    ) -> None:
        """`renewals`: how often importers that wait may renew the lease of one transfer."""
        self.limit_bytes = limit_bytes
        self.staging_failed = 0
        self.leases_expired = 0
        self.leases_renewed = 0
        self._lease_s = lease_s
        self._renewals = renewals
        self._clock = clock
        self._on_change = on_change
        self._on_end = on_end
        self._transfers: dict[str, Transfer] = {}
        self._ended: OrderedDict[str, KvFault] = OrderedDict()
        self._copying: dict[str, int] = {}  # chunks that are admitted and neither committed nor abandoned
        self._ending: set[str] = set()  # of these, transfers that have ended and whose `on_end` is still to be called
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def staged_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._transfers)

    def admit(self, transfer_id: str, size_bytes: int, whole_bytes: int = 0) -> None:
        """Take room for a chunk of a transfer of `whole_bytes`, whose copy may begin; `commit` or `abandon`
        follows.

        Raises KvError: REFUSED when there is too little room, now or ever, after which the transfer has failed for
        good; otherwise the reason why the transfer ended before.
        """
        with self._lock:
            self._check_open(transfer_id)
            room = max(whole_bytes, self._used_bytes + size_bytes) <= self.limit_bytes
            if room:
                self._used_bytes += size_bytes
                self._copying[transfer_id] = self._copying.get(transfer_id, 0) + 1
        if not room:
            self.staging_failed += 1
            self.release(transfer_id, KvFault.REFUSED)
            size = f"{size_bytes} of {max(whole_bytes, size_bytes)} bytes"
            raise KvError(KvFault.REFUSED, f"no room for {size} in a staging pool of {self.limit_bytes}")

    def commit(self, transfer_id: str, segments: Sequence[Segment | CodedSegment], size_bytes: int, last: bool) -> int:
        """An admitted chunk has been copied, after those admitted before it; returns the pool's staged bytes. Raises
        KvError with the reason when the transfer ended meanwhile, or INTERNAL when tokens before this chunk are
        missing: the transfer has failed, and so many others have ended since then that its reason is forgotten.
        """
        with self._lock:
            reason = self._ended.get(transfer_id)
            held = self._transfers.get(transfer_id)
            gap = bool(segments) and segments[0].token_start != (held.token_end if held is not None else 0)
            if reason is None and not gap:
                self._copied(transfer_id)
                transfer = self._transfer(transfer_id)
                transfer.segments.extend(segments)
                transfer.size_bytes += size_bytes
                transfer.token_end = segments[-1].token_end if segments else transfer.token_end
                transfer.complete = last
                total = self._used_bytes
        if reason is not None:
            self._give_back(transfer_id, size_bytes)
            raise KvError(reason)
        if gap:
            self.abandon(transfer_id, size_bytes)
            raise KvError(KvFault.INTERNAL, f"nothing is staged before token {segments[0].token_start}")
        self._on_change()
        return total

    def abandon(self, transfer_id: str, size_bytes: int, reason: KvFault = KvFault.INTERNAL) -> None:
        """An admitted chunk could not be copied: the transfer has failed."""
        self.release(transfer_id, reason)
        self._give_back(transfer_id, size_bytes)

    def open(self, transfer_id: str) -> Transfer | None:
        """The transfer for reading, its lease renewed; None while nothing is staged. Raises KvError when it
        ended.
        """
        with self._lock:
            self._check_open(transfer_id)
            transfer = self._transfers.get(transfer_id)
            return self._transfer(transfer_id) if transfer is not None else None

    def renew(self, transfer_id: str) -> bool:
        """Begin the lease again for an importer that still waits; whether that was done. False for a transfer that
        holds nothing or has ended, whose lease began just now, or that has had all its renewals.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.renewals >= self._renewals:
                return False
            if transfer.expires_s - self._clock() > self._lease_s * _FRESH_SHARE:
                return False
            transfer.renewals += 1
            self.leases_renewed += 1
            self._transfer(transfer_id)
        return True

    def confirm(self, transfer_id: str, rank: int, consumers: int) -> bool:
        """Importer `rank` needs no more of the transfer; it is released, and True, once `consumers` ranks have
        confirmed.
        """
        with self._lock:
            unknown = transfer_id not in self._transfers
            if transfer_id in self._ended or (unknown and len(self._transfers) >= _REMEMBERED):
                return False
            transfer = self._transfer(transfer_id)  # may come before anything is staged: the importer gave up
            transfer.confirmed.add(rank)
            if len(transfer.confirmed) < consumers:
                return False
        return self.release(transfer_id)

    def release(self, transfer_id: str, reason: KvFault = KvFault.RELEASED) -> bool:
        """Drop the transfer, and refuse it in the future; whether it held anything. Idempotent."""
        with self._lock:
            ended_before = transfer_id in self._ended
            self._ended.setdefault(transfer_id, reason)
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
            transfer = self._transfers.pop(transfer_id, None)
            self._used_bytes -= transfer.size_bytes if transfer is not None else 0
            left = self._used_bytes
            ends = not ended_before and transfer_id not in self._copying
            if not ended_before and not ends:
                self._ending.add(transfer_id)  # what is being copied still takes room
        if ends:
            self._on_end(transfer_id, left)
        self._on_change()
        return transfer is not None

    def expire(self) -> list[str]:
        """End every transfer whose lease ran out; their ids."""
        now = self._clock()
        with self._lock:
            late = [t.transfer_id for t in self._transfers.values() if t.expires_s <= now]
        for transfer_id in late:
            self.leases_expired += 1
            self.release(transfer_id, KvFault.EXPIRED)
        return late

    def _transfer(self, transfer_id: str) -> Transfer:
        transfer = self._transfers.setdefault(transfer_id, Transfer(transfer_id))
        transfer.expires_s = self._clock() + self._lease_s
        return transfer

    def _check_open(self, transfer_id: str) -> None:
        reason = self._ended.get(transfer_id)
        if reason is not None:
            raise KvError(reason)

    def _give_back(self, transfer_id: str, size_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= size_bytes
            left, ends = self._used_bytes, self._copied(transfer_id) and transfer_id in self._ending
            if ends:
                self._ending.remove(transfer_id)
        if ends:
            self._on_end(transfer_id, left)

    def _copied(self, transfer_id: str) -> bool:
        """A chunk's copy is over; whether it was the transfer's last one under way."""
        self._copying[transfer_id] -= 1
        if self._copying[transfer_id]:
            return False
        del self._copying[transfer_id]
        return True


class HostMemory(Protocol):
    """The memory of staged KV."""

    @property
    def slabs(self) -> list[Bytes]:
        """All of the memory, where that is fixed; else empty."""
        ...

    def take(self, tokens: int) -> list[torch.Tensor]:
        """Memory for that many tokens in parts, each [layers, 2, tokens, heads, head_dim] and contiguous; it is
        free again once nothing refers to it. Raises KvError(REFUSED) when there is too little.
        """

    def take_bytes(self, tokens: int, size: Callable[[int], int]) -> list[tuple[int, torch.Tensor]]:
        """The same for coded KV: tokens of each part, and its `size(tokens)` bytes, uint8."""


class Coding(Protocol):
    """How KV is coded on its way to the host."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole chunk, where the host has room in one piece."""

    def size(self, tokens: int) -> int:
        """Bytes of that many tokens of a segment, with the flags that `staged` checks."""

    def code(self, start: int, end: int, out: torch.Tensor) -> None:
        """Issue the coding of tokens [start, end) into `out`, uint8 [size] and aligned to 16 bytes."""

    def staged(self, start: int, end: int, coded: torch.Tensor) -> CodedSegment:
        """The segment in memory that has reached the host. Raises KvError(CODEC) where it had values that cannot be
        coded.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """Host memory for tokens [start, end), from HostMemory."""

    start: int
    end: int
    host: torch.Tensor


def parts_of(start: int, end: int, memory: HostMemory, coding: Coding | None) -> list[Part]:
    """Memory for tokens [start, end). Raises KvError(REFUSED)."""
    if coding is None:
        taken = [(part.shape[2], part) for part in memory.take(end - start)]
    else:
        taken = memory.take_bytes(end - start, coding.size)
    parts = []
    for tokens, host in taken:
        parts.append(Part(start, start + tokens, host))
        start += tokens
    return parts


def staged_of(parts: list[Part], coding: Coding | None) -> Staged:
    """The segments of parts that have reached the host. Raises KvError(CODEC)."""
    if coding is None:
        return [Segment(part.start, part.end, part.host) for part in parts]
    return [coding.staged(part.start, part.end, part.host) for part in parts]
