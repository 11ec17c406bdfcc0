"""What a scheduler remembers: unfinished work, turns, lengths of answers, and room that is kept for held jobs."""

import heapq
from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView
from shared.domain.job import FirstTokenOut, JobView, LengthPrediction, Slo
from shared.domain.policies import PolicySet
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import InstanceRef, PolicySpec, Route, Work
from shared.errors import Delayed
from shared.policy import ledger as module
from shared.policy.decider import Decider
from shared.policy.decode_admission import ahead_of
from shared.policy.ledger import FORGET_S, KEEP_S, SETTLE_S, Claims, Rotation, WorkloadLedger, pair_key
from shared.policy.output_lengths import FIRST_TOKENS, RECENT, Lengths, OutputLengths, within
from shared.policy.overload import HOLD_LOOK_S
from tests.shared.policy.views import decode, job, predicted, score, tokens_at, view


def route(instance_id: str, work: float = 1.0, tokens: int = 10) -> Route:
    return Route(None, InstanceRef(instance_id, 1, ""), 0, "workload", work=Work(work, tokens))


def test_work_counts_until_its_job_ends_or_is_placed_again() -> None:
    ledger = WorkloadLedger()
    ledger.add(job(job_id="a"), route("d", 0.1, 5))
    ledger.add(job(job_id="b"), route("d", 0.2, 7))
    assert (score(ledger, "d"), tokens_at(ledger, "d")) == (pytest.approx(0.3), 12)
    ledger.add(job(job_id="a"), route("e", 4.0))
    assert (score(ledger, "d"), score(ledger, "e")) == (pytest.approx(0.2), 4.0)
    for job_id in ("a", "b", "unknown"):
        ledger.complete(job_id)
    assert (score(ledger, "d"), tokens_at(ledger, "d"), len(ledger)) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("age_s", "instance", "left"),
    [
        (0.5, decode("d", inflight=0), 1),  # on its way: no load shows it yet
        (SETTLE_S + 1, decode("d", inflight=1), 1),
        (SETTLE_S + 1, decode("d", inflight=0), 0),  # the instance has none: its end was reported elsewhere
        (0.5, decode("e", inflight=1), 0),  # the instance is gone
        (0.5, decode("d", state=InstanceState.DEAD, inflight=1), 0),
        (FORGET_S + 1, decode("d", inflight=1), 0),
    ],
)
def test_settling_forgets_what_cannot_be_there(age_s: float, instance: InstanceView, left: int) -> None:
    ledger = WorkloadLedger()
    ledger.add(job(job_id="a"), route("d"), 100.0)
    ledger.settle(view(instance), 100.0 + age_s)
    assert (len(ledger), score(ledger, "d") > 0) == (left, left > 0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 39), st.floats(1e-9, 1e9), st.integers(0, 10**6)), max_size=60)
)
def test_sums_return_to_zero(steps: list[tuple[int, int, float, int]]) -> None:
    ledger, open_jobs = WorkloadLedger(), set()
    for number, instance, work, tokens in steps:
        if number % 3 == 2:
            ledger.complete(f"j{number - 1}")
            open_jobs.discard(f"j{number - 1}")
        else:
            ledger.add(job(job_id=f"j{number}"), route(f"d{instance}", work, tokens))
            open_jobs.add(f"j{number}")
    assert len(ledger) == len(open_jobs)
    for job_id in open_jobs:
        ledger.complete(job_id)
    assert not ledger.scores.any()
    assert not ledger.tokens.any()


def test_slots_of_instances_that_are_gone_are_used_again() -> None:
    ledger = WorkloadLedger()
    for number in range(500):
        name = f"d{number}"
        ledger.add(job(job_id=name), route(name, 2.0, 5), float(number))
        assert (score(ledger, name), tokens_at(ledger, name)) == (2.0, 5)
        ledger.settle(view(decode(name, inflight=1)), float(number))
    assert (len(ledger._slots), len(ledger._jobs), len(ledger), ledger.scores.sum()) == (1, 2, 1, 2.0)


# Turns


def turns(rotation: Rotation, count: int) -> str:
    taken = ""
    for _ in range(count):
        key = next(rotation.order())
        rotation.took(key)
        taken += key
    return taken


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "abcabc"),
        ({"a": 4.0, "b": 1.0}, "aabaaaabaa"),  # Huawei 5.2: weights 4 and 1
        ({"a": 3.0, "b": 1.0}, "aabaaaba"),  # Cronus 5.1: weights 3 and 1
        ({"a": 1.0, "b": 0.0}, "aaa"),
    ],
)
def test_turns_by_example(weights: dict[str, float], expected: str) -> None:
    assert turns(Rotation(weights), len(expected)) == expected


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10), min_size=1), st.integers(1, 300))
def test_turns_keep_to_the_weights(weights: dict[str, float], count: int) -> None:
    taken, total = Counter(turns(Rotation(weights), count)), sum(weights.values())
    for key, weight in weights.items():
        assert abs(taken[key] - count * weight / total) <= len(weights) / 2 + 1e-6


