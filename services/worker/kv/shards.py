"""Which rank holds which layers and KV heads, how much that is in segments and frames, and from which exporter ranks an
importer rank therefore pulls.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.codec import payload_bytes
from services.worker.kv.wire.protocol import FRAME_BYTES
from shared.domain.kv import TOKEN_GROUP, Codec, KvHandle

_CACHED = 256  # answers of each kind


@dataclass(frozen=True, slots=True)
class Shards:
    """How the ranks of one instance share a model's KV: layers by pipeline stage, heads by tensor parallelism.

    Ranks are numbered stage by stage, as in the engine. `stages`: layers of each, in order.
    """

    stages: tuple[int, ...]
    kv_heads: int
    tensor_parallel: int = 1

    @property
    def ranks(self) -> int:
        return len(self.stages) * self.tensor_parallel

    @property
    def layers(self) -> int:
        return sum(self.stages)

    def layers_of(self, rank: int) -> tuple[int, int]:
        stage = rank // self.tensor_parallel
        start = sum(self.stages[:stage])
        return start, start + self.stages[stage]

    def heads_of(self, rank: int) -> tuple[int, int]:
        """KV heads [start, end) of a rank; with more ranks a stage than heads, neighbours hold the same one.

        Raises KvError(INVALID) when they do not divide evenly.
        """
        rank, ranks, kv_heads = rank % self.tensor_parallel, self.tensor_parallel, self.kv_heads
        if ranks <= kv_heads and kv_heads % ranks == 0:
            each = kv_heads // ranks
            return rank * each, (rank + 1) * each
        if ranks > kv_heads and ranks % kv_heads == 0:
            head = rank // (ranks // kv_heads)
            return head, head + 1
        raise KvError(KvFault.INVALID, f"{kv_heads} KV heads over {ranks} ranks")


@dataclass(frozen=True, slots=True)
class RankShape:
    """The layers and heads of the model that rank `rank` holds, in `dtype`."""

    shards: Shards
    head_dim: int
    dtype: torch.dtype
    rank: int = 0

    @property
    def layers(self) -> tuple[int, int]:
        """[start, end) of the rank."""
        return self.shards.layers_of(self.rank)

    @property
    def heads(self) -> tuple[int, int]:
        """[start, end) of the rank. Raises KvError(INVALID)."""
        return self.shards.heads_of(self.rank)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: K and V, all heads of the rank."""
        start, end = self.heads
        return 2 * (end - start) * self.head_dim * self.dtype.itemsize

    def chunk_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """[layers, 2, tokens, heads, head_dim] of that many tokens."""
        (first_layer, last_layer), (first_head, last_head) = self.layers, self.heads
        return last_layer - first_layer, 2, tokens, last_head - first_head, self.head_dim

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of that many tokens over all layers of the rank."""
        return math.prod(self.chunk_shape(tokens)) * self.dtype.itemsize

    def segment_tokens(self) -> int:
        """Tokens of a segment: as many as leave one layer within a frame, in whole groups where that fits."""
        tokens = max(1, FRAME_BYTES // self.token_bytes)
        return tokens // TOKEN_GROUP * TOKEN_GROUP or tokens

    def layers_a_frame(self, tokens: int, heads: int, codec: Codec) -> int:
        """Layers whose coded KV of that many tokens and heads fits one payload."""
        return max(1, FRAME_BYTES // payload_bytes((1, 2, tokens, heads, self.head_dim), self.dtype, codec))


@dataclass(frozen=True, slots=True)
class Source:
    """Exporter `rank` has layers [layer_start, layer_end) of heads [head_start, head_end); `consumers` importer
    ranks pull from it.
    """

    rank: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    consumers: int


def exporting(handle: KvHandle, ours: Shards) -> Shards:
    """How the exporter of a handle shares the model of this instance. Raises KvError(INVALID) when its ranks and
    layers do not fit.
    """
    return _shared_by(len(handle.endpoints), handle.stages, ours)


# Each transfer repeats these calls, and most clusters have only a few shapes.


@lru_cache(_CACHED)
def _shared_by(ranks: int, stages: tuple[int, ...], ours: Shards) -> Shards:
    stages = stages or (ours.layers,)
    if not ranks or ranks % len(stages) or min(stages) < 1 or sum(stages) != ours.layers:
        raise KvError(KvFault.INVALID, f"{ranks} ranks in stages of {stages} layers for a model of {ours.layers}")
    return Shards(stages, ours.kv_heads, ranks // len(stages))


@lru_cache(_CACHED)
def sources(rank: int, importers: Shards, exporters: Shards) -> tuple[Source, ...]:
    """The exporter ranks from which importer `rank` pulls, each layer of each of its heads once, in rank order.
    Raises KvError(INVALID).
    """
    wanted = _heads_by_importer(importers, exporters)
    first, last = importers.layers_of(rank)
    found = []
    for each in range(exporters.ranks):
        heads = wanted[rank % importers.tensor_parallel].get(each % exporters.tensor_parallel)
        start, end = exporters.layers_of(each)
        start, end = max(start, first), min(end, last)
        if heads is not None and start < end:
            found.append(Source(each, start, end, *heads, _consumers(each, wanted, importers, exporters)))
    return tuple(found)


@lru_cache(_CACHED)
def without_importer(importers: Shards, exporters: Shards) -> tuple[int, ...]:
    """Exporter ranks from which no importer pulls, since they hold copies. Raises KvError(INVALID)."""
    wanted = _heads_by_importer(importers, exporters)
    return tuple(each for each in range(exporters.ranks) if not _consumers(each, wanted, importers, exporters))


_Heads = list[dict[int, tuple[int, int]]]  # by importer within a stage: exporter within a stage, and which heads


def _consumers(exporter: int, wanted: _Heads, importers: Shards, exporters: Shards) -> int:
    """How many importer ranks pull from that exporter rank."""
    start, end = exporters.layers_of(exporter)
    ranges = (importers.layers_of(rank) for rank in range(0, importers.ranks, importers.tensor_parallel))
    stages = sum(first < end and start < last for first, last in ranges)
    return stages * sum(exporter % exporters.tensor_parallel in heads for heads in wanted)


def _heads_by_importer(importers: Shards, exporters: Shards) -> _Heads:
    wanted: _Heads = []
    for importer in range(importers.tensor_parallel):
        at, end = importers.heads_of(importer)
        heads: dict[int, tuple[int, int]] = {}
        for exporter in range(exporters.tensor_parallel):
            first, last = exporters.heads_of(exporter)
            if first <= at < min(last, end):
                heads[exporter] = (at, min(last, end))
                at = min(last, end)
        wanted.append(heads)
    return wanted
