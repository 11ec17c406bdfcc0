"""Staged KV in parts of host memory: as it is, or coded on its way there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.kv.arena import Bytes
from services.worker.kv.staging import CodedSegment, Segment

Staged = Sequence[Segment | CodedSegment]


class HostMemory(Protocol):
    """Where staged KV lies."""

    @property
    def slabs(self) -> list[Bytes]:
        """All of the memory, where that is fixed; else empty."""
        ...

    def take(self, tokens: int) -> list[torch.Tensor]:
        """Memory for so many tokens in parts, each [layers, 2, tokens, heads, head_dim] and contiguous; it is free
        again once nothing refers to it. Raises KvError(REFUSED) when there is none.
        """

    def take_bytes(self, tokens: int, size: Callable[[int], int]) -> list[tuple[int, torch.Tensor]]:
        """The same for what is coded: tokens of each part, and its `size(tokens)` bytes, uint8."""


class Coding(Protocol):
    """How KV is coded on its way to the host."""

    @property
    def total_bytes(self) -> int:
        """Of all that is staged, where the host has room in one piece."""

    def size(self, tokens: int) -> int:
        """Bytes of so many tokens of a segment, with what `staged` judges by."""

    def code(self, start: int, end: int, out: torch.Tensor) -> None:
        """Issue the coding of tokens [start, end) into `out`, uint8 [size] and aligned to 16 bytes."""

    def staged(self, start: int, end: int, coded: torch.Tensor) -> CodedSegment:
        """What has come to the host. Raises KvError(CODEC) where it had values that cannot be coded."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of the host for tokens [start, end): as HostMemory gives it."""

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
    """What has come to the host in them. Raises KvError(CODEC)."""
    if coding is None:
        return [Segment(part.start, part.end, part.host) for part in parts]
    return [coding.staged(part.start, part.end, part.host) for part in parts]
