"""Who is refused, delayed or placed while the cluster is full, and when each may come again."""

from random import Random

import msgspec
import pytest

from shared.domain.instance import ClusterView, InstanceView
from shared.domain.job import FirstTokenOut, JobView, LengthPrediction, Slo, WhenFull
from shared.domain.policies import PolicySet
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import PolicySpec, Route
from shared.errors import Delayed, Overloaded, Stays, Unavailable
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.assignment import assignments
from shared.policy.decode_admission import ahead_of
from shared.policy.dispatch import Choice, PowerOfTwo
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.overload import (
    HOLD_LOOK_S,
    LATE_S,
    MOVE_LEAST_S,
    MOVE_SHARE,
    QUEUE_S,
    SOON_S,
    Beside,
    decide,
    moves,
    pause_s,
)
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import FullSplit, NoSplit
from tests.shared.policy.views import decode, prefill, view

ALL = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
FIXED = Policies(LeastLoad(), FullSplit(), PowerOfTwo())
CHAT = Slo("default", 2.0, 0.1, 1.0, WhenFull.REJECT)
BATCH = Slo("batch", 600.0, 1.0, 0.1, WhenFull.DELAY)
FREE = Slo("free", 2.0, 0.1, 1.0, WhenFull.NEVER)


def rates(slower: float = 1.0) -> Rates:
    """Steps of 20 ms, 0.1 ms a prompt token, 0.1 ms a decode, or so many times that."""
    fixed_s, token_s, more = slower * 0.02, slower * 1e-4, {"sequence_s": slower * 1e-4, "context_s": slower * 2e-7}
    step = StepRates(
        StepForm(fixed_s, token_s, slower * 1e-9),
        StepForm(fixed_s, **more),
        StepForm(fixed_s, token_s, slower * 1e-9, **more),
    )
    return Rates(step=step)


def p(name: str = "p", queue_s: float = 0.0) -> InstanceView:
    """With prompts for so many seconds before the job."""
    jobs = round(10 * queue_s)
    each = round(1.0 / (1e-4 + 0.02 / 512) / 10)
    return prefill(name, rates=rates(), queued_prefill=jobs, queued_prefill_tokens=jobs * each, total_blocks=4000)


def d(name: str = "d", decodes: int = 0, context: int = 600, **more: object) -> InstanceView:
    more = {"total_blocks": 40_000, "max_seqs": 256, **more}
    return decode(name, rates=rates(), decoding=decodes, running=decodes, context_tokens=decodes * context, **more)


def asked(slo: Slo, prompt: int = 800, job_id: str = "j", **more: object) -> JobView:
    prediction = LengthPrediction(0, 100, 200, 0.9, "classifier")
    return JobView(job_id, prompt, 1000, slo, prediction, **more)  # type: ignore[arg-type]


def ask(
    job: JobView,
    *views: InstanceView,
    policies: Policies = ALL,
    ledger: WorkloadLedger | None = None,
    now: float = 0.0,
    step_budget: str = "off",
) -> Route:
    broadcast = ClusterView(1, 0.0, views, PolicySet(step_budget=PolicySpec(step_budget)))
    index = ClusterIndex(broadcast, rng=Random(0), ledger=ledger)
    return decide(job, index, policies, now, Random(0))


def busy_with(slo: Slo, jobs: int, stay_s: float, open_jobs: int = 0) -> WorkloadLedger:
    """Of that class `jobs` have come in the last ten seconds, stayed so long, and some of them still do."""
    ledger = WorkloadLedger()
    for number in range(jobs):
        job, now = asked(slo, job_id=f"{slo.name}{number}"), 10.0 * number / jobs
        ledger.needs.asked(job, now)
        ledger.needs.placed(job, now)
        if number < jobs - open_jobs:
            ledger.needs.ended(job.job_id, True, now + stay_s)
    return ledger


@pytest.mark.parametrize("policies", [ALL, FIXED])
def test_a_job_that_would_miss_its_target_is_refused_until_the_queue_has_drained(policies: Policies) -> None:
    full = [p(queue_s=8.0), d(decodes=200, context=1500)] if policies is ALL else [p(queue_s=8.0), d()]
    with pytest.raises(Overloaded) as refused:
        ask(asked(CHAT), *full, policies=policies)
    assert type(refused.value) is Overloaded
    assert refused.value.retry_after_s is not None
    if policies is FIXED:
        assert refused.value.cause == "ttft"
        assert refused.value.retry_after_s == pytest.approx(6.2, abs=0.5)
        waited = [p(queue_s=8.0 - refused.value.retry_after_s - 0.1), full[1]]
        assert ask(asked(CHAT), *waited, policies=policies).prefill is not None
    assert "'default'" in refused.value.message


