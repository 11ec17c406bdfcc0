"""The export side's host pool: KV that was copied out of the engine's blocks and waits to be pulled.

Bounded by bytes, leased by time. The engine's thread appends, the server's thread reads, anyone may release.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from services.worker.kv.errors import KvError, KvFault
from shared.domain.kv import Codec

_REMEMBERED = 4096  # ended transfers whose reason is kept, so that a late pull fails at once


@dataclass(frozen=True, slots=True)
class Segment:
    """KV of tokens [token_start, token_end): contiguous [layers, 2, tokens, heads, head_dim] on the host."""

    token_start: int
    token_end: int
    kv: torch.Tensor


@dataclass(slots=True)
class Transfer:
    """What is staged for one transfer. Segments follow each other without gaps."""

    transfer_id: str
    codec: Codec = Codec.RAW
    expires_s: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    token_end: int = 0
    complete: bool = False
    size_bytes: int = 0
    confirmed: set[int] = field(default_factory=set)


class StagingPool:
    """Staged transfers of one rank. Thread-safe; `on_change` is called after what a waiting pull could care
    for.
    """

    def __init__(
        self, limit_bytes: int, lease_s: float, clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.limit_bytes = limit_bytes
        self.staging_failed = 0
        self.leases_expired = 0
        self._lease_s = lease_s
        self._clock = clock
        self._on_change = on_change
        self._transfers: dict[str, Transfer] = {}
        self._ended: OrderedDict[str, KvFault] = OrderedDict()
        self._used_bytes = 0
        self._room = threading.Condition()

    @property
    def staged_bytes(self) -> int:
        """Bytes held now."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._transfers)

    def append(
        self, transfer_id: str, codec: Codec, segments: Callable[[], Iterator[Segment]], size_bytes: int,
        last: bool, wait_s: float = 0.0,
    ) -> int:  # fmt: skip
        """Stage a chunk; returns the pool's staged bytes. `segments` runs once there is room for
        `size_bytes`.

        Waits at most `wait_s` for room. Raises KvError: REFUSED when there is none, and the transfer has then
        failed for good; else the reason why the transfer ended before.
        """
        with self._room:
            self._check_open(transfer_id)
            room = self._room.wait_for(lambda: self._has_room(size_bytes), timeout=wait_s)
            if not room:
                self.staging_failed += 1
                self._end(transfer_id, KvFault.REFUSED)
                raise KvError(KvFault.REFUSED, f"{size_bytes} bytes over the bound of {self.limit_bytes}")
            self._check_open(transfer_id)
            self._used_bytes += size_bytes
        try:
            staged = list(segments())
        except BaseException:
            with self._room:
                self._give_back(size_bytes)
                self._end(transfer_id, KvFault.INTERNAL)
            raise
        return self._commit(transfer_id, codec, staged, size_bytes, last)

    def _commit(self, transfer_id: str, codec: Codec, staged: list[Segment], size_bytes: int, last: bool) -> int:
        with self._room:
            reason = self._ended.get(transfer_id)
            if reason is not None:  # released while the copy ran
                self._give_back(size_bytes)
                raise KvError(reason)
            transfer = self._transfer(transfer_id)
            transfer.codec = codec
            transfer.segments.extend(staged)
            transfer.size_bytes += size_bytes
            transfer.token_end = staged[-1].token_end if staged else transfer.token_end
            transfer.complete = last
            total = self._used_bytes
        self._on_change()
        return total

    def open(self, transfer_id: str) -> Transfer | None:
        """The transfer for reading, its lease renewed; None while nothing is staged. Raises KvError when it
        ended.
        """
        with self._room:
            self._check_open(transfer_id)
            transfer = self._transfers.get(transfer_id)
            return self._transfer(transfer_id) if transfer is not None else None

    def confirm(self, transfer_id: str, rank: int, consumers: int) -> bool:
        """Importer `rank` needs no more of it; released, and True, once `consumers` ranks have said so."""
        with self._room:
            if transfer_id in self._ended:
                return False
            transfer = self._transfer(transfer_id)  # may come before anything is staged: the importer gave up
            transfer.confirmed.add(rank)
            if len(transfer.confirmed) < consumers:
                return False
        return self.release(transfer_id)

    def release(self, transfer_id: str, reason: KvFault = KvFault.RELEASED) -> bool:
        """Drop the transfer, now and for the future; whether it held anything. Idempotent."""
        with self._room:
            held = self._end(transfer_id, reason)
        self._on_change()
        return held

    def expire(self) -> list[str]:
        """End every transfer whose lease ran out; their ids."""
        now = self._clock()
        with self._room:
            late = [t.transfer_id for t in self._transfers.values() if t.expires_s <= now]
            for transfer_id in late:
                self.leases_expired += 1
                self._end(transfer_id, KvFault.EXPIRED)
        if late:
            self._on_change()
        return late

    def _transfer(self, transfer_id: str) -> Transfer:
        transfer = self._transfers.setdefault(transfer_id, Transfer(transfer_id))
        transfer.expires_s = self._clock() + self._lease_s
        return transfer

    def _has_room(self, size_bytes: int) -> bool:
        return self._used_bytes + size_bytes <= self.limit_bytes

    def _check_open(self, transfer_id: str) -> None:
        reason = self._ended.get(transfer_id)
        if reason is not None:
            raise KvError(reason)

    def _end(self, transfer_id: str, reason: KvFault) -> bool:
        self._ended.setdefault(transfer_id, reason)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            self._give_back(transfer.size_bytes)
        return transfer is not None

    def _give_back(self, size_bytes: int) -> None:
        self._used_bytes -= size_bytes
        self._room.notify_all()
