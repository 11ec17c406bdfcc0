"""The export side's host memory: KV that was copied out of the engine's blocks waits here for importers, in segments,
unchanged or coded.

`StagingPool` bounds it by bytes and leases transfers by time. The engine's thread admits chunks, the copies commit
them, the server's thread reads, and any thread may release. A lease begins again with each chunk that is staged, with
each look of a pull, and with each renewal by an importer whose engine has no blocks for the KV yet.

The memory is of the heap beside a model on the CPU. Beside an accelerator, or with NIXL, it is allocated once as an
arena and handed out in parts: pinning memory, or registering it, takes far longer than filling it.
"""

import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.rank_messages import RankStats
from services.worker.kv.wire.protocol import FRAME_BYTES, checksum
from shared.domain.kv import TOKEN_GROUP, Codec

_REMEMBERED = 4096  # ended transfers whose reason is kept, so that a late pull fails at once
LEASE_RENEWALS = 120  # of one transfer by importers that wait; 20 minutes with leases of 30 s
_FRESH_SHARE = 5 / 6  # a lease of which more than this share is left is not renewed
_ALIGNED = 64  # bytes
_SLAB_BYTES = 64 << 20  # a power of two: torch rounds pinned memory up to one

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Allocate = Callable[[int], torch.Tensor]  # that many bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [token_start, token_end) of a component: contiguous [layers, sides, tokens, heads, head_dim] on the
    host.

    It holds what a pull would otherwise wait for: the bytes, and the checksum of each run of `frame_layers` layers,
    which are the payloads of a pull of all tokens, heads and layers.
    """

    token_start: int
    token_end: int
    kv: torch.Tensor
    component: int = 0
    data: memoryview = field(init=False)
    frame_layers: int = field(init=False)
    digests: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        data = self.kv.view(torch.uint8).reshape(-1).numpy().data
        layer_bytes = max(1, len(data) // self.kv.shape[0])
        frame_layers = max(1, FRAME_BYTES // layer_bytes)  # as RankShape.layers_a_frame
        frames = range(0, len(data), frame_layers * layer_bytes)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "frame_layers", frame_layers)
        object.__setattr__(
            self, "digests", tuple(checksum(data[at : at + frame_layers * layer_bytes]) for at in frames)
        )

    def digest(self, start: int, end: int) -> int | None:
        """The checksum of layers [start, end), counted from the first, where it is held."""
        frame, ahead = divmod(start, self.frame_layers)
        held = not ahead and end == min(start + self.frame_layers, self.kv.shape[0])
        return self.digests[frame] if held else None


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
    component: int = 0


Staged = Sequence[Segment | CodedSegment]


@dataclass(slots=True)
class Transfer:
    """The state of one export, from its first chunk or confirmation until it has ended and no copy is under way.

    Tokens up to `token_end` are staged, of a component with a window those that `RankShape.kept` names. The segments of
    a component are in the order of their tokens. They stay while a reader has this: one that ends during a copy is
    replaced by one without segments.
    """

    transfer_id: str
    expires_mono: float = math.inf  # the end of its lease, which begins with the first chunk or confirmation
    segments: dict[int, list[Segment | CodedSegment]] = field(default_factory=dict)  # by component
    token_end: int = 0
    complete: bool = False
    size_bytes: int = 0
    copying: int = 0  # chunks that are admitted and neither committed nor abandoned
    renewals: int = 0
    confirmed: set[int] = field(default_factory=set)
    fault: KvFault | None = None  # why it has ended

    @property
    def held(self) -> bool:
        """Whether it has a lease, and has not ended."""
        return self.fault is None and self.expires_mono != math.inf


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
        stats: RankStats | None = None,
    ) -> None:
        """`renewals`: how often importers that wait may renew the lease of one transfer."""
        self.limit_bytes = limit_bytes
        self.stats = stats or RankStats()
        self._lease_s = lease_s
        self._renewals = renewals
        self._clock = clock
        self._on_change = on_change
        self._on_end = on_end
        self._transfers: dict[str, Transfer] = {}
        self._ended: OrderedDict[str, KvFault] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def staged_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        with self._lock:
            return sum(transfer.held for transfer in self._transfers.values())

    def admit(self, transfer_id: str, size_bytes: int, whole_bytes: int = 0, first: int = 0) -> None:
        """Take room for a chunk of a transfer of `whole_bytes` whose first token is number `first`; its copy may begin,
        and `commit` or `abandon` follows.

        Raises KvError: REFUSED when there is too little room, now or ever, after which the transfer has failed for
        good; otherwise the reason why the transfer ended before.
        """
        with self._lock:
            transfer = self._open(transfer_id)
            room = max(whole_bytes, self._used_bytes + size_bytes) <= self.limit_bytes
            if room:
                transfer = transfer or self._transfers.setdefault(transfer_id, Transfer(transfer_id))
                transfer.token_end = max(transfer.token_end, first)
                transfer.copying += 1
                self._used_bytes += size_bytes
        if not room:
            self.stats.staging_failed += 1
            self.release(transfer_id, KvFault.REFUSED)
            size = f"{size_bytes} of {max(whole_bytes, size_bytes)} bytes"
            raise KvError(KvFault.REFUSED, f"no room for {size} in a staging pool of {self.limit_bytes}")

    def commit(self, transfer_id: str, tokens: tuple[int, int], segments: Staged, size_bytes: int, last: bool) -> int:
        """An admitted chunk of tokens [start, end) has been copied, after those admitted before it; returns the pool's
        staged bytes. Raises KvError with the reason when the transfer ended meanwhile, or INTERNAL when tokens before
        this chunk are missing: the transfer has failed, and so many others have ended since then that its reason is
        forgotten.
        """
        start, end = tokens
        with self._lock:
            transfer = self._transfers[transfer_id]
            fault = transfer.fault
            gap = start != transfer.token_end
            if fault is None and not gap:
                transfer.copying -= 1
                for segment in segments:
                    transfer.segments.setdefault(segment.component, []).append(segment)
                transfer.size_bytes += size_bytes
                transfer.token_end = end
                transfer.complete = last
                self._begin_lease(transfer)
                total = self._used_bytes
        if fault is not None:
            self._give_back(transfer, size_bytes)
            raise KvError(fault)
        if gap:
            self.abandon(transfer_id, size_bytes)
            raise KvError(KvFault.INTERNAL, f"nothing is staged before token {start}")
        self._on_change()
        return total

    def abandon(self, transfer_id: str, size_bytes: int, reason: KvFault = KvFault.INTERNAL) -> None:
        """An admitted chunk could not be copied: the transfer has failed."""
        self.release(transfer_id, reason)
        self._give_back(self._transfers[transfer_id], size_bytes)

    def open(self, transfer_id: str) -> Transfer | None:
        """The transfer for reading, its lease renewed; None while nothing is staged. Raises KvError when it
        ended.
        """
        with self._lock:
            transfer = self._open(transfer_id)
            if transfer is None or not transfer.held:
                return None
            self._begin_lease(transfer)
            return transfer

    def renew(self, transfer_id: str) -> bool:
        """Begin the lease again for an importer that still waits; whether that was done. False for a transfer that
        holds nothing or has ended, whose lease began just now, or that has had all its renewals.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or not transfer.held or transfer.renewals >= self._renewals:
                return False
            if transfer.expires_mono - self._clock() > self._lease_s * _FRESH_SHARE:
                return False
            transfer.renewals += 1
            self.stats.leases_renewed += 1
            self._begin_lease(transfer)
        return True

    def confirm(self, transfer_id: str, rank: int, consumers: int) -> bool:
        """Importer `rank` needs no more of the transfer; it is released, and True, once `consumers` ranks have
        confirmed.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer_id in self._ended or (transfer is None and len(self._transfers) >= _REMEMBERED):
                return False
            if transfer is None:  # nothing is staged yet: the importer gave up
                transfer = self._transfers[transfer_id] = Transfer(transfer_id)
            self._begin_lease(transfer)
            transfer.confirmed.add(rank)
            if len(transfer.confirmed) < consumers:
                return False
        return self.release(transfer_id)

    def release(self, transfer_id: str, reason: KvFault = KvFault.RELEASED) -> bool:
        """Drop the transfer, and refuse it in the future; whether it held anything. Idempotent."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            held = transfer is not None and transfer.held
            ends = transfer_id not in self._ended
            self._ended.setdefault(transfer_id, reason)
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
            if transfer is not None:
                self._used_bytes -= transfer.size_bytes
                ends = not transfer.copying
                if ends:
                    del self._transfers[transfer_id]
                elif transfer.fault is None:  # what is being copied still takes room
                    self._transfers[transfer_id] = Transfer(transfer_id, copying=transfer.copying, fault=reason)
            left = self._used_bytes
        if ends:
            self._on_end(transfer_id, left)
        self._on_change()
        return held

    def expire(self) -> list[str]:
        """End every transfer whose lease ran out; their ids."""
        now = self._clock()
        with self._lock:
            late = [t.transfer_id for t in self._transfers.values() if t.held and t.expires_mono <= now]
        for transfer_id in late:
            self.stats.leases_expired += 1
            self.release(transfer_id, KvFault.EXPIRED)
        return late

    def _open(self, transfer_id: str) -> Transfer | None:
        transfer = self._transfers.get(transfer_id)
        fault = transfer.fault if transfer is not None else self._ended.get(transfer_id)
        if fault is not None:
            raise KvError(fault)
        return transfer

    def _begin_lease(self, transfer: Transfer) -> None:
        transfer.expires_mono = self._clock() + self._lease_s

    def _give_back(self, transfer: Transfer, size_bytes: int) -> None:
        """The copy of a chunk is over, of a transfer that has ended."""
        with self._lock:
            self._used_bytes -= size_bytes
            transfer.copying -= 1
            left, ends = self._used_bytes, not transfer.copying
            if ends:
                del self._transfers[transfer.transfer_id]
        if ends:
            self._on_end(transfer.transfer_id, left)