def test_a_longer_queue_means_a_later_return() -> None:
    waits = []
    for queue_s in (4.0, 8.0, 16.0):
        with pytest.raises(Overloaded) as refused:
            ask(asked(CHAT), p(queue_s=queue_s), d(), policies=FIXED)
        waits.append(refused.value.retry_after_s)
    assert waits[1] - waits[0] == pytest.approx(4.0, abs=0.1)
    assert waits[2] - waits[1] == pytest.approx(8.0, abs=0.1)


def test_a_slow_decode_refuses_too() -> None:
    with pytest.raises(Overloaded) as refused:
        ask(asked(CHAT), d(decodes=200, context=2000), policies=ALL)
    assert refused.value.cause == "tpot"
    assert ask(asked(CHAT), d(decodes=100, context=1000)).decode is not None


def test_what_no_cluster_could_do_in_time_is_not_refused_for_load() -> None:
    assert ask(asked(CHAT, prompt=30_000), decode("d", rates=rates(), max_model_len=1 << 17, total_blocks=40_000))
    slow = Slo("fast", 2.0, 0.001, 1.0, WhenFull.REJECT)
    assert ask(asked(slow), d())


@pytest.mark.parametrize("slo", [FREE, CHAT])
def test_who_may_not_be_refused_or_has_begun_is_placed_whatever_the_load(slo: Slo) -> None:
    job = asked(slo, begun=slo is CHAT)
    assert ask(job, p(queue_s=50.0), d(decodes=255, context=3000)).policy


@pytest.mark.parametrize(
    ("case", "views", "cause"),
    [
        ("a prefill queue", [p(queue_s=3.0), d()], "prefill"),
        ("no seats", [p(), d(decodes=256, context=100, max_seqs=200)], "room"),
        ("no memory", [p(), d(decodes=50, free_blocks=0, waiting_tokens=4000)], "room"),
    ],
)
def test_batch_waits_for_what_is_full(case: str, views: list[InstanceView], cause: str) -> None:
    with pytest.raises(Delayed) as delayed:
        ask(asked(BATCH), *views, policies=FIXED)
    assert delayed.value.cause == cause, case
    assert delayed.value.retry_after_s is not None
    assert SOON_S <= delayed.value.retry_after_s <= LATE_S


def test_batch_goes_where_it_is_not_in_the_way() -> None:
    views = [p("a", queue_s=3.0), p("b", queue_s=QUEUE_S / 5), d(decodes=150, context=800)]
    route = ask(asked(BATCH), *views)
    assert route.prefill is None or route.prefill.instance_id == "b"
    only = ask(asked(BATCH), p("a", queue_s=3.0), d())
    assert only.prefill is None


def test_batch_that_fits_nowhere_comes_again_when_the_first_place_is_likely_to_be_free() -> None:
    long, short = p("a", queue_s=3.0), p("b", queue_s=0.9)
    d_busy = d(queued_prefill=10, queued_prefill_tokens=60_000)
    with pytest.raises(Delayed) as delayed:
        ask(asked(BATCH), long, short, d_busy)
    assert delayed.value.retry_after_s == pytest.approx(0.9 - QUEUE_S, abs=0.05)
    with pytest.raises(Delayed) as delayed:
        ask(asked(BATCH), long, d_busy)
    assert delayed.value.retry_after_s == LATE_S


def test_steps_that_keep_to_targets_let_batch_prompts_in_beside_heavier_decodes() -> None:
    here, ledger = d(decodes=100, context=400, prefill_share=1.0, chunk_size=2048), busy_with(CHAT, 20, 1.0)
    with pytest.raises(Delayed) as delayed:
        ask(asked(BATCH), here, ledger=ledger, now=11.0)
    assert delayed.value.cause == "tpot", "steps of 2,048 prompt tokens beside them take 0.2 s"
    assert ask(asked(BATCH), here, ledger=ledger, now=11.0, step_budget="on")


