"""Prompt tokens of a step: the budget beside decodes, and the chunk size that saturates an instance."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.library import Library
from shared.cost.step_rates import step_rates_of
from shared.domain.job import JobView, LengthPrediction, Slo
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.estimate import DecodeSide, JobContext
from shared.policy.output_lengths import within
from shared.policy.step_budget import (
    FLOOR_TOKENS,
    LEARNED_STEPS,
    MARGIN,
    ChunkBounds,
    StepLoad,
    chunk_tokens,
    gap_target_s,
    joining_gap_s,
    next_chunk_tokens,
    prefill_tokens,
    saturating_tokens,
)
from tests.shared.policy.views import decode

NOTHING = StepForm(0.0)


def rates(fixed_s: float = 0.010, token_s: float = 0.0005, position_s: float = 0.0) -> StepRates:
    mixed = StepForm(fixed_s, token_s, position_s, sequence_s=0.001, context_s=1e-6)
    return StepRates(NOTHING, NOTHING, mixed)


def test_by_example() -> None:
    # 90 ms less 10, 8 for the decodes and 2 for their contexts leave 70 ms: 140 tokens of half a millisecond.
    assert prefill_tokens(rates(), StepLoad(8, 2_000, 0.1501), 512) == 140
    # 70 ms = x · 0.5 ms + 2 us · x · (1000 + x/2): x² · 1e-6 + x · 2.5e-3 − 0.07 = 0.
    assert prefill_tokens(rates(position_s=2e-6), StepLoad(8, 2_000, 0.1501, 1_000), 512) == FLOOR_TOKENS
    assert prefill_tokens(rates(position_s=2e-7), StepLoad(8, 2_000, 0.1501, 1_000), 512) == 98
    assert prefill_tokens(rates(), StepLoad(8, 100, 0.001), 512) == FLOOR_TOKENS
    assert prefill_tokens(rates(), StepLoad(8, 100, 0.001), 5) == 5
    for load, known in ((StepLoad(0, 0), rates()), (StepLoad(8, 100, 0.001), None), (StepLoad(8, 100), rates())):
        assert prefill_tokens(known, load, 512) == 512
    assert gap_target_s(Slo(tpot_s=0.1, itl_s=0.25)) == pytest.approx(0.15)
    assert gap_target_s(Slo(tpot_s=0.2, itl_s=0.25)) == 0.25
    assert gap_target_s(Slo(tpot_s=0.02, itl_s=0.25), 3.0) == pytest.approx(0.09)  # for the three tokens of a step
    assert gap_target_s(Slo(tpot_s=0.1, itl_s=0.25), 3.0) == 0.25
    for here, gap_s in ((True, 0.15), (False, 0.075)):
        assert joining_gap_s(Slo(tpot_s=0.2, itl_s=0.25), 0.1, here=here) == pytest.approx(gap_s)


@given(
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.01),
    st.floats(0.0, 1e-4),
    st.integers(1, 200),
    st.integers(0, 10**6),
    st.integers(0, 10_000),
    st.floats(0.001, 10.0),
)
def test_it_is_the_most_that_keeps_the_predicted_step_within_the_target(
    fixed_s: float, token_s: float, position_s: float, decodes: int, context: int, before: int, tpot_s: float
) -> None:
    known, most = rates(fixed_s, token_s, position_s), 2_048
    tokens = prefill_tokens(known, StepLoad(decodes, context, tpot_s, before), most)
    assert FLOOR_TOKENS <= tokens <= most

    def takes_s(count: int) -> float:
        return known.mixed_s(count, before, decodes, context)

    if tokens > FLOOR_TOKENS:
        assert takes_s(tokens) <= MARGIN * tpot_s * (1 + 1e-9)
    if tokens < most:
        assert takes_s(tokens + 1) > MARGIN * tpot_s * (1 - 1e-9)


def test_an_estimate_counts_with_the_steps_that_targets_allow() -> None:
    form = StepForm(0.02, 1e-4, sequence_s=1e-4)
    known = Rates(step=StepRates(form, StepForm(0.02, sequence_s=1e-4), form))
    busy = decode("d", rates=known, chunk_size=2048, decoding=50, running=50, prefill_share=1.0, total_blocks=10_000)
    asks, usual = (
        JobView("j", 4_000, 100, Slo("default", 2.0, 0.1)),
        within(LengthPrediction(0, 100, 100, 1.0, "classifier")),
    )
    whole, limited = (
        DecodeSide(busy, JobContext(asks, usual, usual, others=asks.slo, limited=each)) for each in (False, True)
    )
    assert whole.budget == 1_998
    assert limited.budget == pytest.approx(MARGIN * 0.15 / 1e-4 - 250, abs=1)  # 25 ms are there anyhow
    assert whole.after_s + whole.beside_s > 0.2 > 0.1 > limited.after_s + limited.beside_s
    assert limited.terms(0).rest_s > whole.terms(0).rest_s, "in more steps"


BOUNDS = ChunkBounds(128, 2048, 32)


def form(fixed_s: float, token_s: float, position_s: float = 0.0, steps: int = LEARNED_STEPS) -> StepForm:
    return StepForm(fixed_s, token_s, position_s, steps=steps)


def test_chunk_by_example() -> None:
    # 10 ms and 0.1 ms a token: nine tenths of 10,000 tokens/s are reached by 900 tokens in 100 ms.
    assert saturating_tokens(form(0.01, 1e-4)) == pytest.approx(900)
    assert saturating_tokens(form(0.01, 1e-4), share=0.5) == pytest.approx(100)
    # Attention makes the best throughput less, so that fewer tokens come near it: the best are 1,000 tokens in 10 ms
    # + 100 ms + 10 ms, 8,333 tokens/s, of which 480 in 10 + 48 + 2.3 ms reach 7,959 or 0.955.
    assert saturating_tokens(form(0.01, 1e-4, 2e-8), share=0.955) == pytest.approx(480, rel=0.01)


def test_where_nothing_is_to_be_gained_and_where_more_always_gains() -> None:
    assert saturating_tokens(form(0.0, 1e-4)) == 0.0
    assert saturating_tokens(form(0.01, 0.0)) == inf
    assert chunk_tokens(form(0.0, 1e-4), BOUNDS) == 128
    assert chunk_tokens(form(0.01, 0.0), BOUNDS) == 2048


def test_it_is_a_number_of_blocks_within_its_bounds() -> None:
    assert chunk_tokens(form(0.01, 1e-4), BOUNDS) == 928
    assert chunk_tokens(form(0.01, 1e-4), ChunkBounds(1000, 2048, 32)) == 1000
    assert chunk_tokens(form(0.01, 1e-4), ChunkBounds(128, 700, 32)) == 700
    assert ChunkBounds.for_seats(2048, 256, 16) == ChunkBounds(512, 2048, 16)
    assert ChunkBounds.for_seats(2048, 8, 16) == ChunkBounds(64, 2048, 16)
    assert ChunkBounds.for_seats(300, 256, 16) == ChunkBounds(300, 300, 16)


def test_it_stays_while_little_is_learned_or_little_would_change() -> None:
    assert next_chunk_tokens(512, form(0.01, 1e-4), BOUNDS) == 928
    assert next_chunk_tokens(512, form(0.01, 1e-4, steps=LEARNED_STEPS - 1), BOUNDS) == 512
    assert next_chunk_tokens(800, form(0.01, 1e-4), BOUNDS) == 800  # 928 are 16 % more
    assert next_chunk_tokens(1152, form(0.01, 1e-4), BOUNDS) == 1152  # and 19 % less
    assert next_chunk_tokens(1184, form(0.01, 1e-4), BOUNDS) == 928


@pytest.mark.parametrize(("accelerator", "model", "ranks"), [("V100", "OPT-13B", 2), ("A100-SXM-80", "Llama-3-8B", 1)])
def test_it_is_where_the_step_model_saturates(accelerator: str, model: str, ranks: int) -> None:
    # TetriInfer: 512 tokens saturate OPT-13B on V100s.
    steps = Library.built_in().step_model(accelerator, model, ranks)
    learned = step_rates_of(steps.step_time_s, BOUNDS.most).prefill
    assert chunk_tokens(learned, BOUNDS) == pytest.approx(512, rel=0.25)


@given(st.floats(1e-5, 1.0), st.floats(0.0, 1e-2), st.floats(1e-12, 1e-5), st.floats(0.1, 0.99))
def test_it_is_the_least_that_reaches_the_share(
    fixed_s: float, token_s: float, position_s: float, share: float
) -> None:
    def throughput(tokens: float) -> float:
        return tokens / (fixed_s + tokens * (token_s + position_s * tokens / 2.0))

    best = throughput((2.0 * fixed_s / position_s) ** 0.5)
    tokens = saturating_tokens(form(fixed_s, token_s, position_s), share)
    assert throughput(tokens) == pytest.approx(share * best, rel=1e-6)
    assert throughput(0.99 * tokens) < share * best
