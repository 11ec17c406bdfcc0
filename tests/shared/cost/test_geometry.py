"""The shape of a model, and the KV that fits beside its weights."""

import pytest

from shared.cost.geometry import Matmul, kv_capacity_tokens
from shared.cost.library import Library, bundled_geometry


def test_flops_of_llama_3_8b_by_hand() -> None:
    g = bundled_geometry("Llama-3-8B")
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert g.matmul_flops_per_token() == 2 * 32 * layer


def test_quantised_weights_keep_embeddings_in_16_bits() -> None:
    g = bundled_geometry("Llama-3-8B")
    kept = 2 * 128256 * 4096
    assert g.weight_bytes(1.0) == (8_030_261_248 - kept) + 2 * kept
    assert g.weight_bytes(2.0) == 2 * 8_030_261_248


@pytest.mark.parametrize(("split", "shard"), [("column", (25, 64)), ("row", (100, 16)), ("none", (100, 64))])
def test_shards(split: str, shard: tuple[int, int]) -> None:
    assert Matmul("m", 100, 64, split).shard(4) == shard  # type: ignore[arg-type]


def test_huawei_eq_1_by_hand(library: Library) -> None:
    a100, llama = library.catalogue.get("A100"), library.geometry("Llama-3-8B")
    space = 2 * (0.9 * 79.2 * 2**30 - 2e9) - 2 * 8_030_261_248
    assert kv_capacity_tokens(a100, llama, tensor_parallel=2, reserve_bytes=2e9) == int(space // 131_072)


def test_a_measured_capacity(library: Library) -> None:
    # vLLM 0.19 on an RTX 4090 with Llama-3.1-8B, 32768 tokens at most: 41408 tokens of KV.
    tokens = kv_capacity_tokens(library.catalogue.get("4090"), library.geometry("Llama-3.1-8B"))
    assert tokens == pytest.approx(41_408, rel=0.03)


def test_ranks_that_outnumber_the_kv_heads_hold_copies(library: Library) -> None:
    a100, model = library.catalogue.get("A100"), library.geometry("Qwen2-7B")  # four KV heads
    four = kv_capacity_tokens(a100, model, tensor_parallel=4)
    eight = kv_capacity_tokens(a100, model, tensor_parallel=8)
    assert eight < 1.1 * four


def test_weights_that_do_not_fit_leave_less_than_nothing(library: Library) -> None:
    assert kv_capacity_tokens(library.catalogue.get("T4"), library.geometry("Llama-3-8B")) < 0


def test_smaller_precision_makes_room(library: Library) -> None:
    card, model = library.catalogue.get("H100"), library.geometry("Llama-3.1-70B")
    assert kv_capacity_tokens(card, model) < 0 < kv_capacity_tokens(card, model, dtype="int4")
    half = kv_capacity_tokens(card, model, dtype="int4")
    assert kv_capacity_tokens(card, model, dtype="int4", kv_dtype="fp8") == pytest.approx(2 * half, abs=1)
