import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.attention import DecodeAttention, Heads, VarlenAttention
from shared.cost.operators import Device, Memory

DEVICE = Device(flops=100e12, bandwidth=1e12, units=100)
HEADS = Heads(query=32, kv=8, flops=4.0 * 32 * 128, kv_bytes=4096.0, query_bytes=4.0 * 32 * 128)
DECODE = DecodeAttention(
    overhead_s=10e-6, long_s=2e-6, grouped_s=1e-6, depth_s=1e-9, depth_tokens=1000.0, depth_items=1e12, item_s=20e-9,
    splits=1000.0, ungrouped_splits=1.0, compute=1.0, memory=Memory(0.5, 0.5, 1e6),
)  # fmt: skip
VARLEN = VarlenAttention(
    overhead_s=5e-6, compute=0.5, tile_rows=64.0, depth_s=0.0, sharpness=1.0, memory=Memory(0.5, 0.5, 1e6),
    decode_rows=64.0, decode_item_s=0.0, packs_groups=False,
)  # fmt: skip


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
    got = VARLEN.time_s(pairs, moved, 1500, 0, HEADS, DEVICE)
    assert got == pytest.approx(5e-6 + pairs * HEADS.flops / 50e12 + moved / 0.5e12)


def test_short_chunks_pay_for_a_whole_tile() -> None:
    assert VARLEN.positions(1, 1000, max) == 64 * (1000 + 0.5 + 32)


def test_decodes_in_a_mixed_batch() -> None:
    assert VARLEN.decode_positions(1000.0, HEADS) == 64_000
    packed = VarlenAttention(5e-6, 0.5, 64.0, 0.0, 1.0, Memory(0.5, 0.5, 1e6), 64.0, 0.0, packs_groups=True)
    assert packed.decode_positions(1000.0, HEADS) == 16_000  # four query heads share a KV head's tile


def test_a_cache_that_is_too_small_costs_one_read_for_each_query_head() -> None:
    small = VarlenAttention(5e-6, 0.5, 64.0, 0.0, 1.0, Memory(0.5, 0.5, 1e6), 64.0, 0.0, False, group_cache_bytes=1e6)
    assert small.decode_bytes(10.0, HEADS) == pytest.approx(10 * 4096)
    assert small.decode_bytes(1e6, HEADS) == pytest.approx(4 * 1e6 * 4096, rel=1e-3)


@given(st.integers(1, 4000), st.integers(0, 20_000), st.integers(1, 1000))
def test_positions_grow_with_tokens_and_context(tokens: int, context: int, more: int) -> None:
    base = VARLEN.positions(tokens, context, max)
    assert VARLEN.positions(tokens + more, context, max) > base
    assert VARLEN.positions(tokens, context + more, max) > base
