"""Host memory for staged KV: ordinary beside a model on the CPU, pinned beside an accelerator.

It is allocated once as an arena and handed out in parts: pinning memory, or registering it, takes far longer than
filling it.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.kv.errors import KvError, KvFault
from shared.domain.kv import TOKEN_GROUP

_SLAB_BYTES = 64 << 20  # a power of two: torch rounds pinned memory up to one

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Allocate = Callable[[int], torch.Tensor]
Shape = Callable[[int], tuple[int, ...]]  # of that many tokens
Size = Callable[[int], int]  # bytes of that many tokens, which do not fall as tokens rise


def plain(size: int) -> torch.Tensor:
    """Ordinary memory, whose pages are taken when they are first written."""
    return torch.empty(size, dtype=torch.uint8)


def pinned(size: int) -> torch.Tensor:
    """Memory that a device copies to by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


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
        """At least that many places. Raises RuntimeError when the host does not give as much. `allocate` returns
        bytes.
        """
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

    def cut(self, wanted: int, least: int = 1) -> Extent | None:
        """Cut `wanted` places from the first hole that has them, otherwise the largest hole, of at least `least`.
        None without such a hole.
        """
        with self._lock:
            self._collect()
            hole = next((each for each in self._free if len(each) >= wanted), None)
            if hole is None:
                hole = max(self._free, key=len, default=None)
            if hole is None or len(hole) < least:
                return None
            cut = Extent(hole.slab, hole.start, min(hole.end, hole.start + wanted))
            hole.start = cut.end
            if hole.start == hole.end:
                self._free.remove(hole)
            return cut

    def give_back(self, extent: Extent) -> None:
        """Return places that were cut and not used."""
        self._returned.append(extent)

    def bytes_of(self, extent: Extent, size: int | None = None) -> Bytes:
        """The memory of places that were cut, or its first `size` bytes. The places are returned when nothing
        refers to this very array; an array that is cut from it is a view of the slab and does not keep it.
        """
        start = extent.start * self._place_bytes
        end = extent.end * self._place_bytes if size is None else start + size
        places: Bytes = self.slabs[extent.slab][start:end]
        weakref.finalize(places, self._returned.append, extent)
        return places

    def take_bytes(self, size: int) -> Bytes | None:
        """That many bytes in one piece, or None while there is no such hole; see `bytes_of`."""
        places = -(-size // self._place_bytes)
        extent = self.cut(places, places)
        return None if extent is None else self.bytes_of(extent)

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


class HeapMemory:
    """Memory of the process's heap, in segments of at most `segment_tokens` tokens."""

    def __init__(self, shape: Shape, dtype: torch.dtype, segment_tokens: int) -> None:
        self._shape = shape
        self._dtype = dtype
        self._segment_tokens = segment_tokens

    @property
    def slabs(self) -> list[Bytes]:
        return []

    def take(self, tokens: int) -> list[torch.Tensor]:
        step = self._segment_tokens
        sizes = [min(step, tokens - first) for first in range(0, tokens, step)]
        return [torch.empty(self._shape(size), dtype=self._dtype) for size in sizes]

    def take_bytes(self, tokens: int, size: Size) -> list[tuple[int, torch.Tensor]]:
        step = self._segment_tokens
        parts = [min(step, tokens - first) for first in range(0, tokens, step)]
        return [(part, torch.empty(size(part), dtype=torch.uint8)) for part in parts]


class PinnedMemory:
    """A fixed amount of memory that a device copies to by itself, or that a transport has registered.

    It is divided into places of a token. A request is cut to the holes that there are, so that it succeeds while
    places are left. Places come back when no tensor that shares their memory is left, frames that are being sent
    included.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, segment_tokens: int, limit_bytes: int, allocate: Allocate = pinned
    ) -> None:
        """Raises RuntimeError when the host does not give as much. `allocate` returns bytes."""
        self._shape = shape
        self._dtype = dtype
        self._segment_tokens = segment_tokens
        self._token_bytes = math.prod(shape(1)) * dtype.itemsize
        self._arena = Arena(self._token_bytes, self._places(limit_bytes), allocate)

    @property
    def slabs(self) -> list[Bytes]:
        return self._arena.slabs

    @property
    def free_tokens(self) -> int:
        """Free places."""
        return self._arena.free

    def take(self, tokens: int) -> list[torch.Tensor]:
        taken: list[Extent] = []
        while tokens:
            found = self._arena.cut(min(tokens, self._segment_tokens))
            if found is None:
                for each in taken:
                    self._arena.give_back(each)
                raise KvError(KvFault.REFUSED, f"pinned memory has no room for {tokens} tokens")
            taken.append(found)
            tokens -= len(found)
        return [self._tensor(extent) for extent in taken]

    def take_bytes(self, tokens: int, size: Size) -> list[tuple[int, torch.Tensor]]:
        taken: list[tuple[int, Extent]] = []
        while tokens:
            part = min(tokens, self._segment_tokens)
            found = self._arena.cut(self._places(size(part)))
            places = len(found) if found is not None else 0
            while part and self._places(size(part)) > places:  # a smaller hole: fewer tokens, in whole groups
                part = (part - 1) // TOKEN_GROUP * TOKEN_GROUP
            if found is not None:
                taken.append((part, found))
            if not part:
                for _, each in taken:
                    self._arena.give_back(each)
                raise KvError(KvFault.REFUSED, f"pinned memory has no room for {tokens} tokens")
            tokens -= part
        return [(part, self._bytes(extent, size(part))) for part, extent in taken]

    def _places(self, size_bytes: int) -> int:
        return -(-size_bytes // self._token_bytes)

    def _tensor(self, extent: Extent) -> torch.Tensor:
        whole = self._bytes(extent, len(extent) * self._token_bytes)
        return whole.view(self._dtype).view(self._shape(len(extent)))

    def _bytes(self, extent: Extent, size_bytes: int) -> torch.Tensor:
        # torch keeps the array as long as any tensor shares its memory.
        return torch.from_numpy(self._arena.bytes_of(extent, size_bytes))
