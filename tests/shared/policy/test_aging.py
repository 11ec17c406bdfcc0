import pytest

from shared.domain.instance import Role
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.aging import MOST_S, prompt_token_s, share_left, with_progress
from shared.policy.estimate import DecodeSide, JobContext, PrefillSide, local, pair
from shared.policy.ledger import Assignment
from shared.policy.output_lengths import UNKNOWN_LENGTHS
from tests.shared.policy.views import index, instance, job

QUEUE = {"queued_prefill": 4, "queued_prefill_tokens": 4000, "time_s": 100.0}


def test_what_was_computed_since_the_load_is_not_left() -> None:
    view = instance("p", rate=1e-4, **QUEUE)
    assert prompt_token_s(view) == pytest.approx(1e-4)
    lefts = [share_left(view, now) for now in (100.0, 100.2, 100.45)]
    assert lefts == [1.0, pytest.approx(0.5), 0.0]


def test_an_instance_that_takes_no_time_has_nothing_left() -> None:
    nothing = StepForm(0.0)
    view = instance("p", rates=Rates(StepRates(nothing, nothing, nothing)), **QUEUE)
    assert prompt_token_s(view) == 0.0
    assert [share_left(view, now) for now in (100.0, 100.2)] == [1.0, 0.0]
    assert with_progress(view, 100.2) == (100.2, 4000)


@pytest.mark.parametrize("now", [0.0, 99.0, 100.0 + MOST_S + 0.01])
def test_a_queue_is_left_whole_where_its_age_is_not_known(now: float) -> None:
    assert share_left(instance("p", rate=1e-4, **QUEUE), now) == 1.0


def test_prompts_take_longer_beside_decodes() -> None:
    busy = {**QUEUE, "decoding": 64, "context_tokens": 64_000}
    alone, beside = instance("d", Role.DECODE, **QUEUE), instance("d", Role.DECODE, **busy)
    assert share_left(beside, 100.2) > share_left(alone, 100.2)


def test_what_is_booked_is_computed_behind_the_queue() -> None:
    now_index = index(instance("p", rate=1e-4, **QUEUE), instance("d", Role.DECODE))
    now_index.book(Assignment("p", 100.2, prefill_tokens=1000))
    view = now_index.prefill.get("p")
    assert view is not None
    assert view.load.queued_prefill_tokens == 5000, "decisions count the queue as it was reported"
    assert share_left(view, 100.2) * 5000 == pytest.approx(3000.0)
    assert share_left(view, 100.3) * 5000 == pytest.approx(2000.0)


def test_a_booking_on_an_idle_instance_is_not_older_than_itself() -> None:
    now_index = index(instance("p", rate=1e-4, time_s=100.0), instance("d", Role.DECODE))
    now_index.book(Assignment("p", 100.3, prefill_tokens=1000))
    view = now_index.prefill.get("p")
    assert view is not None
    assert share_left(view, 100.3) == 1.0
    assert share_left(view, 100.35) == pytest.approx(0.5)


def test_a_load_that_no_instance_has_reported_has_no_time() -> None:
    now_index = index(instance("p", rate=1e-4, time_s=0.0), instance("d", Role.DECODE))
    now_index.book(Assignment("p", 1e9, prefill_tokens=1000))
    view = now_index.prefill.get("p")
    assert view is not None
    assert view.load.time_s == 0.0


@pytest.mark.parametrize(("split", "shares"), [(1000, (1, 0)), (400, (1, 1)), (0, (0, 1))])
def test_a_prediction_counts_what_is_left_of_the_queues_on_its_way(split: int, shares: tuple[int, int]) -> None:
    one = job(1000, 50)
    context = JobContext(one, UNKNOWN_LENGTHS, UNKNOWN_LENGTHS, others=one.slo, now=100.1)
    prefill = PrefillSide(instance("p", rate=1e-4, **QUEUE))
    decode = DecodeSide(instance("d", Role.DECODE, rate=1e-4, **QUEUE), context)
    if split:
        option = pair(prefill, prefill.part(split, one.slo), decode, decode.terms(split))
    else:
        option = local(decode, decode.terms(0))
    gone_s = 0.25 * (shares[0] * prefill.wait_s + shares[1] * decode.wait_s)
    assert option.estimated.ttft_s == pytest.approx(option.ttft_s - gone_s)


def test_a_prompt_waits_for_the_step_under_way() -> None:
    idle = instance("d", Role.DECODE)
    busy = instance("d", Role.DECODE, decoding=8, context_tokens=8_000)
    one = job(100, 50)
    context = JobContext(one, UNKNOWN_LENGTHS, UNKNOWN_LENGTHS, others=one.slo)
    sides = [DecodeSide(view, context, mixed=share) for view, share in ((idle, 0.0), (busy, 0.0), (busy, 0.5))]
    lefts = [side.step_left_s for side in sides]
    assert lefts[:2] == [0.0, pytest.approx(sides[1].step_s / 2.0)]
    assert lefts[2] > lefts[1], "some steps compute prompts, too"
    assert [side.wait_s for side in sides] == [0.0, 0.0, 0.0], "decisions do not count it"
    options = [local(side, side.terms(0)) for side in sides]
    for option, left_s in zip(options, lefts, strict=True):
        assert option.estimated.ttft_s == pytest.approx(option.ttft_s + left_s)
