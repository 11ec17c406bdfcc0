import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.geometry import Matmul, causal_positions
from shared.cost.library import bundled_geometry

LENGTHS = st.integers(1, 5000)


def test_flops_of_llama_3_8b_by_hand() -> None:
    g = bundled_geometry("Llama-3-8B")
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert g.matmul_flops_per_token() == 2 * 32 * layer
    # One token after 9 others: 10 positions, 32 layers, 32 heads of 128, two products of two operations each.
    assert g.attention_flops(1, 9) == 10 * 32 * 32 * 128 * 4
    assert g.decode_flops(9) == 2 * 32 * layer + g.attention_flops(1, 9) + 2 * 128256 * 4096


def test_step_bytes_of_llama_3_8b_by_hand() -> None:
    g = bundled_geometry("Llama-3-8B")
    weights = 8_030_261_248 - 128256 * 4096  # the input embedding is looked up, not read whole
    assert g.step_bytes(1, 1000) == 2 * weights + 1000 * 131_072


def test_a_mixture_reads_the_experts_that_its_tokens_touch() -> None:
    g = bundled_geometry("Mixtral-8x7B")
    one, many = g.step_bytes(1, 0), g.step_bytes(512, 0)
    expert = 3 * 4096 * 14336 * 32
    assert many - one == pytest.approx(6 * expert * 2, rel=1e-6)


def test_quantised_weights_keep_embeddings_in_16_bits() -> None:
    g = bundled_geometry("Llama-3-8B")
    kept = 2 * 128256 * 4096
    assert g.weight_bytes(1.0) == (8_030_261_248 - kept) + 2 * kept
    assert g.weight_bytes(2.0) == 2 * 8_030_261_248


@pytest.mark.parametrize(("split", "shard"), [("column", (25, 64)), ("row", (100, 16)), ("none", (100, 64))])
def test_shards(split: str, shard: tuple[int, int]) -> None:
    assert Matmul("m", 100, 64, split).shard(4) == shard  # type: ignore[arg-type]


@given(LENGTHS, LENGTHS, st.integers(0, 3000))
def test_causal_positions_are_a_sum_over_tokens(tokens: int, context: int, window: int) -> None:
    spans = (context + i + 1 for i in range(tokens))
    expected = sum(min(span, window) if window else span for span in spans)
    assert causal_positions(tokens, context, window) == expected


@given(LENGTHS, LENGTHS, st.integers(0, 5000))
def test_prefill_in_two_chunks_costs_the_same_flops(first: int, second: int, context: int) -> None:
    g = bundled_geometry("Gemma-2-9B")
    whole = g.attention_flops(first + second, context)
    parts = g.attention_flops(first, context) + g.attention_flops(second, context + first)
    assert whole == pytest.approx(parts)
