"""One import, as the importer sees it: what must come from where, what has come, where it goes. No sockets,
no threads.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.shards import Shards, Source
from services.worker.kv.wire.frames import WINDOW_BYTES, Buffer, Frame, Sent
from services.worker.kv.wire.transport import Link
from shared.domain.kv import Codec, KvHandle

Seen = np.ndarray[Any, np.dtype[np.bool_]]  # [layers, tokens] of what has come
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Destination(Protocol):
    """Where imported KV goes. Called on the puller's thread, never after the import has ended."""

    @property
    def dtype(self) -> torch.dtype:
        """What it wants KV in."""

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        """KV [2, tokens, heads, head_dim] of one layer; all is numbered over prompt and model. Done with `kv` when it
        returns: that memory is used again.
        """

    def take(
        self,
        layers: tuple[int, int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
        payload: torch.Tensor,
        dtype: torch.dtype,
        codec: Codec,
    ) -> bool:
        """A verified payload (uint8) as it came, all of whose tokens are wanted; `dtype` is the exporter's. Whether it
        was taken: else it is decoded, and written a layer at a time. Done with it when it returns.
        """

    def room(self, layer: int, tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        """Memory for KV [2, tokens, heads, head_dim] of one layer in this order, which is received straight into it and
        not written; what comes may then turn out to be wrong, which fails the import. Empty where there is none.
        """

    def finish(self) -> None:
        """Nothing more is written. A device may still be at it: the engine orders its next step after that."""


@dataclass(frozen=True, slots=True)
class ImportShape:
    """What this rank needs: its place among the importers, and the model's KV geometry."""

    shards: Shards
    head_dim: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The engine has blocks for tokens [token_start, token_end) of the handle. `request_id` is the engine's.

    The import may take `timeout_s` in all, which may be infinite: one that makes no progress fails sooner.
    """

    request_id: str
    handle: KvHandle
    token_start: int
    token_end: int
    destination: Destination
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """How an import ended. Times are unix seconds; `error` is empty when `ok`. ended_s: when all of its KV had come."""

    request_id: str
    transfer_id: str
    ok: bool
    error: str
    tokens: int
    wire_bytes: int
    started_s: float
    ended_s: float
    prefetched: bool
    transport: str = ""  # what carried the KV: see Link.carrier; several are joined by "+"


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of the import side."""

    connect_timeout_s: float = 2.0
    stall_s: float = 10.0  # an import that owes its peers nothing and hears nothing for so long has failed
    inbox_bytes: int = 64 << 20
    window_bytes: int = WINDOW_BYTES
    connections: int = 1  # to each exporter rank, for what is large


@dataclass(slots=True)
class PullCounters:
    """Counts since the start, and levels; written by the puller's thread only."""

    received_bytes: int = 0
    ok: int = 0
    failed: int = 0
    prefetches: int = 0
    dropped: int = 0
    inbox_bytes: int = 0
    pulling: int = 0


class Part:
    """What one exporter rank contributes to an import."""

    def __init__(self, source: Source, link: Link, pull_id: int, tokens: tuple[int, int], window_bytes: int) -> None:
        self.source = source
        self.link = link
        self.pull_id = pull_id
        self.granted_bytes = window_bytes  # in all
        self._window_bytes = window_bytes  # payload that the exporter may send ahead
        self._received_bytes = 0
        self._losses = link.losses
        self._sequence = 0
        self._start, self._end = tokens
        self._seen = np.zeros((source.layer_end - source.layer_start, self._end - self._start), dtype=bool)
        self._missing = self._seen.size

    @property
    def done(self) -> bool:
        """Whether every layer of every token has come."""
        return self._missing == 0

    @property
    def owed_bytes(self) -> int:
        """Consumed but not yet granted again."""
        return self._received_bytes + self._window_bytes - self.granted_bytes

    @property
    def wants_grant(self) -> bool:
        """Whether enough was consumed to be worth a message: each wakes threads on both sides."""
        return not self.done and self.owed_bytes >= self._window_bytes // 2

    @property
    def expects(self) -> bool:
        """Whether it is the exporter's turn: it may send and has not."""
        return not self.done and self.granted_bytes > self._received_bytes

    def grant(self) -> None:
        """Let the exporter send as much again as has come."""
        self.granted_bytes += self.owed_bytes

    @property
    def lost(self) -> bool:
        """Whether the connection broke since this was asked, and with it what was under way."""
        return self.link.losses > self._losses

    def compare(self, sent: Sent) -> None:
        """Raises KvError(PROTOCOL) when frames that went out have not come: on one connection they keep their order."""
        if sent.frames > self._sequence:
            raise KvError(KvFault.PROTOCOL, f"{sent.frames - self._sequence} frames were lost on the way")

    def admit(self, seen: Seen, size_bytes: int) -> None:
        """Note a frame that is here, the next one; `seen` is what `expected` said of it."""
        seen[:] = True
        self._missing -= seen.size
        self._sequence += 1
        self._received_bytes += size_bytes

    def expected(self, frame: Frame, handle: KvHandle, shape: ImportShape) -> Seen:
        """What it adds to, none of which is here. Raises KvError(PROTOCOL) unless it is the next one and fits what was
        asked.
        """
        expected = (
            handle.transfer_id,
            handle.generation,
            handle.codec,
            handle.dtype,
            shape.shards.layers,
            shape.head_dim,
            self.source.head_start,
            self.source.head_end,
            self.source.rank,
            len(handle.endpoints),
            self._sequence,
        )
        got = (
            frame.transfer_id,
            frame.generation,
            frame.codec,
            frame.dtype,
            frame.layers,
            frame.head_dim,
            frame.head_start,
            frame.head_end,
            frame.rank,
            frame.ranks,
            frame.sequence,
        )
        if expected != got:
            raise KvError(KvFault.PROTOCOL, f"frame does not belong to the pull: {got} is not {expected}")
        first_layer, last_layer = self.source.layer_start, self.source.layer_end
        inside = self._start <= frame.token_start < frame.token_end <= self._end
        if not inside or not first_layer <= frame.layer_start < frame.layer_end <= last_layer:
            raise KvError(KvFault.PROTOCOL, "frame is out of range")
        tokens = slice(frame.token_start - self._start, frame.token_end - self._start)
        seen = self._seen[frame.layer_start - first_layer : frame.layer_end - first_layer, tokens]
        if np.count_nonzero(seen):
            raise KvError(KvFault.PROTOCOL, "frame overlaps an earlier one")
        return seen


@dataclass(slots=True)
class Import:
    """A transfer under way: a prefetch, a load, or a prefetch that a load has joined. Times without a word on them are
    monotonic.
    """

    handle: KvHandle
    token_start: int
    token_end: int
    started_s: float  # unix
    deadline_s: float
    prefetched: bool
    reachable_by_s: float  # peers must be connected by then
    progress_s: float  # the last one: a frame, or a grant after which one is due
    told_s: float  # when the exporters last heard that this is still wanted
    came_s: float = 0.0  # unix: when all of a prefetch had come, before the engine had blocks for it
    load: Load | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    inbox: list[tuple[Frame, Buffer]] = field(default_factory=list)
    inbox_bytes: int = 0
    wire_bytes: int = 0
    carriers: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every part has come in full."""
        return all(part.done for part in self.parts.values())

    def lateness(self, now_s: float, stall_s: float) -> KvError | None:
        """Why this import must end at that time, if it must."""
        waiting = [part for part in self.parts.values() if not part.done]
        stalled = now_s >= self.progress_s + stall_s and any(part.expects for part in waiting)
        if stalled or now_s >= self.deadline_s:
            return KvError(KvFault.TIMEOUT)
        if any(part.lost for part in waiting):
            return KvError(KvFault.PEER_LOST)
        away = [part.link for part in waiting if not part.link.connected]
        if now_s >= self.reachable_by_s and away:
            return KvError(KvFault.UNREACHABLE, next((link.stranger for link in away if link.stranger), ""))
        return None

    def result(self, load: Load, error: str, now_s: float) -> PullResult:
        """What to tell about `load`."""
        return PullResult(
            request_id=load.request_id,
            transfer_id=self.handle.transfer_id,
            ok=not error,
            error=error,
            tokens=0 if error else load.token_end - load.token_start,
            wire_bytes=self.wire_bytes,
            started_s=self.started_s,
            ended_s=now_s,
            prefetched=self.prefetched,
            transport="+".join(sorted(self.carriers)),
        )
