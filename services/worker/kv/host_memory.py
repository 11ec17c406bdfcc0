"""Host memory for staged KV: ordinary memory beside a model on the CPU, pinned memory beside one on a device."""

import math
from collections.abc import Callable

import torch

from services.worker.kv.arena import Allocate, Arena, Bytes, Extent, pinned
from services.worker.kv.errors import KvError, KvFault
from shared.domain.kv import TOKEN_GROUP

Shape = Callable[[int], tuple[int, ...]]  # of so many tokens
Size = Callable[[int], int]  # bytes of so many tokens, never fewer for more


class HeapMemory:
    """Whatever the process has, in segments of at most so many tokens."""

    def __init__(self, shape: Shape, dtype: torch.dtype, segment_tokens: int) -> None:
        self._shape = shape
        self._dtype = dtype
        self._segment_tokens = segment_tokens

    @property
    def slabs(self) -> list[Bytes]:
        """See HostMemory."""
        return []

    def take(self, tokens: int) -> list[torch.Tensor]:
        """See HostMemory."""
        step = self._segment_tokens
        sizes = [min(step, tokens - first) for first in range(0, tokens, step)]
        return [torch.empty(self._shape(size), dtype=self._dtype) for size in sizes]

    def take_bytes(self, tokens: int, size: Size) -> list[tuple[int, torch.Tensor]]:
        """See HostMemory."""
        step = self._segment_tokens
        parts = [min(step, tokens - first) for first in range(0, tokens, step)]
        return [(part, torch.empty(size(part), dtype=torch.uint8)) for part in parts]


class PinnedMemory:
    """A fixed amount that a device copies to by itself, or that a transport has registered.

    Divided into places for a token; what is taken is cut to the holes that there are, so that it never fails while
    places are left. Places come back when no tensor that shares their memory is left, frames on the way included.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, segment_tokens: int, limit_bytes: int, allocate: Allocate = pinned
    ) -> None:
        """Raises RuntimeError when the host does not give so much. `allocate` gives bytes."""
        self._shape = shape
        self._dtype = dtype
        self._segment_tokens = segment_tokens
        self._token_bytes = math.prod(shape(1)) * dtype.itemsize
        self._arena = Arena(self._token_bytes, self._places(limit_bytes), allocate)

    @property
    def slabs(self) -> list[Bytes]:
        """See HostMemory."""
        return self._arena.slabs

    @property
    def free_tokens(self) -> int:
        """Places that nobody has."""
        return self._arena.free

    def take(self, tokens: int) -> list[torch.Tensor]:
        """See HostMemory."""
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
        """See HostMemory."""
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
