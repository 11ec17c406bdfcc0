"""The state of one import: the parts that are expected from each exporter, the parts that have arrived, and their
destination. No sockets, no threads.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.codec import decode
from services.worker.kv.rank_messages import PullEnded
from services.worker.kv.shards import RankShape, Source
from services.worker.kv.wire.protocol import WINDOW_BYTES, Buffer, Frame, Received, Sent
from services.worker.kv.wire.tcp_transport import TcpLink
from shared.domain.instance import KvKind
from shared.domain.kv import Codec, KvHandle

Arrived = np.ndarray[Any, np.dtype[np.bool_]]  # [layers, tokens] of a part that have arrived
_log = logging.getLogger(__name__)
EIGHT_BIT = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,  # AMD's before MI350
    "float8_e5m2": torch.float8_e5m2,
}  # with a scale for each tensor
WIDER = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPES = {**WIDER, **EIGHT_BIT}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Scales = Sequence[float]  # of each side of a layer; empty: 1. A stored value times its scale is the real one.


class Destination(Protocol):
    """Where a component of imported KV goes. The puller's thread calls it, not after the import has ended."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it wants KV. One that stores eight bits takes float32, and eight bits as bfloat16."""

    def scales(self, layer: int) -> Scales:
        """By what K and V of a layer are divided before they are stored; see `Scales`."""

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        """Write [sides, tokens, heads, head_dim] of one layer; numbers are those of the prompt and the whole component.
        The memory of `kv` is used again once this returns.
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
        """Write a verified payload (uint8) as it arrived, all of whose tokens are wanted; `dtype` is the
        exporter's. False: not written, so the payload is decoded and written a layer at a time. The memory of the
        payload is used again once this returns.
        """

    def room(self, layer: int, tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        """Memory for [sides, tokens, heads, head_dim] of one layer in this order, into which the KV is received
        directly; it may then turn out to be wrong, which fails the import. Empty where there is none.
        """

    def finish(self) -> None:
        """Nothing more is written. A device may still be writing: the engine orders its next step after that."""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine has blocks for tokens [token_start, token_end) of the handle, in a destination for each component.
    `request_id` is the engine's.

    The import may take `timeout_s` in all, which may be infinite: an import without progress fails sooner.
    """

    request_id: str
    handle: KvHandle
    token_start: int
    token_end: int
    destinations: tuple[Destination, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of the import side."""

    connect_timeout_s: float = 2.0
    stall_s: float = 10.0  # an import that waits for its peers and receives nothing for so long has failed
    inbox_bytes: int = 64 << 20
    window_bytes: int = WINDOW_BYTES
    connections: int = 1  # to each exporter rank, for what is large


@dataclass(slots=True)
class Import:
    """A transfer under way: a prefetch, a load, or a prefetch that a load has joined. Times are monotonic unless
    noted.
    """

    handle: KvHandle
    token_start: int
    token_end: int
    started_s: float  # unix
    deadline_mono: float
    prefetched: bool
    reachable_by_mono: float  # peers must be connected by then
    progress_mono: float  # the last one: a frame, or a grant after which one is due
    notified_mono: float  # when the exporters were last notified that this import still goes on
    accepted: bool = False  # of a prefetch: its decode was accepted here, so that no other instance will pull it
    arrived_s: float = 0.0  # unix: when all of a prefetch had arrived, before the engine had blocks for it
    load: Load | None = None
    parts: "list[Part]" = field(default_factory=list)
    inbox: list[tuple[Frame, Buffer]] = field(default_factory=list)  # frames that wait for the engine's blocks
    inbox_bytes: int = 0
    wire_bytes: int = 0
    carriers: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every part has arrived in full."""
        return all(part.done for part in self.parts)

    def lateness(self, now_mono: float, stall_s: float) -> KvError | None:
        """Why this import must end at that time, if it must."""
        waiting = [part for part in self.parts if not part.done]
        stalled = now_mono >= self.progress_mono + stall_s and any(part.expects for part in waiting)
        if stalled or now_mono >= self.deadline_mono:
            return KvError(KvFault.TIMEOUT)
        if any(part.lost for part in waiting):
            return KvError(KvFault.PEER_LOST)
        unconnected = [part.link for part in waiting if not part.link.connected]
        if now_mono >= self.reachable_by_mono and unconnected:
            return KvError(KvFault.UNREACHABLE, next((link.refusal for link in unconnected if link.refusal), ""))
        return None

    def finish(self, load: Load, rank: int, error: KvError | None) -> PullEnded:
        """End the writes of a load, also after a failure, since its blocks are the engine's; how it has ended."""
        try:
            for destination in load.destinations:
                destination.finish()
        except Exception as failure:
            error = error or as_kv_error(failure)
        return PullEnded(
            transfer_id=self.handle.transfer_id,
            rank=rank,
            ok=error is None,
            error=str(error or ""),
            tokens=load.token_end - load.token_start if error is None else 0,
            wire_bytes=self.wire_bytes,
            started_s=self.started_s,
            ended_s=self.arrived_s or time.time(),
            prefetched=self.prefetched,
            transport="+".join(sorted(self.carriers)),
        )


class Part:
    """What one exporter rank, over one connection, contributes to a component of an import."""

    def __init__(
        self, owner: Import, source: Source, shape: RankShape, link: TcpLink, pull_id: int, window_bytes: int
    ) -> None:
        self.owner = owner
        self.source = source
        self.shape = shape
        self.tokens = shape.read(owner.token_start, owner.token_end)
        self.codec = shape.codec(owner.handle.codec)
        self.link = link
        self.pull_id = pull_id
        self.granted_bytes = window_bytes  # in all
        self._window_bytes = window_bytes  # payload that the exporter may send ahead
        self._received_bytes = 0
        self._losses = link.losses
        self._sequence = 0
        start, end = self.tokens
        self._arrived = np.zeros((source.layer_end - source.layer_start, end - start), dtype=bool)
        self._missing = self._arrived.size

    @property
    def done(self) -> bool:
        """Whether every layer of every token has arrived."""
        return self._missing == 0

    @property
    def owed_bytes(self) -> int:
        """Consumed but not yet granted again."""
        return self._received_bytes + self._window_bytes - self.granted_bytes

    @property
    def wants_grant(self) -> bool:
        """Whether enough was consumed for a message, each of which wakes threads on both sides."""
        return not self.done and self.owed_bytes >= self._window_bytes // 2

    @property
    def expects(self) -> bool:
        """Whether the exporter may send and has not."""
        return not self.done and self.granted_bytes > self._received_bytes

    def grant(self) -> None:
        """Let the exporter send as much again as has arrived."""
        self.granted_bytes += self.owed_bytes

    @property
    def lost(self) -> bool:
        """Whether the connection broke since the pull was sent, and with it what was under way."""
        return self.link.losses > self._losses

    def compare(self, sent: Sent) -> None:
        """Raises KvError(PROTOCOL) when frames that were sent have not arrived: on one connection they keep their
        order.
        """
        if sent.frames > self._sequence:
            raise KvError(KvFault.PROTOCOL, f"{sent.frames - self._sequence} frames were lost on the way")

    def admit(self, arrived: Arrived, size_bytes: int) -> None:
        """Note that the next frame has arrived; `arrived` is what `expected` returned for it."""
        arrived[:] = True
        self._missing -= arrived.size
        self._sequence += 1
        self._received_bytes += size_bytes

    @property
    def dtype(self) -> str:
        """The exporter's. A state is in the dtype that the model prescribes; K and V are in the engine's."""
        return dtype_name(self.shape.dtype) if self.shape.kind is KvKind.STATE else self.owner.handle.dtype

    def expected(self, frame: Frame) -> Arrived:
        """The layers and tokens that the frame adds, none of which have arrived. Raises KvError(PROTOCOL) unless it
        is the next frame and fits the pull.
        """
        handle, source, shape = self.owner.handle, self.source, self.shape
        wanted = {
            "transfer_id": handle.transfer_id,
            "generation": handle.generation,
            "codec": self.codec,
            "dtype": self.dtype,
            "component": source.component,
            "layers": shape.shards.layers,
            "sides": shape.sides,
            "head_dim": shape.head_dim,
            "head_start": source.head_start,
            "head_end": source.head_end,
            "rank": source.rank,
            "ranks": len(handle.endpoints),
            "sequence": self._sequence,
        }
        for name, value in wanted.items():
            if (got := getattr(frame, name)) != value:
                raise KvError(KvFault.PROTOCOL, f"frame does not belong to the pull: its {name} is {got}, not {value}")
        start, end = self.tokens
        inside = start <= frame.token_start < frame.token_end <= end
        if not inside or not source.layer_start <= frame.layer_start < frame.layer_end <= source.layer_end:
            raise KvError(KvFault.PROTOCOL, "frame is out of range")
        tokens = slice(frame.token_start - start, frame.token_end - start)
        first = source.layer_start
        arrived = self._arrived[frame.layer_start - first : frame.layer_end - first, tokens]
        if np.count_nonzero(arrived):
            raise KvError(KvFault.PROTOCOL, "frame overlaps an earlier one")
        return arrived


def write_frame(frame: Frame, payload: Buffer, load: Load) -> None:
    """Decode a verified frame and write the tokens that the load wants. Raises KvError when it cannot be decoded."""
    start, end = max(frame.token_start, load.token_start), min(frame.token_end, load.token_end)
    if start >= end:
        return
    raw, dtype = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8)), DTYPES[frame.dtype]
    to = load.destinations[frame.component]
    if (start, end) == (frame.token_start, frame.token_end):
        layers, heads = (frame.layer_start, frame.layer_end), (frame.head_start, frame.head_end)
        if to.take(layers, (start, end), heads, raw, dtype, frame.codec):
            return
    # bfloat16 holds eight bits exactly, and few operations take them as they are.
    both_eight_bit = dtype.itemsize == 1 and len(to.scales(frame.layer_start)) > 0
    kv = decode(raw, frame.shape, dtype, frame.codec, torch.bfloat16 if both_eight_bit else to.dtype)
    kv = kv[:, :, start - frame.token_start : end - frame.token_start]
    for layer in range(frame.layer_start, frame.layer_end):
        index = layer - frame.layer_start
        theirs = frame.scales[index * frame.sides : (index + 1) * frame.sides]
        to.write(layer, start, frame.head_start, rescaled(kv[index], theirs, to.scales(layer)))


