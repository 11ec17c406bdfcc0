import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cost.library import Library
from shared.cost.replay import Limits, Outcome, Request, replay
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest

ROOMY = Limits(batched_tokens=2048, sequences=64, kv_tokens=1_000_000)


class Fixed(StepModel):
    """Every step takes a second for each hundred tokens, and one more."""

    def __init__(self) -> None:
        pass

    def step_time_s(self, batch: Batch) -> float:
        return 1.0 + batch.tokens / 100.0

    def decode_span_s(self, count: int, context_tokens: int, steps: int) -> float:
        return steps * (1.0 + count / 100.0)


def test_one_request_by_hand() -> None:
    # 150 prompt tokens in chunks of 100: 2.0 s and 1.5 s give the first token; each of three more takes 1.01 s.
    (outcome,) = replay(Fixed(), [Request(5.0, 150, 4)], Limits(100, 8, 1000))
    assert outcome.ttft_s == pytest.approx(3.5)
    assert outcome.tpot_s == pytest.approx(1.01)
    assert outcome.jct_s == pytest.approx(3.5 + 3 * 1.01)


def test_decodes_go_before_new_prompts_in_one_budget() -> None:
    first, second = replay(Fixed(), [Request(0.0, 99, 3), Request(0.5, 99, 1)], Limits(100, 8, 1000))
    # Step 1: 99 tokens of the first. Step 2: its decode and 99 of the second. Step 3: the first's last token.
    assert first.ttft_s == pytest.approx(1.99)
    assert second.ttft_s == pytest.approx(1.99 + 2.0 - 0.5)
    assert first.jct_s == pytest.approx(1.99 + 2.0 + 1.01)


def test_prefill_first_makes_decodes_wait() -> None:
    limits = Limits(100, 8, 1000, prefill_first=True)
    first, second = replay(Fixed(), [Request(0.0, 99, 3), Request(0.5, 99, 1)], limits)
    assert second.ttft_s == pytest.approx(1.99 + 1.99 - 0.5)
    assert first.jct_s == pytest.approx(1.99 + 1.99 + 2 * 1.01)


def test_a_preempted_request_is_computed_again() -> None:
    # Room for 12 blocks of 16. Both grow; the younger gives way and recomputes prompt and output so far.
    requests = [Request(0.0, 80, 40), Request(0.0, 80, 40)]
    tight, roomy = (replay(Fixed(), requests, Limits(2048, 8, kv)) for kv in (192, 10_000))
    assert tight[0].jct_s < tight[1].jct_s
    assert tight[1].jct_s > roomy[1].jct_s


def test_reserving_the_output_never_preempts() -> None:
    requests = [Request(0.0, 80, 40), Request(0.0, 80, 40)]
    first, second = replay(Fixed(), requests, Limits(2048, 8, 192, reserves_output=True))
    alone = replay(Fixed(), requests[:1], ROOMY)[0]
    assert first == alone
    assert second.ttft_s == pytest.approx(first.jct_s + alone.ttft_s)


def test_a_prompt_that_never_fits_beside_a_decode_waits_for_it() -> None:
    # The second's chunks push it out again and again; the first must go on decoding all the same.
    requests = [Request(0.0, 32, 100), Request(0.5, 150, 2)]
    first, second = replay(Fixed(), requests, Limits(100, 8, 192, prefill_first=True))
    assert first.jct_s < second.jct_s < 1000.0


def test_a_closed_loop_keeps_its_concurrency() -> None:
    outcomes = replay(Fixed(), [Request(0.0, 100, 10)] * 6, ROOMY, concurrency=2)
    assert len(outcomes) == 6
    assert max(outcome.ttft_s for outcome in outcomes) < 2 * min(outcome.ttft_s for outcome in outcomes)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 600), st.integers(1, 80)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(45, 200),
    st.booleans(),
    st.booleans(),
)
def test_gliding_gives_what_stepping_gives(
    library: Library, shape: list[tuple[float, int, int]], sequences: int, blocks: int, reserves: bool, first: bool
) -> None:
    model = library.step_model("A10", "Llama-3-8B")
    requests = [Request(*each) for each in shape]
    limits = Limits(256, sequences, 16 * blocks + 7, reserves_output=reserves, prefill_first=first)
    glided = replay(model, requests, limits)
    stepped = replay(model, requests, limits, stepwise=True)
    for one, other in zip(glided, stepped, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, rel=1e-9)
        assert one.jct_s == pytest.approx(other.jct_s, rel=1e-9)


def test_outcomes_keep_the_order_of_requests() -> None:
    outcomes = replay(Fixed(), [Request(9.0, 10, 1), Request(0.0, 10, 1)], ROOMY)
    assert outcomes[0] == Outcome(pytest.approx(1.1), 0.0, pytest.approx(1.1))


@pytest.mark.parametrize(
    ("request_", "said"),
    [(Request(0, 0, 5), "request 0: lengths"), (Request(0, 900, 200), "needs more than the KV capacity of 1000")],
)
def test_bad_requests_are_named(request_: Request, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        replay(Fixed(), [request_], Limits(100, 8, 1000))
