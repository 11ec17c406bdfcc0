"""Which rank holds which layers and KV heads, how much that is in segments and frames, and from which exporter ranks an
importer rank therefore pulls.

The KV of a model consists of components: layers that keep the same for a request. A plain transformer has one. A model
with sliding windows has one for the windowed layers and one for the others; a model with recurrent layers has one for
K and V and one for each part of the state. The components of a model have the same order on all of its instances.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.codec import payload_bytes
from services.worker.kv.wire.protocol import FRAME_BYTES
from shared.domain.instance import KvKind
from shared.domain.kv import TOKEN_GROUP, Codec, KvHandle

_CACHED = 256  # answers of each kind


@dataclass(frozen=True, slots=True)
class Shards:
    """How the ranks of one instance share a component: layers by pipeline stage, heads by tensor parallelism.

    Ranks are numbered stage by stage, as in the engine. `stages`: layers of the component in each, in order. Its
    layers are numbered from 0; `numbers` are their numbers in the model, empty where it has all layers of the model.
    """

    stages: tuple[int, ...]
    kv_heads: int
    tensor_parallel: int = 1
    numbers: tuple[int, ...] = ()

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


@dataclass(frozen=True)  # with a __dict__, for the cached properties
class RankShape:
    """The layers and heads of a component that rank `rank` holds, in `dtype`.

    Each head has `sides` rows of `head_dim` values for a token, K and V by default. A state is stored like the rows of
    one token, the last one that it covers.
    """

    shards: Shards
    head_dim: int
    dtype: torch.dtype
    rank: int = 0
    sides: int = 2
    kind: KvKind = KvKind.HEADS
    window: int = 0  # of the tokens before the one that is computed next, the last ones that are read; 0: all
    scales: tuple[tuple[float, ...], ...] = ()  # of each layer of the rank, by side, where KV has eight bits

    def read(self, start: int, end: int) -> tuple[int, int]:
        """Which of tokens [start, end) an importer needs that computes token `end` next."""
        return (max(start, end - self.window) if self.window else start), end

    def kept(self, start: int, end: int, total: int) -> tuple[int, int]:
        """Which of tokens [start, end) an exporter of `total` tokens stages; empty where the first is not below the
        second. An importer that has the last token of its prompt computed again reads one token more of a window; a
        state is that after the last token or none.
        """
        if not self.window:
            return start, end
        return max(start, total - self.window - (self.kind is not KvKind.STATE)), end

    def codec(self, wanted: Codec) -> Codec:
        """In which this component is sent if the transfer is coded: lossy codecs are for K and V."""
        k_and_v = self.kind is KvKind.HEADS and self.sides == 2 and self.dtype.itemsize > 1
        return wanted if k_and_v else Codec.RAW

    @cached_property
    def layers(self) -> tuple[int, int]:
        """[start, end) of the rank."""
        return self.shards.layers_of(self.rank)

    @cached_property
    def heads(self) -> tuple[int, int]:
        """[start, end) of the rank. Raises KvError(INVALID)."""
        return self.shards.heads_of(self.rank)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: all sides and heads of the rank."""
        start, end = self.heads
        return self.sides * (end - start) * self.head_dim * self.dtype.itemsize

    def chunk_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """[layers, sides, tokens, heads, head_dim] of that many tokens."""
        (first_layer, last_layer), (first_head, last_head) = self.layers, self.heads
        return last_layer - first_layer, self.sides, tokens, last_head - first_head, self.head_dim

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of that many tokens over all layers of the rank."""
        return math.prod(self.chunk_shape(tokens)) * self.dtype.itemsize

    def segment_tokens(self) -> int:
        """Tokens of a segment: as many as leave one layer within a frame, in whole groups where that fits."""
        tokens = max(1, FRAME_BYTES // self.token_bytes)
        return tokens // TOKEN_GROUP * TOKEN_GROUP or tokens

    def layers_a_frame(self, tokens: int, heads: int, codec: Codec) -> int:
        """Layers whose coded KV of that many tokens and heads fits one payload."""
        return max(1, FRAME_BYTES // payload_bytes((1, self.sides, tokens, heads, self.head_dim), self.dtype, codec))


def held_bytes(shapes: Sequence[RankShape], tokens: int, first: int = 0) -> int:
    """Bytes that an exporter stages for a transfer of tokens [first, tokens), of all components."""
    ranges = (shape.kept(first, tokens, tokens) for shape in shapes)
    return sum(shape.chunk_bytes(end - start) for shape, (start, end) in zip(shapes, ranges, strict=True))


@dataclass(frozen=True, slots=True)
class Source:
    """Exporter `rank` has layers [layer_start, layer_end) of heads [head_start, head_end) of a component; `consumers`
    importer ranks pull from it, of any component.
    """

    component: int
    rank: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    consumers: int = 0


def exporting(handle: KvHandle, ours: tuple[Shards, ...]) -> tuple[Shards, ...]:
    """How the exporter of a handle shares the components of this instance's model. Raises KvError(INVALID) when its
    ranks and layers do not fit.
    """
    return _shared_by(len(handle.endpoints), handle.stages, ours)


# Each transfer repeats these calls, and most clusters have only a few shapes.


@lru_cache(_CACHED)
def _shared_by(ranks: int, stages: tuple[int, ...], ours: tuple[Shards, ...]) -> tuple[Shards, ...]:
    layers = max(each.numbers[-1] + 1 if each.numbers else each.layers for each in ours)
    stages = stages or (layers,)
    # The last layers of a model may have no KV of their own, and only some components have all layers.
    fits = sum(stages) >= layers if all(each.numbers for each in ours) else sum(stages) == layers
    if not ranks or ranks % len(stages) or min(stages) < 1 or not fits:
        raise KvError(KvFault.INVALID, f"{ranks} ranks in stages of {stages} layers for a model of {layers}")
    bounds = [(sum(stages[:stage]), sum(stages[: stage + 1])) for stage in range(len(stages))]
    found = []
    for each in ours:
        numbers = each.numbers or range(layers)
        counts = tuple(sum(start <= number < end for number in numbers) for start, end in bounds)
        found.append(replace(each, stages=counts, tensor_parallel=ranks // len(stages)))
    return tuple(found)


@lru_cache(_CACHED)
def sources(rank: int, importers: tuple[Shards, ...], exporters: tuple[Shards, ...]) -> tuple[Source, ...]:
    """The exporter ranks from which importer `rank` pulls, each layer of each of its heads once, by component and in
    rank order. Raises KvError(INVALID).
    """
    consumers = _consumers(importers, exporters)
    return tuple(replace(each, consumers=consumers[each.rank]) for each in _pulled(rank, importers, exporters))


@lru_cache(_CACHED)
def without_importer(importers: tuple[Shards, ...], exporters: tuple[Shards, ...]) -> tuple[int, ...]:
    """Exporter ranks from which no importer pulls, since they hold copies. Raises KvError(INVALID)."""
    consumers = _consumers(importers, exporters)
    return tuple(each for each in range(exporters[0].ranks) if each not in consumers)


@lru_cache(_CACHED)
def _consumers(importers: tuple[Shards, ...], exporters: tuple[Shards, ...]) -> dict[int, int]:
    """How many importer ranks pull from each exporter rank that any pulls from."""
    pulling: defaultdict[int, set[int]] = defaultdict(set)
    for rank in range(importers[0].ranks):
        for source in _pulled(rank, importers, exporters):
            pulling[source.rank].add(rank)
    return {exporter: len(ranks) for exporter, ranks in pulling.items()}


def _pulled(rank: int, importers: tuple[Shards, ...], exporters: tuple[Shards, ...]) -> list[Source]:
    found = []
    for component, (ours, theirs) in enumerate(zip(importers, exporters, strict=True)):
        first, last = ours.layers_of(rank)
        heads = _heads_by_exporter(rank, ours, theirs)
        for each in range(theirs.ranks):
            start, end = theirs.layers_of(each)
            start, end = max(start, first), min(end, last)
            part = heads.get(each % theirs.tensor_parallel)
            if part is not None and start < end:
                found.append(Source(component, each, start, end, *part))
    return found


def _heads_by_exporter(rank: int, importers: Shards, exporters: Shards) -> dict[int, tuple[int, int]]:
    """From which tensor-parallel exporters importer `rank` pulls which heads."""
    at, end = importers.heads_of(rank)
    heads: dict[int, tuple[int, int]] = {}
    for exporter in range(exporters.tensor_parallel):
        first, last = exporters.heads_of(exporter)
        if first <= at < min(last, end):
            heads[exporter] = (at, min(last, end))
            at = min(last, end)
    return heads
