"""The time of each kind of operator on one device, as closed forms of a few fitted constants.

The forms work on numbers and on arrays alike: step models call them with numbers, `polyphase fit` with whole tables.
They are physical: FLOPs over an effective rate, bytes over an effective bandwidth, the cost of a launch, and how work
divides into tiles over the device's units.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.cost.catalogue import Accelerator

# A float or a float array. numpy's types cannot say that the result is of the kind of the arguments.
Numeric = Any


def minimum(a: Numeric, b: Numeric) -> Numeric:
    """The lesser of two numbers, or of each pair in arrays."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def maximum(a: Numeric, b: Numeric) -> Numeric:
    """The greater of two numbers, or of each pair in arrays."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


# Output tiles that matrix kernels use, and the ways to split the inner dimension.
_TILES: tuple[tuple[int, int], ...] = (
    (256, 128),
    (128, 256),
    (128, 128),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
    (32, 64),
    (16, 64),
    (16, 128),
)
_SPLITS = np.array((1, 2, 4, 8))
_ROWS, _COLUMNS = np.array(_TILES, dtype=np.float64).T
_SIZES: tuple[float, ...] = tuple(2.0 / (1.0 / rows + 1.0 / columns) / 128.0 for rows, columns in _TILES)


@dataclass(frozen=True, slots=True)
class Device:
    """The peaks of a device, of which operators reach a share."""

    flops: float  # operations/s of the operator's precision
    bandwidth: float  # bytes/s
    units: int  # streaming multiprocessors, compute units
    cache_bytes: float = 0.0  # that all units share; 0: none known
    unit_memory_bytes: float = 0.0  # shared memory of a unit; 0: not known


def device_of(accelerator: Accelerator, precision: str) -> Device:
    return Device(
        accelerator.flops(precision),
        accelerator.bandwidth_bytes_s,
        accelerator.compute_units,
        accelerator.cache_bytes,
        accelerator.unit_memory_bytes,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Effective bandwidth as shares of the peak: from memory, and from the cache for what fits in it."""

    share: float  # beyond the cache
    cache_share: float  # within it; may exceed 1
    cache_bytes: float
    steepness: float = 8.0

    def time_s(self, moved: Numeric, device: Device, *, cold: bool = False) -> Numeric:
        """Seconds to move that many bytes; `cold` when nothing can be in the cache (weights, KV)."""
        # A cold transfer gains nothing from the cache, but a small one can still be slow.
        warm = min(self.cache_share, self.share) if cold else self.cache_share
        hit = 1.0 / (1.0 + (moved / self.cache_bytes) ** self.steepness)
        return moved / device.bandwidth * ((1.0 - hit) / self.share + hit / warm)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Cost of quantising a matrix product's activations in its own kernel: rows over units, k elements each."""

    launch_s: float
    element_s: float
    exponent: float
    rows_per_unit: float
    ramp: float
    spill_s_byte: float = 0.0  # beyond the cache
    spill_bytes: float = 1e9
    fused: bool = True  # engines do it in the operator before; scales of blocks (fp8_block) take their own kernel

    def time_s(self, m: Numeric, k: Numeric, units: int) -> Numeric:
        """Seconds for m rows of k elements, launched by themselves."""
        return self.launch_s + self.work_s(m, k, units)

    def work_s(self, m: Numeric, k: Numeric, units: int) -> Numeric:
        """The time without the launch, which an engine's graphs hide."""
        rows = (1.0 + (m / (units * self.rows_per_unit)) ** self.ramp) ** (1.0 / self.ramp)
        moved = 3.0 * m * k
        spilled = moved / (1.0 + (self.spill_bytes / moved) ** 8.0)
        return self.element_s * k**self.exponent * rows + self.spill_s_byte * spilled


