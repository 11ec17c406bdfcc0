"""Host memory for staged KV: ordinary memory beside a model on the CPU, pinned memory beside one on a device."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.kv.errors import KvError, KvFault

_SLAB_BYTES = 64 << 20  # a power of two: torch rounds pinned memory up to one
Shape = Callable[[int], tuple[int, ...]]  # of so many tokens


class HeapMemory:
    """Whatever the process has, in segments of at most so many tokens."""

    def __init__(self, shape: Shape, dtype: torch.dtype, segment_tokens: int) -> None:
        self._shape = shape
        self._dtype = dtype
        self._segment_tokens = segment_tokens

    def take(self, tokens: int) -> list[torch.Tensor]:
        """See HostMemory."""
        step = self._segment_tokens
        sizes = [min(step, tokens - first) for first in range(0, tokens, step)]
        return [torch.empty(self._shape(size), dtype=self._dtype) for size in sizes]


@dataclass(slots=True)
class _Extent:
    """Free places for tokens in a slab: [start, end)."""

    slab: int
    start: int
    end: int


class PinnedMemory:
    """A fixed amount that a device copies to by itself, allocated at once, since pinning takes far longer than a copy.

    Divided into places for a token; what is taken is cut to the holes that there are, so that it never fails while
    places are left. Places come back when no tensor that shares their memory is left, frames on the way included.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        segment_tokens: int,
        limit_bytes: int,
        allocate: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    ) -> None:
        """Raises RuntimeError when the host does not give so much. `allocate` gives bytes."""
        self._shape = shape
        self._dtype = dtype
        self._segment_tokens = segment_tokens
        self._token_bytes = math.prod(shape(1)) * dtype.itemsize
        tokens = -(-limit_bytes // self._token_bytes)
        each = max(1, min(tokens, _SLAB_BYTES // self._token_bytes))
        count = -(-tokens // each)
        self._slabs = [allocate(each * self._token_bytes).numpy() for _ in range(count)]
        self._free = [_Extent(slab, 0, each) for slab in range(count)]
        self._returned: deque[_Extent] = deque()  # appended to by whoever drops the last reference
        self._lock = threading.Lock()

    @property
    def free_tokens(self) -> int:
        """Places that nobody has."""
        with self._lock:
            self._collect()
            return sum(extent.end - extent.start for extent in self._free)

    def take(self, tokens: int) -> list[torch.Tensor]:
        """See HostMemory."""
        with self._lock:
            self._collect()
            taken: list[_Extent] = []
            while tokens:
                wanted = min(tokens, self._segment_tokens)
                found = self._cut(wanted)
                if found is None:
                    self._returned.extend(taken)
                    raise KvError(KvFault.REFUSED, f"pinned memory has no room for {tokens} tokens")
                taken.append(found)
                tokens -= found.end - found.start
        return [self._tensor(extent) for extent in taken]

    def _cut(self, wanted: int) -> _Extent | None:
        """So many places from the first hole that has them, else the largest hole."""
        if not self._free:
            return None
        hole = next((each for each in self._free if each.end - each.start >= wanted), None)
        hole = hole or max(self._free, key=lambda each: each.end - each.start)
        cut = _Extent(hole.slab, hole.start, min(hole.end, hole.start + wanted))
        hole.start = cut.end
        if hole.start == hole.end:
            self._free.remove(hole)
        return cut

    def _tensor(self, extent: _Extent) -> torch.Tensor:
        size = self._token_bytes
        places: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._slabs[extent.slab][
            extent.start * size : extent.end * size
        ]
        # torch keeps the array as long as any tensor shares its memory.
        weakref.finalize(places, self._returned.append, extent)
        return torch.from_numpy(places).view(self._dtype).view(self._shape(extent.end - extent.start))

    def _collect(self) -> None:
        """Take back what was returned, and join neighbours."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=lambda each: (each.slab, each.start))
        joined: list[_Extent] = []
        for extent in self._free:
            if joined and (joined[-1].slab, joined[-1].end) == (extent.slab, extent.start):
                joined[-1].end = extent.end
            else:
                joined.append(extent)
        self._free = joined