def test_a_rotation_counts_placements_and_starts_again_with_other_members() -> None:
    ledger = WorkloadLedger()
    rotation = ledger.rotation("weighted", {"a": 1.0, "b": 1.0})
    pairs = {pair_key("p", "d"): 1.0, pair_key("p", "e"): 1.0}
    ledger.rotation("plan", pairs)
    ledger.add(job(job_id="j"), route("a"))
    ledger.add(job(job_id="k"), Route(InstanceRef("p", 1, ""), InstanceRef("d", 1, ""), 5, "plan"))
    assert list(ledger.rotation("weighted", {"a": 1.0, "b": 1.0}).order()) == ["b", "a"]
    assert ledger.rotation("weighted", {"a": 1.0, "b": 1.0}) is rotation
    assert next(ledger.rotation("plan", pairs).order()) == pair_key("p", "e")
    assert list(ledger.rotation("weighted", {"a": 1.0, "b": 1.0, "c": 1.0}).order()) == ["a", "b", "c"]


# Lengths of answers


def answer(answers: OutputLengths, tokens: int, count: int = 1, **more: object) -> None:
    for number in range(count):
        answers.started(job(job_id=f"{number}", output=1000, **more))
        answers.ended(f"{number}", tokens)


def test_before_the_first_answer_the_prediction_counts() -> None:
    answers = OutputLengths()
    answer(answers, 0, 100, prediction=predicted(0, 200))  # they failed
    assert answers.all.mean == FIRST_TOKENS
    assert answers.expected(job(output=5000, prediction=predicted(200, 400))) == within(predicted(200, 400))
    assert answers.expected(job(output=10)) == Lengths(10.0, 10.0)  # at most max_tokens
    assert not answers._open


@pytest.mark.parametrize(
    ("lower", "upper", "mean", "brief"),
    [(0, 200, 100.5, 37.6), (400, 600, 500.0, 493.3), (1800, 2**31 - 1, 2700.0, 2596.9)],
)
def test_a_range_as_lengths(lower: int, upper: int, mean: float, brief: float) -> None:
    assert within(predicted(lower, upper)) == pytest.approx(Lengths(mean, brief), rel=0.01)


def test_answers_correct_predictions_like_theirs_and_the_newest_count_most() -> None:
    answers = OutputLengths()
    for _ in range(1000):
        answer(answers, 10, prediction=predicted(0, 200))
        answer(answers, 30, prediction=predicted(0, 200))
    for found in (answers.expected(job(output=1000, prediction=predicted(0, 200))), answers.all):
        assert found == pytest.approx(Lengths(20.0, 15.0), rel=0.05)
    assert answers.expected(job(output=1000, prediction=predicted(200, 400))) == within(predicted(200, 400))
    answer(answers, 1000, 1000)
    answer(answers, 10, 4 * RECENT)
    assert answers.all.mean < 40.0


def test_a_spread_counts_more_than_its_likeliest_bucket_and_is_corrected_in_proportion() -> None:
    def spread(*shares: float) -> LengthPrediction:
        return LengthPrediction(0, 0, 100, 0.5, "classifier", 100, shares, 400)

    narrow, wide, answers = spread(0.9, 0.1, 0.0, 0.0), spread(0.5, 0.1, 0.0, 0.4), OutputLengths()
    assert answers.expected(job(output=1000, prediction=wide)).mean == pytest.approx(180, abs=1)
    answer(answers, 120, 2000, prediction=narrow)  # twice the prediction
    assert answers.expected(job(output=1000, prediction=narrow)).mean == pytest.approx(120, rel=0.05)
    assert answers.expected(job(output=1000, prediction=wide)).mean == pytest.approx(360, rel=0.05)


# Room that is kept for held jobs
SMOOTH = Slo("smooth", 5.0, 0.2, first_token=FirstTokenOut.SMOOTH)
LIGHT = Slo("light", 5.0, 0.2, weight=0.25, first_token=FirstTokenOut.SMOOTH)


