import pytest

from shared.cost.geometry import kv_capacity_tokens, require_fit
from shared.cost.library import Library
from shared.errors import Incompatible


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


def test_a_model_that_does_not_fit_is_a_clear_error(library: Library) -> None:
    with pytest.raises(Incompatible, match=r"Llama-2-70B does not fit 1 x A100-SXM-80: weights of 138.0 GB in 76.5 GB"):
        require_fit(library.catalogue.get("A100"), library.geometry("Llama-2-70B"), 4096)


def test_a_request_too_long_for_the_cache(library: Library) -> None:
    card, model = library.catalogue.get("4090"), library.geometry("Llama-3.1-8B")
    assert require_fit(card, model, 32_768) > 32_768
    with pytest.raises(Incompatible, match=r"leave KV for 4\d+ tokens, and one request needs 131072"):
        require_fit(card, model, 131_072)


def test_smaller_precision_makes_room(library: Library) -> None:
    card, model = library.catalogue.get("H100"), library.geometry("Llama-3.1-70B")
    assert kv_capacity_tokens(card, model) < 0 < kv_capacity_tokens(card, model, dtype="int4")
    half = kv_capacity_tokens(card, model, dtype="int4")
    assert kv_capacity_tokens(card, model, dtype="int4", kv_dtype="fp8") == pytest.approx(2 * half, abs=1)
