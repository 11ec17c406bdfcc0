from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.job import JobView, LengthPrediction, Slo
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.answers import within
from shared.policy.estimate import DecodeSide, JobContext
from shared.policy.step_budget import FLOOR_TOKENS, MARGIN, StepLoad, gap_target_s, prefill_tokens
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


@pytest.mark.parametrize(
    ("load", "known"),
    [(StepLoad(0, 0), rates()), (StepLoad(8, 100, 0.001), None), (StepLoad(8, 100), rates())],
    ids=["nobody decodes", "nothing is known", "no target"],
)
def test_without_a_reason_nothing_is_held_back(load: StepLoad, known: StepRates | None) -> None:
    assert prefill_tokens(known, load, 512) == 512


def test_the_tighter_of_the_mean_and_the_gap_target_counts() -> None:
    assert gap_target_s(Slo(tpot_s=0.1, itl_s=0.25)) == pytest.approx(0.15)
    assert gap_target_s(Slo(tpot_s=0.2, itl_s=0.25)) == 0.25


def test_prompts_always_get_on() -> None:
    assert prefill_tokens(rates(), StepLoad(8, 100, 0.001), 512) == FLOOR_TOKENS
    assert prefill_tokens(rates(), StepLoad(8, 100, 0.001), 5) == 5


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


@given(st.integers(1, 50), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_tighter_target_never_gives_more(decodes: int, one_s: float, other_s: float) -> None:
    tight, wide = (prefill_tokens(rates(), StepLoad(decodes, 0, s), 512) for s in sorted((one_s, other_s)))
    assert tight <= wide
    assert wide <= prefill_tokens(rates(), StepLoad(decodes, 0, inf), 512)


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
