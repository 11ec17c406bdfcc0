"""Times of operators, by hand and by what must hold."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cost.library import Library
from shared.cost.operators import (
    Collective,
    DecodeAttention,
    Device,
    Elementwise,
    Gemm,
    Heads,
    Memory,
    Mlp,
    Quantisation,
    VarlenAttention,
    smooth_max,
)

DEVICE = Device(flops=100e12, bandwidth=1e12, units=100)
FLAT = Memory(share=0.5, cache_share=0.5, cache_bytes=1e6)
PLAIN = Gemm(1e-6, 0.5, 0.0, 0.0, 1.0, 12.0, FLAT, FLAT)  # half of the peak, tiles of all sizes alike


def test_a_memory_bound_product_by_hand() -> None:
    # One row: 2 · 4096 · 4096 bytes of weights at 0.5 TB/s, and the vectors.
    moved = 2 * 4096 * 4096 + 2 * 4096 + 2 * 4096
    assert PLAIN.time_s(1.0, 4096, 4096, 2.0, DEVICE) == pytest.approx(1e-6 + moved / 0.5e12, rel=1e-3)


def test_a_compute_bound_product_by_hand() -> None:
    # 4096 × 4096 in tiles of 128 × 128: 1024 tiles are 11 waves of 100 units. Larger tiles waste more of their last
    # wave (512 tiles: 6 waves of twice the work), and smaller ones are slow here.
    waves = 11 * 2 * 128 * 128 * 4096 / (0.5 * 1e12)
    got = replace(PLAIN, tile_penalty=3.0).time_s(4096.0, 4096, 4096, 2.0, DEVICE)
    assert got == pytest.approx(1e-6 + waves, rel=1e-3)
    # Where small tiles cost nothing, hardly any wave is wasted.
    assert PLAIN.time_s(4096.0, 4096, 4096, 2.0, DEVICE) == pytest.approx(2 * 4096**3 / 50e12, rel=0.01)


def test_experts_pad_each_their_own_tiles() -> None:
    apart = PLAIN.time_s(64.0, 1024, 1024, 2.0, DEVICE, count=16.0)
    together = PLAIN.time_s(64.0, 1024, 1024, 2.0, DEVICE)
    assert apart > together  # sixteen weight matrices to read


def test_memory_cold_gains_nothing_from_the_cache() -> None:
    cached = Memory(share=0.5, cache_share=2.0, cache_bytes=1e6)
    assert cached.time_s(1e4, DEVICE) == pytest.approx(1e4 / 2e12)
    assert cached.time_s(1e4, DEVICE, cold=True) == pytest.approx(1e4 / 0.5e12)
    assert cached.time_s(1e9, DEVICE) == pytest.approx(1e9 / 0.5e12)
    slow_when_small = Memory(share=0.8, cache_share=0.6, cache_bytes=1e6)
    assert slow_when_small.time_s(1e4, DEVICE, cold=True) == pytest.approx(1e4 / 0.6e12)


@given(st.floats(1.0, 1e12), st.floats(1.0, 1.5), st.floats(0.65, 8.0))
def test_more_bytes_take_longer(moved: float, more: float, gain: float) -> None:
    memory = Memory(share=0.8, cache_share=0.8 * gain, cache_bytes=3e7)
    assert memory.time_s(moved * more, DEVICE) >= memory.time_s(moved, DEVICE) * (1 - 1e-9)


def test_numbers_and_arrays_agree() -> None:
    m = np.array([1.0, 7.0, 64.0, 1000.0])
    together = PLAIN.time_s(m, 4096, 1024, 2.0, DEVICE)
    assert together == pytest.approx([PLAIN.time_s(x, 4096, 1024, 2.0, DEVICE) for x in m])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8000), st.integers(1, 500), st.sampled_from(["A100", "H100", "L40S", "4090", "A40", "MI300X"]))
def test_more_rows_never_take_less(library: Library, rows: int, more: int, name: str) -> None:
    accelerator = library.catalogue.get(name)
    device = Device(accelerator.flops("bf16"), accelerator.bandwidth_bytes_s, accelerator.compute_units)
    gemm = library.efficiencies.for_device(accelerator.name).gemm_for("bf16")
    for n, k in ((4096, 4096), (28672, 4096), (1024, 8192)):
        less = gemm.time_s(float(rows), n, k, 2.0, device, cold=True)
        assert gemm.time_s(float(rows + more), n, k, 2.0, device, cold=True) >= less * (1 - 1e-9)


def test_all_reduce_by_hand() -> None:
    one = Collective(latency_s=4e-6, latency_rank_s=1e-6, share=0.25, ring_latency_s=50e-6, ring_share=0.5)
    # 8 ranks: 1.75 times the bytes cross a link. Small: direct. Large: the ring is faster.
    assert one.all_reduce_s(1e4, 8.0, 100e9) == pytest.approx(12e-6 + 1.75e4 / 25e9)
    assert one.all_reduce_s(1e8, 8.0, 100e9) == pytest.approx(50e-6 + 1.75e8 / 50e9)
    contended = replace(one, contention=1.0)
    assert contended.all_reduce_s(1e8, 8.0, 100e9) == pytest.approx(50e-6 + 4 * 1.75e8 / 50e9)
    assert contended.all_reduce_s(1e8, 2.0, 100e9) == one.all_reduce_s(1e8, 2.0, 100e9)
    # Gathering and scattering are two rings, each of half the traffic.
    assert one.gather_scatter_s(1e8, 8.0, 100e9) == pytest.approx(2 * 50e-6 + 1.75e8 / 50e9)


def test_quantisation_that_cannot_be_fused_is_one_more_kernel_of_the_engine() -> None:
    quantisation = Quantisation(1e-5, 1e-9, 1.0, 4.0, 2.0)
    fused, apart = (replace(PLAIN, quantisation=replace(quantisation, fused=one)) for one in (True, False))
    times = [float(gemm.time_s(512.0, 4096.0, 4096.0, 1.0, DEVICE, cold=True)) for gemm in (PLAIN, fused, apart)]
    assert times[0] == times[1]
    work_s = float(quantisation.work_s(512.0, 4096.0, DEVICE.units))
    assert times[2] - times[0] == pytest.approx(PLAIN.overhead_s + work_s)
    assert quantisation.time_s(512.0, 4096.0, DEVICE.units) == pytest.approx(1e-5 + work_s)
    warm_s = float(fused.time_s(512.0, 4096.0, 4096.0, 1.0, DEVICE))
    assert warm_s > times[1] + 1e-5  # by itself it is paid


def test_mlp_is_its_parts() -> None:
    activation = Elementwise(2e-6, FLAT)
    mlp = Mlp(PLAIN, activation)
    first = PLAIN.time_s(8.0, 512, 128, 2.0, DEVICE)
    second = PLAIN.time_s(8.0, 128, 256, 2.0, DEVICE)
    assert mlp.time_s(8.0, 512, 256, 128, 2.0, DEVICE) == pytest.approx(
        first + second + activation.time_s(8.0 * (512 + 256) * 2.0, DEVICE)
    )


HEADS = Heads(query=32, kv=8, flops=4.0 * 32 * 128, kv_bytes=4096.0, query_bytes=4.0 * 32 * 128)
DECODE = DecodeAttention(
    overhead_s=10e-6,
    long_s=2e-6,
    grouped_s=1e-6,
    depth_s=1e-9,
    depth_tokens=1000.0,
    depth_items=1e12,
    item_s=20e-9,
    splits=1000.0,
    ungrouped_splits=1.0,
    compute=1.0,
    memory=Memory(0.5, 0.5, 1e6),
)
VARLEN = VarlenAttention(
    overhead_s=5e-6,
    compute=0.5,
    tile_rows=64.0,
    depth_s=0.0,
    sharpness=1.0,
    memory=Memory(0.5, 0.5, 1e6),
    decode_rows=64.0,
    decode_item_s=0.0,
    packs_groups=False,
)
PACKED = replace(VARLEN, packs_groups=True)


def test_decode_by_hand() -> None:
    # 16 sequences of 2000: 128 items (28 beyond the units), all units busy, KV at 0.5 TB/s, latency capped at 1000.
    expected = 10e-6 + 2e-6 + 1e-6 + 28 * 20e-9 + 1000 * 1e-9 + (16 * 2000 * 4096 + 16 * 16384) / 0.5e12
    assert DECODE.time_s(np.array([16.0]), np.array([2000.0]), HEADS, DEVICE)[0] == pytest.approx(expected, rel=1e-3)


def test_few_heads_leave_units_idle() -> None:
    one = Heads(query=1, kv=1, flops=512.0, kv_bytes=512.0, query_bytes=512.0)
    assert DECODE.busy(10, one, DEVICE) == pytest.approx(0.1)
    assert DECODE.busy(1000, one, DEVICE) == 1.0


@given(st.integers(1, 500), st.integers(1, 20_000), st.integers(0, 5_000))
def test_longer_contexts_and_more_sequences_take_longer(count: int, context: int, more: int) -> None:
    def time(n: int, c: int) -> float:
        return float(DECODE.time_s(np.array([float(n)]), np.array([float(c)]), HEADS, DEVICE)[0])

    assert time(count, context + more) >= time(count, context)
    assert time(count + 1, context) >= time(count, context) * (1 - 1e-9)


def test_prefill_by_hand() -> None:
    # 1000 tokens after 500: 1000 · (500 + 500 + 32) pairs of 16384 operations at 50 TFLOPS; KV and queries at 0.5 TB/s.
    pairs = VARLEN.positions(1000, 500)
    assert pairs == 1000 * (500 + 500 + 32)
    moved = 1500 * 4096.0 + 1000 * HEADS.query_bytes
    got = VARLEN.time_s(pairs, moved, 1500, HEADS, DEVICE)
    assert got == pytest.approx(5e-6 + pairs * HEADS.flops / 50e12 + moved / 0.5e12)
    assert VARLEN.positions(1, 1000) == 64 * (1000 + 0.5 + 32)  # a short chunk pays for a whole tile


def test_decodes_in_a_mixed_batch() -> None:
    assert VARLEN.decode_positions(1000.0, HEADS) == 64_000
    assert PACKED.decode_positions(1000.0, HEADS) == 16_000  # four query heads share a KV head's tile


def reads(count: float, contexts: float, device: Device = DEVICE, kernel: VarlenAttention = VARLEN) -> float:
    return float(kernel.decode_reads(count, contexts, HEADS, device))


def test_query_heads_that_run_at_a_time_share_a_read() -> None:
    # 100 tiles at a time, four query heads to a KV head, no cache: of 20 sequences all four heads run at a time, of 40
    # two and a half (the third waits), of 60 less than two.
    assert [reads(count, count * 1e4) for count in (1, 25, 26, 50, 60, 75, 76, 500)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert reads(500, 5e6, kernel=PACKED) == 1.0


def test_more_shared_memory_runs_more_tiles() -> None:
    # A tile takes 80 KiB: an A100 has room for two on a unit, an A10 for one.
    roomy = replace(DEVICE, unit_memory_bytes=164 * 1024.0)
    small = replace(DEVICE, unit_memory_bytes=100 * 1024.0)
    assert [reads(50, 5e5, device) for device in (DEVICE, small, roomy)] == [2.0, 2.0, 1.0]


def test_contexts_that_fit_the_cache_are_read_once() -> None:
    cached = replace(DEVICE, cache_bytes=50e6)  # one KV head's position takes 512 bytes
    assert reads(200, 20_000, cached) == pytest.approx(1.0, abs=0.01)
    assert 2.0 < reads(200, 107_000, cached) < 3.0
    assert reads(200, 1_000_000, cached) == pytest.approx(4.0, abs=0.01)


def test_decodes_in_a_mixed_batch_by_hand() -> None:
    # 200 decodes of 5000: 64 rows a query head at 50 TFLOPS against four reads at 0.93 TB/s.
    compute, memory = 64 * 1e6 * HEADS.flops / 50e12, (4 * 1e6 * 4096 + 200 * HEADS.query_bytes) / 0.93e12
    got = VARLEN.decode_s(200, 1e6, HEADS, DEVICE)
    assert got == pytest.approx((compute**5 + memory**5) ** 0.2, rel=1e-6)
    alone = VARLEN.time_s(VARLEN.positions(16, 0), 0.0, 16, HEADS, DEVICE)
    assert VARLEN.time_s(VARLEN.positions(16, 0), 0.0, 16, HEADS, DEVICE, got) == pytest.approx(alone + got)


@given(st.integers(1, 500), st.integers(1, 20_000), st.integers(0, 5_000), st.sampled_from([0.0, 6e6, 1e8]))
def test_more_decodes_take_longer_in_a_mixed_batch(count: int, mean: int, more: int, cache: float) -> None:
    device = replace(DEVICE, cache_bytes=cache)

    def time(n: int, c: int) -> float:
        return float(VARLEN.decode_s(n, n * c, HEADS, device))

    assert time(count, mean + more) >= time(count, mean)
    assert time(count + 1, mean) > time(count, mean)


@given(st.integers(1, 4000), st.integers(0, 20_000), st.integers(1, 1000))
def test_positions_grow_with_tokens_and_context(tokens: int, context: int, more: int) -> None:
    base = VARLEN.positions(tokens, context)
    assert VARLEN.positions(tokens + more, context) > base
    assert VARLEN.positions(tokens, context + more) > base


TIMES = st.floats(1e-12, 1e6)
SHARPNESS = st.floats(1.0, 12.0)


@given(TIMES, TIMES, SHARPNESS)
def test_smooth_maximum(a: float, b: float, p: float) -> None:
    got = smooth_max(a, b, p)
    assert max(a, b) * (1 - 1e-12) <= got <= (a + b) * (1 + 1e-12)
    assert got == pytest.approx(smooth_max(b, a, p))
    assert smooth_max(a, b, p + 1.0) <= got * (1 + 1e-12)


def test_smooth_maximum_by_hand() -> None:
    assert [smooth_max(3.0, 4.0, p) for p in (2.0, 1.0)] == pytest.approx([5.0, 7.0])
    assert smooth_max(0.0, 2.0, 3.0) == 2.0
