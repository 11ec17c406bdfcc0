"""The chunk size that saturates an instance, by the form of its prefill steps."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.library import Library
from shared.cost.step_rates import step_rates_of
from shared.domain.rates import StepForm
from shared.policy.chunk_size import (
    LEARNED_STEPS,
    SHARE,
    ChunkBounds,
    chunk_tokens,
    next_chunk_tokens,
    saturating_tokens,
)

BOUNDS = ChunkBounds(128, 2048, 32)


def form(fixed_s: float, token_s: float, position_s: float = 0.0, steps: int = LEARNED_STEPS) -> StepForm:
    return StepForm(fixed_s, token_s, position_s, steps=steps)


def test_by_example() -> None:
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
    assert ChunkBounds.of(2048, 256, 16) == ChunkBounds(512, 2048, 16)
    assert ChunkBounds.of(2048, 8, 16) == ChunkBounds(64, 2048, 16)
    assert ChunkBounds.of(300, 256, 16) == ChunkBounds(300, 300, 16)


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


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(0.0, 1e-7), st.floats(0.2, 5.0))
def test_it_does_not_depend_on_how_fast_the_instance_is_at_the_moment(
    fixed_s: float, token_s: float, position_s: float, pace: float
) -> None:
    slow = form(fixed_s * pace, token_s * pace, position_s * pace)
    assert saturating_tokens(slow) == pytest.approx(saturating_tokens(form(fixed_s, token_s, position_s)), rel=1e-6)
    assert 0.0 < SHARE < 1.0