def held_job(job_id: str, prompt: int, answer: int, slo: Slo = SMOOTH) -> JobView:
    return job(prompt, answer, job_id, slo=slo, can_wait=True)


def test_only_jobs_that_were_held_for_less_long_leave_the_room() -> None:
    claims, new = Claims(), held_job("new", 10, 10)
    old, young = held_job("old", 100, 50), held_job("young", 100, 60)
    claims.hold(old, "d", 100, 50, 0.0)
    claims.hold(young, "d", 100, 60, 1.0)
    assert claims.before(new, 1.0) == {}, "not held for long enough"
    now = 1.0 + KEEP_S
    for each in (old, young):
        claims.hold(each, "d", 100, each.max_tokens, now)
    assert claims.before(new, now) == {"d": [(100, 50), (100, 60)]}
    assert claims.before(young, now) == {"d": [(100, 50)]}
    assert claims.before(old, now) == claims.before(msgspec.structs.replace(new, begun=True), now) == {}
    gone = now + module.SILENT_S + 0.01  # they have not asked again
    assert claims.before(new, gone) == {}
    claims.hold(held_job("other", 100, 50), "d", 100, 50, gone)
    assert len(claims) == 1


def test_heavier_classes_leave_it_later_and_its_instance_stays_once_room_is_kept_there() -> None:
    claims = Claims()
    for now in (0.0, 3.9 * KEEP_S, 4.0 * KEEP_S):
        claims.hold(held_job("j", 100, 50, LIGHT), "d", 100, 50, now)
        assert bool(claims.before(held_job("heavier", 10, 10), now)) == (now >= 4.0 * KEEP_S)
        assert bool(claims.before(held_job("alike", 10, 10, LIGHT), now)) == (now > 0.0)
    for now, there in ((0.0, "d0"), (1.0, "d1"), (KEEP_S, "d0"), (KEEP_S + 1.0, "d0")):
        claims.hold(held_job("k", 100, 50), there, 100, 50, now)
    assert claims.instance_of("k") == "d1"
    claims.move("k", "d0")
    assert claims.instance_of("k") == "d0"


STEP_S = 0.02


@pytest.mark.parametrize(("slo", "keep_s"), [(SMOOTH, KEEP_S), (LIGHT, 4.0 * KEEP_S)])
def test_a_large_job_waits_until_room_is_kept_and_the_answers_there_have_ended(slo: Slo, keep_s: float) -> None:
    """Small jobs come faster than their answers end; a token takes `STEP_S`, and each job asks again when it may."""
    form = StepForm(STEP_S, 0.0, 0.0, 0.0)
    shape = decode("d", rates=Rates(step=StepRates(form, form, form)), total_blocks=512)
    scheduler, running, placed, rng = Decider(0), dict[str, tuple[float, JobView]](), dict[str, float](), Random(1)
    assert scheduler.apply(
        ClusterDelta.from_view(ClusterView(1, 0.0, (shape,), PolicySet(step_budget=PolicySpec("off")))), 0.0
    )
    small = [(at / 12.0, at, held_job(f"s{at}", 50, rng.randint(150, 206))) for at in range(12 * 80)]
    events = [*small, (20.0, -1, held_job("large", 3000, 1000, slo))]
    heapq.heapify(events)
    sent = 1
    while "large" not in placed:
        now, number, one = heapq.heappop(events)
        for job_id, (began_s, each) in list(running.items()):
            if now - began_s >= each.max_tokens * STEP_S:
                del running[job_id]
                scheduler.ended(job_id, each.max_tokens, True, now)
        given = [(each.prompt_tokens + int((now - at) / STEP_S), at, each) for at, each in running.values()]
        ahead = ahead_of([(h, each.max_tokens - int((now - at) / STEP_S)) for h, at, each in given], 16)
        held, blocks = sum(h for h, _, _ in given), sum(-(-h // 16) for h, _, _ in given)
        load = InstanceLoad(
            time_s=now,
            decoding=len(given),
            context_tokens=held,
            free_blocks=max(0, 512 - blocks),
            inflight=len(given),
            kv_ahead=ahead,
        )
        sent += 1
        assert scheduler.apply(ClusterDelta(sent, now, loads={"d": load}), now)
        try:
            scheduler.decide(one, (), now)
        except Delayed as delay:
            heapq.heappush(events, (now + (delay.retry_after_s or 0.0), number, one))
            continue
        running[one.job_id], placed[one.job_id] = (now, one), now
    assert placed["large"] - 20.0 <= keep_s + 206 * STEP_S + 2 * HOLD_LOOK_S
    assert len(placed) > 50, "the others go on"
