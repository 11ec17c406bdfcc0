from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.operators import DecodeAttention, Device, Heads, Memory, VarlenAttention

DEVICE = Device(flops=100e12, bandwidth=1e12, units=100)
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
    assert DECODE.busy(10, one, DEVICE, min, max) == pytest.approx(0.1)
    assert DECODE.busy(1000, one, DEVICE, min, max) == 1.0


@given(st.integers(1, 500), st.integers(1, 20_000), st.integers(0, 5_000))
def test_longer_contexts_and_more_sequences_take_longer(count: int, context: int, more: int) -> None:
    def time(n: int, c: int) -> float:
        return float(DECODE.time_s(np.array([float(n)]), np.array([float(c)]), HEADS, DEVICE)[0])

    assert time(count, context + more) >= time(count, context)
    assert time(count + 1, context) >= time(count, context) * (1 - 1e-9)


def test_prefill_by_hand() -> None:
    # 1000 tokens after 500: 1000 · (500 + 500 + 32) pairs of 16384 operations at 50 TFLOPS; KV and queries at 0.5 TB/s.
    pairs = VARLEN.positions(1000, 500, max)
    assert pairs == 1000 * (500 + 500 + 32)
    moved = 1500 * 4096.0 + 1000 * HEADS.query_bytes
    got = VARLEN.time_s(pairs, moved, 1500, HEADS, DEVICE)
    assert got == pytest.approx(5e-6 + pairs * HEADS.flops / 50e12 + moved / 0.5e12)


def test_short_chunks_pay_for_a_whole_tile() -> None:
    assert VARLEN.positions(1, 1000, max) == 64 * (1000 + 0.5 + 32)


def test_decodes_in_a_mixed_batch() -> None:
    assert VARLEN.decode_positions(1000.0, HEADS) == 64_000
    assert PACKED.decode_positions(1000.0, HEADS) == 16_000  # four query heads share a KV head's tile


def reads(count: float, contexts: float, device: Device = DEVICE, kernel: VarlenAttention = VARLEN) -> float:
    return float(kernel.decode_reads(count, contexts, HEADS, device, min, max))


def test_query_heads_that_run_at_a_time_share_a_read() -> None:
    # 100 tiles at a time, four query heads to a KV head, no cache: of 20 sequences all four heads run at a time, of 40
    # two and a half (the third waits), of 60 less than two.
    assert [reads(count, count * 1e4) for count in (1, 25, 26, 50, 60, 75, 76, 500)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert reads(500, 5e6, kernel=PACKED) == 1.0


def test_more_shared_memory_runs_more_tiles() -> None:
    # A tile takes 80 KiB: an A100 has room for two on a unit, an A10 for one.
    roomy = replace(DEVICE, unit_memory_bytes=164 * 1024.0)
    assert [reads(50, 5e5, device) for device in (DEVICE, replace(DEVICE, unit_memory_bytes=100 * 1024.0), roomy)] == [
        2.0,
        2.0,
        1.0,
    ]


def test_contexts_that_fit_the_cache_are_read_once() -> None:
    cached = replace(DEVICE, cache_bytes=50e6)  # one KV head's position takes 512 bytes
    assert reads(200, 20_000, cached) == pytest.approx(1.0, abs=0.01)
    assert 2.0 < reads(200, 107_000, cached) < 3.0
    assert reads(200, 1_000_000, cached) == pytest.approx(4.0, abs=0.01)


def test_decodes_in_a_mixed_batch_by_hand() -> None:
    # 200 decodes of 5000: 64 rows a query head at 50 TFLOPS against four reads at 0.93 TB/s.
    compute, memory = 64 * 1e6 * HEADS.flops / 50e12, (4 * 1e6 * 4096 + 200 * HEADS.query_bytes) / 0.93e12
    got = VARLEN.decode_s(200, 1e6, HEADS, DEVICE, min, max)
    assert got == pytest.approx((compute**5 + memory**5) ** 0.2, rel=1e-6)
    alone = VARLEN.time_s(VARLEN.positions(16, 0, max), 0.0, 16, HEADS, DEVICE)
    assert VARLEN.time_s(VARLEN.positions(16, 0, max), 0.0, 16, HEADS, DEVICE, got) == pytest.approx(alone + got)


@given(st.integers(1, 500), st.integers(1, 20_000), st.integers(0, 5_000), st.sampled_from([0.0, 6e6, 1e8]))
def test_more_decodes_take_longer_in_a_mixed_batch(count: int, mean: int, more: int, cache: float) -> None:
    device = replace(DEVICE, cache_bytes=cache)

    def time(n: int, c: int) -> float:
        return float(VARLEN.decode_s(n, n * c, HEADS, device, min, max))

    assert time(count, mean + more) >= time(count, mean)
    assert time(count + 1, mean) > time(count, mean)


@given(st.integers(1, 4000), st.integers(0, 20_000), st.integers(1, 1000))
def test_positions_grow_with_tokens_and_context(tokens: int, context: int, more: int) -> None:
    base = VARLEN.positions(tokens, context, max)
    assert VARLEN.positions(tokens + more, context, max) > base
    assert VARLEN.positions(tokens, context + more, max) > base