def test_batch_gives_way_to_the_step_times_of_heavier_classes_that_ask() -> None:
    slow = d(decodes=200, context=1600)  # 0.104 s a step
    assert ask(asked(BATCH), slow)
    with pytest.raises(Delayed) as delayed:
        ask(asked(BATCH), slow, ledger=busy_with(CHAT, 20, 1.0), now=11.0)
    assert delayed.value.cause == "tpot"
    assert ask(asked(BATCH), slow, ledger=busy_with(CHAT, 20, 1.0), now=11.0 + 61.0), "they ask no more"


def test_room_is_kept_for_what_heavier_classes_are_likely_to_bring() -> None:
    room = d(decodes=180, context=100, max_seqs=200)
    fewer, many = busy_with(CHAT, 10, 2.0), busy_with(CHAT, 300, 2.0)
    assert ask(asked(BATCH), room, ledger=fewer, now=10.0)
    with pytest.raises(Delayed) as delayed:
        ask(asked(BATCH), room, ledger=many, now=10.0)
    assert delayed.value.cause == "reserve"
    here = busy_with(CHAT, 300, 2.0, open_jobs=60)
    assert ask(asked(BATCH), room, ledger=here, now=10.0), "those that are here already need no room"


def test_each_placement_takes_of_the_room_before_the_next_broadcast() -> None:
    ledger = busy_with(CHAT, 60, 2.0)
    index = ClusterIndex(view(d(decodes=170, context=100, max_seqs=200)), rng=Random(0), ledger=ledger)
    jobs = [asked(BATCH, job_id=f"b{number}") for number in range(40)]

    def place_all() -> None:
        for job in jobs:
            ledger.add(job, decide(job, index, ALL, 10.0, Random(0)), 10.0)

    with pytest.raises(Delayed, match="heavier classes"):
        place_all()
    assert 5 < ledger.needs.placements - 60 < 30


def test_who_has_had_more_than_its_share_is_refused_first() -> None:
    views = [p(queue_s=1.3), d()]
    assert ask(asked(CHAT), *views, policies=FIXED)
    with pytest.raises(Overloaded) as refused:
        ask(asked(CHAT, over_share=True), *views, policies=FIXED)
    assert refused.value.cause == "ttft"
    assert ask(asked(CHAT, over_share=True), p(), d(), policies=FIXED)


def test_misses_of_those_let_in_make_it_stricter_and_kept_targets_make_it_laxer_again() -> None:
    ledger = WorkloadLedger()

    def outcomes(count: int, met: bool) -> float:
        for _ in range(count):
            job = asked(CHAT, job_id="one")
            ledger.needs.placed(job, 0.0)
            ledger.needs.ended("one", met, 1.0)
        return ledger.needs.margin(CHAT)

    first = outcomes(1, True)
    worse = outcomes(5, False)
    assert worse < first
    assert worse < outcomes(100, True) <= first
    assert outcomes(1000, False) == pytest.approx(0.5), "it has a floor"


def test_refusals_of_heavier_classes_leave_less_for_lighter_ones() -> None:
    ledger = busy_with(CHAT, 20, 1.0)
    before = ledger.needs.others(BATCH, 10.0)
    for _ in range(5):
        ledger.needs.refused(CHAT)
    after = ledger.needs.others(BATCH, 10.0)
    assert after.tpot_s < before.tpot_s < CHAT.tpot_s
    assert ledger.needs.margin(CHAT) == busy_with(CHAT, 20, 1.0).needs.margin(CHAT)
    assert ledger.needs.others(CHAT, 10.0) == CHAT, "nobody is heavier"


def test_harm_to_heavier_classes_counts_by_their_weight_and_targets() -> None:
    """A batch job goes to the instance where nobody decodes, though the other one is faster."""
    quick = msgspec.structs.replace(d("busy", decodes=120, context=1200))
    job = asked(BATCH)
    ledger = busy_with(CHAT, 20, 1.0)
    route = ask(job, quick, d("idle"), ledger=ledger, now=10.0)
    assert route.decode is not None
    assert route.decode.instance_id == "idle"