def rescaled(kv: torch.Tensor, theirs: Scales, ours: Scales) -> torch.Tensor:
    """Stored values [sides, …] of the exporter as those of the importer. Equal scales leave them as they are.

    In float32 for an importer with scales, which then rounds them once.
    """
    if tuple(theirs) == tuple(ours):
        return kv
    real = kv.float() * _by_side(theirs, kv) if theirs else kv.float()
    return real / _by_side(ours, kv) if ours else real.to(kv.dtype)


def _by_side(scales: Scales, kv: torch.Tensor) -> torch.Tensor:
    return torch.tensor(scales, dtype=torch.float32).view(-1, *(1 for _ in kv.shape[1:]))


def direct_views(frame: Frame, size_bytes: int, load: Load) -> list[memoryview]:
    """Memory into which the frame's payload may be received directly; empty where there is none."""
    dtype, to = DTYPES.get(frame.dtype), load.destinations[frame.component]
    inside = load.token_start <= frame.token_start < frame.token_end <= load.token_end
    if frame.codec.lossy or dtype is None or dtype is not to.dtype or not inside or frame.scales:
        return []
    tokens, heads = (frame.token_start, frame.token_end), (frame.head_start, frame.head_end)
    views: list[memoryview] = []
    for layer in range(frame.layer_start, frame.layer_end):
        room = to.room(layer, tokens, heads)
        if not room:
            return []
        views.extend(room)
    return views if sum(view.nbytes for view in views) == size_bytes == math.prod(frame.shape) * dtype.itemsize else []


def check_frame(frame: Frame, received: Received) -> None:
    """Raise KvError unless the frame has a known dtype and its payload is what was sent: a transport that sends a
    checksum may leave that of the frame out.
    """
    if frame.dtype not in DTYPES:
        raise KvError(KvFault.PROTOCOL, f"unknown dtype {frame.dtype}")
    sent = received.sent_checksum
    expected = {frame.checksum} if sent is None else {sent, frame.checksum or sent}
    if expected != {received.checksum}:
        raise KvError(KvFault.CHECKSUM, f"layers {frame.layer_start}.. tokens {frame.token_start}..")


def as_kv_error(error: Exception) -> KvError:
    """A failure as a KvError; an unforeseen one is logged here, since it is not raised further."""
    if isinstance(error, KvError):
        return error
    _log.error("an import failed", exc_info=error)
    return KvError(KvFault.INTERNAL, repr(error))
