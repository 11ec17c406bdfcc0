"""The state of one import: the parts that are expected from each exporter, the parts that have arrived, and their
destination. No sockets, no threads.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Protocol

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

_IDENTITY = (  # fields of a frame that are the same for all frames of a part
    "transfer_id",
    "generation",
    "codec",
    "dtype",
    "component",
    "layers",
    "sides",
    "head_dim",
    "head_start",
    "head_end",
    "rank",
    "ranks",
)
_identity = attrgetter(*_IDENTITY)
_log = logging.getLogger(__name__)
EIGHT_BIT = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,  # AMD's before MI350
    "float8_e5m2": torch.float8_e5m2,
}  # with a scale for each tensor
WIDER = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPES = {**WIDER, **EIGHT_BIT}


@cache
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

    def room(self, layers: tuple[int, int], tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        """Memory for [layers, sides, tokens, heads, head_dim] in this order, into which the KV is received directly; it
        may then turn out to be wrong, which fails the import. Empty where there is none. The fewer views, the cheaper.
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
    """What one exporter rank, over one connection, contributes to a component of an import.

    Frames arrive in their order: a run of tokens, layer by layer, then the next tokens.
    """

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
        if self.tokens[0] >= self.tokens[1]:
            raise KvError(KvFault.INVALID, f"nothing to pull in tokens {self.tokens}")
        self._token = self._run_end = self.tokens[0]  # the present run of tokens; it is empty before its first layers
        self._layer = source.layer_start  # the next one of the run

    def _identity(self) -> tuple[object, ...]:
        """What `_IDENTITY` has to be in a frame of the part."""
        handle, source, shape = self.owner.handle, self.source, self.shape
        return (
            handle.transfer_id,
            handle.generation,
            self.codec,
            self.dtype,
            source.component,
            shape.shards.layers,
            shape.sides,
            shape.head_dim,
            source.head_start,
            source.head_end,
            source.rank,
            len(handle.endpoints),
        )

    def _size_bytes(self) -> float:
        """Payload bytes of the part; infinite where that depends on how it is coded."""
        dtype, source, (start, end) = DTYPES.get(self.dtype), self.source, self.tokens
        if self.codec is not Codec.RAW or dtype is None:
            return math.inf
        rows = (source.layer_end - source.layer_start) * self.shape.sides * (end - start)
        return rows * (source.head_end - source.head_start) * self.shape.head_dim * dtype.itemsize

    @property
    def done(self) -> bool:
        """Whether every layer of every token has arrived."""
        return self._token >= self.tokens[1]

    @property
    def owed_bytes(self) -> int:
        """Consumed but not yet granted again."""
        return self._received_bytes + self._window_bytes - self.granted_bytes

    @property
    def wants_grant(self) -> bool:
        """Whether enough was consumed for a message, each of which wakes threads on both sides, and the exporter may
        not send everything yet.
        """
        worth = not self.done and self.owed_bytes >= self._window_bytes // 2
        return worth and self.granted_bytes < self._size_bytes()

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

    def admit(self, frame: Frame, size_bytes: int) -> None:
        """Note that the next frame has arrived, which was checked."""
        self._layer, self._run_end = frame.layer_end, frame.token_end
        if self._layer == self.source.layer_end:
            self._layer, self._token = self.source.layer_start, self._run_end
        self._sequence += 1
        self._received_bytes += size_bytes

    @property
    def dtype(self) -> str:
        """The exporter's. A state is in the dtype that the model prescribes; K and V are in the engine's."""
        return dtype_name(self.shape.dtype) if self.shape.kind is KvKind.STATE else self.owner.handle.dtype

    def check(self, frame: Frame) -> None:
        """Raises KvError(PROTOCOL) unless the frame is the next one and fits the pull."""
        identity = self._identity()
        if frame.sequence != self._sequence or _identity(frame) != identity:
            wanted = dict(zip(_IDENTITY, identity, strict=True)) | {"sequence": self._sequence}
            name = next(name for name, value in wanted.items() if getattr(frame, name) != value)
            got = f"its {name} is {getattr(frame, name)}, not {wanted[name]}"
            raise KvError(KvFault.PROTOCOL, f"frame does not belong to the pull: {got}")
        inside = self._token < frame.token_end <= self.tokens[1] and self._layer < frame.layer_end
        if not inside or frame.layer_end > self.source.layer_end:
            raise KvError(KvFault.PROTOCOL, "frame is out of range")
        goes_on = (frame.token_start, frame.layer_start) == (self._token, self._layer)
        if not goes_on or (self._run_end > self._token and frame.token_end != self._run_end):
            raise KvError(KvFault.PROTOCOL, "frame does not go on where the one before it ends")


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
    views = to.room((frame.layer_start, frame.layer_end), tokens, heads)
    return views if sum(view.nbytes for view in views) == size_bytes == math.prod(frame.shape) * dtype.itemsize else []


def check_frame(frame: Frame, received: Received) -> None:
    """Raise KvError unless the frame has a known dtype and its payload is what was sent: a transport that sends a
    checksum may leave that of the frame out.
    """
    if frame.dtype not in DTYPES:
        raise KvError(KvFault.PROTOCOL, f"unknown dtype {frame.dtype}")
    sent = received.sent_checksum if received.sent_checksum is not None else frame.checksum
    if received.checksum != sent or (frame.checksum and frame.checksum != sent):
        raise KvError(KvFault.CHECKSUM, f"layers {frame.layer_start}.. tokens {frame.token_start}..")


def as_kv_error(error: Exception) -> KvError:
    """A failure as a KvError; an unforeseen one is logged here, since it is not raised further."""
    if isinstance(error, KvError):
        return error
    _log.error("an import failed", exc_info=error)
    return KvError(KvFault.INTERNAL, repr(error))