@dataclass(frozen=True, slots=True)
class Gemm:
    """y[m, n] = x[m, k] · W[k, n]: waves of output tiles against memory traffic, under a smooth maximum."""

    overhead_s: float
    compute: float  # share of the peak rate with large tiles
    tile_penalty: float  # exponent of the loss with smaller tiles
    depth_s: float  # latency of one step along k
    split_s: float  # cost of splitting k over several units
    sharpness: float
    weights: Memory
    activations: Memory
    quantisation: Quantisation | None = None

    def time_s(
        self,
        m: Numeric,
        n: Numeric,
        k: Numeric,
        width: float,
        device: Device,
        *,
        cold: bool = False,
        count: Numeric = 1.0,
    ) -> Numeric:
        """Seconds. `width`: bytes of a weight. `count`: weight matrices that share the rows (experts).

        `cold` is how an engine runs it: weights come from memory, and quantisation is fused into the operator before
        or, where it cannot be, one more kernel.
        """
        tiles_s = self._tiles_s(m, n, k, device, count)
        memory_s = self.weights.time_s(count * n * k * width, device, cold=cold)
        memory_s = (
            memory_s + self.activations.time_s(2.0 * m * k, device) + self.activations.time_s(2.0 * m * n, device)
        )
        p = self.sharpness
        total = self.overhead_s + (tiles_s**p + memory_s**p) ** (1.0 / p)
        if self.quantisation and not cold:
            total = total + self.quantisation.time_s(m, k, device.units)
        elif self.quantisation and not self.quantisation.fused:
            total = total + self.overhead_s + self.quantisation.work_s(m, k, device.units)
        return total

    def _tiles_s(self, m: Numeric, n: Numeric, k: Numeric, device: Device, count: Numeric) -> Numeric:
        """The best of the tile shapes: whole waves over the units, each as long as one tile's walk along k.

        All shapes and splits at once, shape [tiles, splits, ...].
        """
        unit_flops = device.flops / device.units
        ranks = max(np.ndim(m), np.ndim(n), np.ndim(k), np.ndim(count))
        beside = (1,) * ranks
        rows, columns = _ROWS.reshape(-1, 1, *beside), _COLUMNS.reshape(-1, 1, *beside)
        splits = _SPLITS.reshape(1, -1, *beside)
        shares = np.array([min(1.0, size**self.tile_penalty) for size in _SIZES])
        rate = (unit_flops * self.compute * shares).reshape(-1, 1, *beside)
        tiles = count * np.ceil(m / count / rows) * np.ceil(n / columns)
        depth = k / splits
        time = np.ceil(tiles * splits / device.units) * (2.0 * rows * columns) * depth / rate + self.depth_s * depth
        return (time + np.where(splits > 1, self.split_s, 0.0)).min(axis=(0, 1))


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Norms, activations, rotary embedding, residuals: a launch and memory traffic."""

    overhead_s: float
    memory: Memory

    def time_s(self, moved: Numeric, device: Device) -> Numeric:
        return self.overhead_s + self.memory.time_s(moved, device)


@dataclass(frozen=True, slots=True)
class Collective:
    """All-reduce inside a scale-up domain: the faster of a direct exchange and a ring, as engines choose by size."""

    latency_s: float  # of the direct exchange ...
    latency_rank_s: float  # ... for each rank
    share: float  # of the link
    ring_latency_s: float
    ring_share: float
    contention: float = 0.0  # exponent of the loss when more than two ranks share the link

    def all_reduce_s(self, moved: Numeric, ranks: Numeric, link: float) -> Numeric:
        """Seconds to sum `moved` bytes. Source: 2(n−1)/n of the bytes cross each link."""
        crossing = 2.0 * (ranks - 1.0) / ranks * moved / link * (ranks / 2.0) ** self.contention
        direct = self.latency_s + self.latency_rank_s * ranks + crossing / self.share
        return minimum(direct, self.ring_latency_s + crossing / self.ring_share)

    def gather_scatter_s(self, moved: Numeric, ranks: Numeric, link: float) -> Numeric:
        """Seconds to gather `moved` bytes on each rank and, later, to sum and scatter as many.

        Two rings, each with half of an all-reduce's traffic and a ring's latency; no engine has a direct exchange here.
        """
        crossing = 2.0 * (ranks - 1.0) / ranks * moved / link * (ranks / 2.0) ** self.contention
        return 2.0 * self.ring_latency_s + crossing / self.ring_share


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """The experts of a layer on one rank: grouped products over the rows that were routed to them."""

    gemm: Gemm
    elementwise: Elementwise  # moving rows to their experts and back, and the activation; in 16 bits

    def time_s(
        self,
        rows: Numeric,
        active: Numeric,
        up: Numeric,
        width: Numeric,
        hidden: Numeric,
        element: float,
        device: Device,
    ) -> Numeric:
        """Seconds. `rows`: over all `active` experts; `up`: columns of the first product, twice `width` when gated."""
        first = self.gemm.time_s(rows, up, hidden, element, device, cold=True, count=active)
        second = self.gemm.time_s(rows, hidden, width, element, device, cold=True, count=active)
        shuffle = 2.0 * self.elementwise.time_s(rows * hidden * 4.0, device)
        return first + second + shuffle + self.elementwise.time_s(rows * (up + width) * 2.0, device)


@dataclass(frozen=True, slots=True)
class Mlp:
    gemm: Gemm
    activation: Elementwise

    def time_s(
        self, tokens: Numeric, up: Numeric, width: Numeric, hidden: Numeric, element: float, device: Device
    ) -> Numeric:
        """Seconds. `up`: columns of the first product, twice `width` when gated; `element`: bytes of a weight."""
        first = self.gemm.time_s(tokens, up, hidden, element, device)
        second = self.gemm.time_s(tokens, hidden, width, element, device)
        return first + self.activation.time_s(tokens * (up + width) * 2.0, device) + second


# Shared memory of one tile of 64 queries against 128 positions: queries, keys and values, 128 wide, in 16 bits.
_TILE_BYTES = (64 + 2 * 128) * 128 * 2
_CACHE_STEEPNESS = 4.0  # how abruptly contexts cease to fit the cache
_LEAST_S = 1e-15


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    flops: float  # of one query against one position, over all query heads
    kv_bytes: float  # of one position, over all KV heads
    query_bytes: float  # of one token's query and output


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One query token for each sequence: the KV is read once, by one work item for each sequence and KV head.

    For a given number of sequences the time is piecewise linear in their total context.
    """

    overhead_s: float
    long_s: float  # more when the context is split over several units (beyond 128 tokens)
    grouped_s: float  # more with several KV heads of grouped queries
    depth_s: float  # latency of one position along the context, while units are idle ...
    depth_tokens: float  # ... up to that many positions ...
    depth_items: float  # ... fading with the number of work items
    item_s: float  # cost of a work item once all units are busy
    splits: float  # ways in which one KV head's context is divided over units
    ungrouped_splits: float  # the same without grouped queries
    compute: float  # share of the peak rate
    memory: Memory

    def fixed_s(self, count: Numeric, heads: Heads, device: Device) -> Numeric:
        """The part that does not depend on the context."""
        items = count * heads.kv
        several = minimum(1.0, (items - minimum(items, 8.0)) / 8.0)
        grouped = minimum(1.0, heads.query - heads.kv) * minimum(1.0, heads.kv - 1.0) * several
        idle = minimum(items, device.units)
        return self.overhead_s + self.grouped_s * grouped + self.item_s * (items - idle)

    def depth_at(self, count: Numeric, mean_context: Numeric, heads: Heads) -> Numeric:
        """Latency along a context of that length."""
        return self.depth_s / (1.0 + count * heads.kv / self.depth_items) * minimum(mean_context, self.depth_tokens)

    def busy(self, count: Numeric, heads: Heads, device: Device) -> Numeric:
        """Share of the units that have work, hence of the bandwidth that can be drawn."""
        grouped = minimum(1.0, heads.query - heads.kv)  # 1 or 0
        with_groups = minimum(1.0, heads.kv * maximum(self.splits, 2.0 * count) / device.units)
        without = minimum(1.0, count * heads.kv * self.ungrouped_splits / device.units)
        return grouped * with_groups + (1.0 - grouped) * without

    def cold_position_s(self, heads: Heads, device: Device) -> float:
        """Seconds of one position of context when all units are busy and KV comes from memory."""
        return smooth_max(
            heads.flops / (device.flops * self.compute), heads.kv_bytes / (device.bandwidth * self.memory.share), 4.0
        )

    def time_s(self, count: Numeric, context: Numeric, heads: Heads, device: Device) -> Numeric:
        """Seconds for `count` sequences of `context` positions each, with KV in the cache where it fits."""
        total = self.fixed_s(count, heads, device) + self.long_s * (context > 128)
        total = total + self.depth_at(count, context, heads)
        positions = count * context
        memory_s = self.memory.time_s(positions * heads.kv_bytes + count * heads.query_bytes, device)
        memory_s = memory_s / self.busy(count, heads, device)
        compute_s = positions * heads.flops / (device.flops * self.compute)
        return total + (compute_s**4.0 + memory_s**4.0) ** 0.25


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """One kernel over prefill chunks and, in a mixed batch, decodes too.

    A decode has a tile of its own for each query head, or for each KV head when the kernel packs the query heads that
    share one. FlashAttention-2 over paged KV does not pack and computes 64 rows a tile (`run_mha_fwd_splitkv_dispatch`,
    kBlockM "fixed for all head dimensions"), whatever the accelerator; FlashAttention-3 packs whenever lengths vary
    (`should_pack_gqa`) and computes 128 rows. Packing is what decodes lose in a mixed batch: alone, both pack.
    """

    overhead_s: float
    compute: float  # share of the peak rate
    tile_rows: float  # query rows that a tile computes, wanted or not
    depth_s: float  # latency of one position along the longest context
    sharpness: float
    memory: Memory
    decode_rows: float  # query rows computed for a decode inside a mixed batch
    decode_item_s: float  # cost of each decode and query head inside a mixed batch
    packs_groups: bool  # query heads that share a KV head share its tile
    decode_share: float = 0.93  # of the bandwidth that decodes inside a mixed batch draw
    decode_sharpness: float = 5.0  # how sharply their compute and memory times overlap
    cache_use: float = 1.1  # multiple of the cache up to which one KV head's contexts stay in it
    triangle: float = 0.5  # share of the chunk's own square that is computed: 0.5 skips all of the future, 1 nothing

    def positions(self, tokens: Numeric, context: Numeric) -> Numeric:
        """Query-key pairs that a causal chunk computes, whole tiles counted."""
        return maximum(tokens, self.tile_rows) * (context + self.triangle * tokens + self.tile_rows / 2.0)

    def decode_positions(self, contexts: Numeric, heads: Heads) -> Numeric:
        """Query-key pairs that decodes of that total context compute inside a mixed batch."""
        share = heads.kv / heads.query if self.packs_groups else 1.0
        return self.decode_rows * share * contexts

    def decode_reads(self, count: Numeric, contexts: Numeric, heads: Heads, device: Device) -> Numeric:
        """How often a mixed batch reads its decodes' KV from memory: 1, up to the query heads of a KV head.

        Tiles start head by head, all sequences of one head before the next. Query heads of one KV head that run at the
        same time read its KV once, and so do later ones as long as the cache holds it. With n sequences and room for w
        tiles, w/n heads run at a time: the KV is read ⌈g·n/w⌉ times, g at most, where n contexts of one KV head exceed
        the cache. This follows from the mixed rows of LLMServingSim's tables: 128 contexts of 4096 and more draw a
        fourth of the bandwidth on 128 units (g = 4), a third and a sixth on 188 (g = 4 and 8), 64 contexts a half; and
        one read is enough where one head's contexts fit the 72 and 128 MiB of cache.
        """
        if self.packs_groups:
            return 1.0
        group = heads.query / heads.kv
        room = device.units * max(1.0, device.unit_memory_bytes // _TILE_BYTES)
        reads = minimum(group, maximum(1.0, -(-group * count // room)))
        held = self.cache_use * device.cache_bytes * heads.kv / (contexts * heads.kv_bytes + 1.0)
        return 1.0 + (reads - 1.0) / (1.0 + held**_CACHE_STEEPNESS)

    def decode_s(self, count: Numeric, contexts: Numeric, heads: Heads, device: Device) -> Numeric:
        """Seconds that `count` decodes of that total context add to a mixed batch."""
        compute_s = self.decode_positions(contexts, heads) * heads.flops / (device.flops * self.compute)
        moved = contexts * heads.kv_bytes * self.decode_reads(count, contexts, heads, device)
        memory_s = (moved + count * heads.query_bytes) / (device.bandwidth * self.decode_share)
        p = self.decode_sharpness
        # The greater of the two times is factored out: powers of both small times would vanish.
        greater = maximum(compute_s, memory_s) + _LEAST_S
        both = ((compute_s / greater) ** p + (memory_s / greater) ** p) ** (1.0 / p)
        return self.decode_item_s * count * heads.query + greater * both

    def time_s(
        self,
        positions: Numeric,
        moved: Numeric,
        longest: Numeric,
        heads: Heads,
        device: Device,
        decode_s: Numeric = 0.0,
    ) -> Numeric:
        """Seconds. `positions`, `moved`: of the chunks; `longest`: of all contexts; `decode_s`: what decodes add."""
        p = self.sharpness
        compute_s = positions * heads.flops / (device.flops * self.compute)
        memory_s = self.memory.time_s(moved, device)
        work_s = (compute_s**p + memory_s**p) ** (1.0 / p) + decode_s
        return self.overhead_s + (work_s**p + (self.depth_s * longest) ** p) ** (1.0 / p)


def smooth_max(a: float, b: float, sharpness: float) -> float:
    """(a^p + b^p)^(1/p) of two times: at least the greater, at most their sum; safe at any scale."""
    if a < b:
        a, b = b, a
    if b <= 0.0:
        return a
    return float(a * (1.0 + (b / a) ** sharpness) ** (1.0 / sharpness))
