import pytest

from shared.cost.library import Library
from shared.cost.linear import (
    chunked_of,
    fit_chunked,
    fit_huawei,
    fit_partial_prefill,
    huawei_of,
    partial_prefill_of,
    rates_of,
    saturation_tokens,
)
from shared.cost.step import Batch
from shared.domain.rates import HuaweiCost
from shared.errors import InvalidRequest

TRUE = HuaweiCost(1e-5, 2e-4, 3e-6, 4e-3, 5e-8, 6e-5, 7e-7, 8e-3)
GRID = [(b, n) for b in (2, 4, 8, 16) for n in (128, 512, 2048)]


def test_huawei_sums_its_iterations() -> None:
    by_hand = sum(TRUE.decode_step_s(8, 512 + k) for k in range(1, 101))
    assert TRUE.decode_s(8, 512, 100) == pytest.approx(by_hand)


def test_huawei_recovers_its_coefficients() -> None:
    fitted = fit_huawei(
        [(b, n, TRUE.prefill_s(b, n)) for b, n in GRID], [(b, n, TRUE.decode_step_s(b, n)) for b, n in GRID]
    )
    for name in HuaweiCost.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)


def test_cronus_recovers_its_coefficients() -> None:
    partial = fit_partial_prefill([(n, 6e-5 * n + 7e-3) for n in (64, 256, 1024)])
    assert (partial.k_p, partial.b_p) == (pytest.approx(6e-5), pytest.approx(7e-3))
    chunked = fit_chunked([(c, d, 1e-6 * c + 2e-7 * d + 0.04) for c in (0, 1000, 4000) for d in (0, 10_000, 90_000)])
    assert (chunked.k_ctxp, chunked.k_ctxd, chunked.b_c) == (
        pytest.approx(1e-6),
        pytest.approx(2e-7),
        pytest.approx(0.04),
    )


def test_linear_costs_follow_the_step_model(library: Library) -> None:
    model = library.step_model("A100", "Llama-3-8B")
    huawei, partial, chunked = huawei_of(model), partial_prefill_of(model), chunked_of(model)
    assert huawei.decode_step_s(16, 1000) == pytest.approx(model.decode_time_s(16, 16_000), rel=0.1)
    assert huawei.prefill_s(8, 1024) == pytest.approx(model.step_time_s(Batch(((1024, 0),) * 8)), rel=0.1)
    assert partial.time_s(1024) == pytest.approx(model.prefill_time_s(1024), rel=0.1)
    step = model.step_time_s(Batch(((448, 2000),), 64, 64_000))
    assert chunked.time_s(2000, 64_000) == pytest.approx(step, rel=0.15)


def test_rates_are_of_steps_within_the_budget(library: Library) -> None:
    model = library.step_model("A10", "Llama-3-8B")
    rates = rates_of(model, 256, price_per_hour=1.5, weight=2.0)
    assert (rates.price_per_hour, rates.weight) == (1.5, 2.0)
    assert rates.prefill == partial_prefill_of(model, chunk=256)
    assert rates.chunked == chunked_of(model, 256)
    assert rates.batch == huawei_of(model)
    assert rates.prefill is not None
    in_chunks = sum(model.prefill_time_s(256, done) for done in range(0, 1024, 256))
    assert rates.prefill.time_s(1024) == pytest.approx(in_chunks, rel=0.1)
    assert rates.prefill.time_s(1024) > partial_prefill_of(model).time_s(1024)


def test_saturation_of_a_flat_then_linear_cost() -> None:
    assert saturation_tokens(lambda n: max(1.0, n / 500.0)) == 512
    assert saturation_tokens(lambda n: 1.0 + n / 1000.0, share=0.5, most=4096) == 1024


def test_the_papers_chunk_size(library: Library) -> None:
    # TetriInfer: 512 tokens saturate OPT-13B on V100s.
    model = library.step_model("V100", "OPT-13B", 2)
    assert saturation_tokens(model.prefill_time_s) == 512


def test_samples_that_cannot_tell_the_coefficients() -> None:
    with pytest.raises(InvalidRequest, match="1 samples are too few for 2 coefficients"):
        fit_partial_prefill([(10, 1.0)])
    with pytest.raises(InvalidRequest, match="do not vary enough"):
        fit_partial_prefill([(10, 1.0), (10, 1.1), (10, 1.2)])
    with pytest.raises(InvalidRequest, match="positive and finite"):
        fit_partial_prefill([(10, 1.0), (20, 0.0)])