def full(name: str = "d", jobs: int = 16, left: int = 500, **more: object) -> InstanceView:
    """Its memory holds so many answers to their ends, and nothing beside them for the next `left` steps."""
    ahead = ahead_of([(506, left)] * jobs, 16)
    blocks = sum(-(-(506 + left) // 16) for _ in range(jobs))
    return d(name, jobs, total_blocks=blocks, free_blocks=blocks - 32 * jobs, kv_ahead=ahead, **more)


def waiting(slo: Slo = FREE, answer: int = 600, **more: object) -> JobView:
    return JobView("j", 100, answer, slo, can_wait=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("slo", [FREE, CHAT])
def test_a_job_waits_before_its_prompt_is_computed_where_its_answer_has_no_room_to_its_end(slo: Slo) -> None:
    slo = msgspec.structs.replace(slo, ttft_s=100.0)
    with pytest.raises(Delayed, match="room for its KV") as refused:
        ask(waiting(slo), p(), full())
    assert refused.value.cause == "room"
    assert refused.value.retry_after_s == HOLD_LOOK_S


def test_a_class_that_may_be_refused_is_refused_where_it_would_wait_too_long() -> None:
    with pytest.raises(Overloaded, match="first token") as refused:
        ask(waiting(CHAT), p(), full())
    assert not isinstance(refused.value, Delayed)


def test_a_job_goes_where_its_answer_has_room_to_its_end() -> None:
    """The other instance decodes more at present."""
    busier = d("e", 24, kv_ahead=ahead_of([(506, 20)] * 24, 16))
    assert ask(waiting(), p(), full("d", 8), busier).decode == Choice(busier).ref


@pytest.mark.parametrize("factor", [3.0, 8.0])
def test_a_job_does_not_wait_for_the_best_instance_where_another_one_meets_its_targets(factor: float) -> None:
    """Those behind the job would wait, too. The other takes 60 ms a token, or 160 of the 100 that are allowed."""
    views = p(), full(left=8), decode("slow", rates=rates(factor), total_blocks=40_000, max_seqs=256)
    begun = ask(waiting(begun=True), *views)
    assert begun.decode == Choice(views[1]).ref, "by itself it is better off there"
    if factor == 3.0:
        assert ask(waiting(), *views).decode == Choice(views[2]).ref
    else:
        with pytest.raises(Delayed, match="room"):
            ask(waiting(), *views)


def test_a_job_begins_before_there_is_room_when_there_will_be_when_it_is_computed() -> None:
    soon = full(left=40)  # about a second
    with pytest.raises(Delayed):
        ask(waiting(), p(), soon)
    assert ask(waiting(), p(queue_s=4.0), soon, policies=Policies(Adaptive(), FullSplit(), AdaptiveDispatch()))


def test_a_job_that_has_begun_and_one_whose_gateway_cannot_have_it_wait_go_on() -> None:
    assert ask(waiting(begun=True), p(), full())
    assert ask(msgspec.structs.replace(waiting(), can_wait=False), p(), full())


def test_what_was_just_placed_has_taken_its_room() -> None:
    """Of 20 at once so many are placed as fit to their ends, evenly, although no load shows any of them yet."""
    views = p(), d("d", total_blocks=320), d("e", total_blocks=320)
    index = ClusterIndex(ClusterView(1, 0.0, views), rng=Random(0))
    placed: list[Route] = []
    for number in range(20):
        one = msgspec.structs.replace(waiting(answer=400), job_id=f"j{number}")
        try:
            route = decide(one, index, ALL, 0.0, Random(0))
        except Delayed:
            break
        placed.append(route)
        for assignment in assignments(one, route, 0.0):
            index.book(assignment)
    chosen = [route.decode.instance_id for route in placed if route.decode is not None]
    assert (chosen.count("d"), chosen.count("e")) == (10, 10)


def test_fixed_policies_hold_nothing() -> None:
    assert ask(waiting(), p(), full(), policies=FIXED)


def test_a_held_job_begins_while_its_first_token_can_still_be_in_time() -> None:
    """Its class wants the first token early; one that is smooth waits on, and so does one that is late anyhow."""
    late, soon = msgspec.structs.replace(waiting(), waited_s=5.0), msgspec.structs.replace(waiting(), waited_s=1.7)
    assert ask(soon, p(), full())
    smooth = msgspec.structs.replace(FREE, first_token=FirstTokenOut.SMOOTH)
    for job in (late, msgspec.structs.replace(soon, slo=smooth)):
        with pytest.raises(Delayed, match="room"):
            ask(job, p(), full())


# A paused stream: how long its pause is expected to last, and when it goes on elsewhere
STEP = StepRates(StepForm(0.02, 1e-4), StepForm(0.02), StepForm(0.02, 1e-4))  # 20 ms, and 0.1 ms a prompt token
FULL = Policies(LeastLoad(), FullSplit(), PowerOfTwo())
LOCAL = Policies(LeastLoad(), NoSplit(), PowerOfTwo())


def test_with_room_the_pause_is_the_time_of_computing_it_again() -> None:
    assert pause_s(Beside.of([], 16), 1600, 400, 100, 16, STEP, 512) == pytest.approx(0.02 + 400 * 1e-4)
    beside = pause_s(Beside.of([(100, 50)], 16), 1600, 700, 100, 16, STEP, 513)
    assert beside == pytest.approx(2 * 0.02 + 700 * 1e-4), "two chunks of at most 512 tokens beside a decode"


def test_without_room_it_lasts_until_others_end() -> None:
    first, second = (700, 64), (700, 256)  # both fit, and nothing beside them
    both = pause_s(Beside.of([first, second], 16), 1600, 600, 100, 16, STEP, 512)
    assert both == pytest.approx(64 * 0.02 + 2 * 0.02 + 600 * 1e-4)
    longer = pause_s(Beside.of([(700, 256), second], 16), 1600, 600, 100, 16, STEP, 512)
    assert longer == pytest.approx(256 * 0.02 + 2 * 0.02 + 600 * 1e-4)


def test_one_that_would_fit_for_a_step_only_does_not_fit() -> None:
    tight = pause_s(Beside.of([(1000, 64)], 16), 1024 + 512, 512, 100, 16, STEP, 512)
    assert tight > 64 * 0.02, "its next tokens and those of the other one have no room"


def test_it_moves_only_where_that_is_clearly_sooner() -> None:
    assert moves(2.0, MOVE_SHARE * 2.0)
    assert not moves(2.0, MOVE_SHARE * 2.0 + 0.01)
    assert moves(MOVE_LEAST_S + 0.01, 0.005)
    assert not moves(MOVE_LEAST_S - 0.01, 0.0)


def pausing(name: str, *others: tuple[int, int]) -> InstanceView:
    """With 100 blocks of 16 tokens, and these decodes: tokens held, tokens to come."""
    held = sum(now for now, _ in others)
    return decode(
        name,
        rates=Rates(step=STEP),
        total_blocks=100,
        free_blocks=100 - -(-held // 16),
        max_seqs=64,
        decoding=len(others),
        running=len(others),
        context_tokens=held,
        kv_ahead=ahead_of(others, 16),
    )


def ask_to_move(
    policies: Policies, paused_s: float, *views: InstanceView, early: bool = True
) -> tuple[ClusterIndex, JobView]:
    slo = Slo(first_token=FirstTokenOut.EARLY if early else FirstTokenOut.SMOOTH)
    asked = JobView("j", 500, 200, slo, begun=True, started=True, pause_s=paused_s)
    return ClusterIndex(view(*views), rng=Random(0)), asked


@pytest.mark.parametrize("policies", [ALL, FULL, LOCAL])
@pytest.mark.parametrize("early", [True, False])
def test_a_paused_job_is_placed_where_it_fits_and_the_reasons_say_what_that_saves(
    policies: Policies, early: bool
) -> None:
    p = prefill("p", rates=Rates(step=STEP), total_blocks=1000)
    index, job = ask_to_move(policies, 3.0, p, pausing("full", (700, 300), (800, 300)), pausing("free"), early=early)
    route = decide(job, index, policies, 0.0, Random(0), ("full",))
    assert route.decode is None or route.decode.instance_id == "free"
    (first, *_) = route.reasons
    assert first.what == "sooner"
    assert first.figures["pause_s"] == 3.0
    assert 0.0 < float(first.figures["elsewhere_s"]) < 1.0


@pytest.mark.parametrize("policies", [ALL, FULL, LOCAL])
def test_it_stays_where_the_others_are_as_full_or_the_pause_is_short(policies: Policies) -> None:
    p = prefill("p", rates=Rates(step=STEP), total_blocks=1000)
    full = (700, 300), (800, 300)
    index, job = ask_to_move(policies, 3.0, p, pausing("here", *full), pausing("there", *full))
    with pytest.raises(Stays, match="stays"):
        decide(job, index, policies, 0.0, Random(0), ("here",))
    index, job = ask_to_move(policies, 0.1, p, pausing("here", *full), pausing("there"))
    with pytest.raises(Stays):
        decide(job, index, policies, 0.0, Random(0), ("here",))


def test_it_has_no_other_place_without_another_instance() -> None:
    index, job = ask_to_move(ALL, 3.0, pausing("here", (700, 300), (800, 300)))
    with pytest.raises(Unavailable):
        decide(job, index, ALL, 0.0, Random(0), ("here",))