class Coding(Protocol):
    """How KV is coded on its way to the host."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole chunk, where the host has room in one piece."""

    def size(self, tokens: int) -> int:
        """Bytes of that many tokens of a segment, with the flags that `staged` checks; they do not fall as tokens
        rise.
        """

    def code(self, start: int, end: int, out: torch.Tensor) -> None:
        """Issue the coding of tokens [start, end) into `out`, uint8 [size] and aligned to 16 bytes."""

    def staged(self, start: int, end: int, coded: torch.Tensor) -> CodedSegment:
        """The segment in memory that has reached the host. Raises KvError(CODEC) where it had values that cannot be
        coded.
        """


Fill = Callable[[int, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of a component that are to be staged: `fill(first, until, kv)` issues the copy of some of
    them into `kv` [layers, sides, tokens, heads, head_dim]; with a `coding` they are staged coded, by that.
    """

    start: int
    end: int
    fill: Fill
    coding: Coding | None = None
    component: int = 0

    def issue(self, part: "Part", to: torch.Tensor) -> None:
        (self.fill if self.coding is None else self.coding.code)(part.start, part.end, to)


@dataclass(frozen=True, slots=True)
class Part:
    """Host memory for tokens [start, end) of a piece: [layers, sides, tokens, heads, head_dim] and contiguous, or coded
    bytes.
    """

    piece: Piece
    start: int
    end: int
    host: torch.Tensor

    def staged(self) -> Segment | CodedSegment:
        """The segment, once it has reached the host. Raises KvError(CODEC)."""
        if self.piece.coding is None:
            return Segment(self.start, self.end, self.host, self.piece.component)
        return replace(self.piece.coding.staged(self.start, self.end, self.host), component=self.piece.component)


@dataclass(frozen=True, slots=True)
class Rows:
    """What the memory for a component holds: `shape(tokens)` values of `dtype`, at most `segment_tokens` in a piece."""

    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    segment_tokens: int

    @property
    def token_bytes(self) -> int:
        return math.prod(self.shape(1)) * self.dtype.itemsize


class HeapMemory:
    """Memory of the process's heap."""

    slabs: list[Bytes] = []  # all of the memory, where that is fixed

    def __init__(self, rows: Sequence[Rows]) -> None:
        """`rows`: by component."""
        self._rows = rows

    def take(self, piece: Piece) -> list[Part]:
        """Memory for a piece in parts of at most `segment_tokens`, which is free again once nothing refers to it.
        Raises KvError(REFUSED) when there is too little.
        """
        rows, parts = self._rows[piece.component], []
        for first in range(piece.start, piece.end, rows.segment_tokens):
            tokens = min(rows.segment_tokens, piece.end - first)
            if piece.coding is None:
                host = torch.empty(rows.shape(tokens), dtype=rows.dtype)
            else:
                host = torch.empty(piece.coding.size(tokens), dtype=torch.uint8)
            parts.append(Part(piece, first, first + tokens, host))
        return parts


def plain(size: int) -> torch.Tensor:
    """Ordinary memory, whose pages are taken when they are first written."""
    return torch.empty(size, dtype=torch.uint8)


def pinned(size: int) -> torch.Tensor:
    """Memory that a device copies to by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class PinnedMemory(HeapMemory):
    """A fixed amount of memory that a device copies to by itself, or that a transport has registered.

    It is divided into places of a token of the smallest component. A request is cut to the holes that there are, so
    that it succeeds while places are left. Places come back when no tensor that shares their memory is left, frames
    that are being sent included.
    """

    def __init__(self, rows: Sequence[Rows], limit_bytes: int, allocate: Allocate = pinned) -> None:
        """`rows`: by component. Raises RuntimeError when the host does not give as much."""
        super().__init__(rows)
        sizes = [each.token_bytes for each in rows if each.token_bytes]
        # With several components a place begins where values of any dtype may.
        self._place_bytes = sizes[0] if len(sizes) == 1 else -(-min(sizes) // _ALIGNED) * _ALIGNED
        self._arena = Arena(self._place_bytes, self._places(limit_bytes), allocate)
        self.slabs = self._arena.slabs

    @property
    def free_places(self) -> int:
        return self._arena.free

    def take(self, piece: Piece) -> list[Part]:
        rows, coding = self._rows[piece.component], piece.coding
        size = (lambda tokens: tokens * rows.token_bytes) if coding is None else coding.size
        group = 1 if coding is None else TOKEN_GROUP  # a smaller hole has fewer tokens, in whole groups
        cuts: list[tuple[int, Extent]] = []
        start, left = piece.start, piece.end - piece.start
        while left:
            tokens = min(left, rows.segment_tokens)
            extent = self._arena.cut(self._places(size(tokens)))
            places = len(extent) if extent is not None else 0
            while tokens and self._places(size(tokens)) > places:
                tokens = (tokens - 1) // group * group
            if extent is not None:
                cuts.append((tokens, extent))
            if not tokens:
                for _, each in cuts:
                    self._arena.give_back(each)
                raise KvError(KvFault.REFUSED, f"pinned memory has no room for {left} tokens")
            left -= tokens
        parts = []
        for tokens, extent in cuts:
            # torch keeps the array as long as any tensor shares its memory.
            host = torch.from_numpy(self._arena.bytes_of(extent, size(tokens)))
            host = host.view(rows.dtype).view(rows.shape(tokens)) if coding is None else host
            parts.append(Part(piece, start, start + tokens, host))
            start += tokens
        return parts

    def _places(self, size_bytes: int) -> int:
        return -(-size_bytes // self._place_bytes)


@dataclass(slots=True)
class Extent:
    """Places [start, end) of a slab."""

    slab: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Arena:
    """Slabs of places of `place_bytes` each. Thread-safe."""

    def __init__(self, place_bytes: int, places: int, allocate: Allocate = plain) -> None:
        """At least that many places. Raises RuntimeError when the host does not give as much."""
        self._place_bytes = place_bytes
        each = max(1, min(places, _SLAB_BYTES // place_bytes))
        count = -(-places // each)
        self.slabs: list[Bytes] = [allocate(each * place_bytes).numpy() for _ in range(count)]
        self._free = [Extent(slab, 0, each) for slab in range(count)]
        self._returned: deque[Extent] = deque()  # appended to by the thread that drops the last reference
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        with self._lock:
            self._collect()
            return sum(len(extent) for extent in self._free)

    def cut(self, wanted: int, at_least: int = 1) -> Extent | None:
        """Cut `wanted` places from the first hole that has them, otherwise the largest hole. None if that has not
        `at_least` so many.
        """
        with self._lock:
            self._collect()
            hole = next((each for each in self._free if len(each) >= wanted), None)
            if hole is None:
                hole = max(self._free, key=len, default=None)
            if hole is None or len(hole) < at_least:
                return None
            cut = Extent(hole.slab, hole.start, min(hole.end, hole.start + wanted))
            hole.start = cut.end
            if hole.start == hole.end:
                self._free.remove(hole)
            return cut

    def give_back(self, extent: Extent) -> None:
        """Return places that were cut and not used."""
        self._returned.append(extent)

    def bytes_of(self, extent: Extent, size: int) -> Bytes:
        """The first bytes of places that were cut. The places are returned when nothing refers to this very array; an
        array that is cut from it is a view of the slab and does not keep it.
        """
        start = extent.start * self._place_bytes
        places: Bytes = self.slabs[extent.slab][start : start + size]
        weakref.finalize(places, self._returned.append, extent)
        return places

    def take_bytes(self, size: int) -> Bytes | None:
        """At least that many bytes in one piece, or None while there is no such hole; see `bytes_of`."""
        places = -(-size // self._place_bytes)
        extent = self.cut(places, places)
        return None if extent is None else self.bytes_of(extent, places * self._place_bytes)

    def _collect(self) -> None:
        """Add the returned places to the free ones, and join neighbours."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=lambda each: (each.slab, each.start))
        joined: list[Extent] = []
        for extent in self._free:
            if joined and (joined[-1].slab, joined[-1].end) == (extent.slab, extent.start):
                joined[-1].end = extent.end
            else:
                joined.append(extent)
        self._free = joined
