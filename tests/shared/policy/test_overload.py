"""Which jobs are refused, delayed or placed while the cluster is full, and when each may ask again."""

from random import Random
from typing import Any

import msgspec
import pytest

from shared.domain.instance import ClusterView, InstanceView
from shared.domain.job import FirstTokenOut, JobView, LengthPrediction, Slo, WhenFull
from shared.domain.policies import PolicySet
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import PolicySpec, Route
from shared.errors import Delayed, Overloaded, Stays, Unavailable
from shared.policy import registry
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
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
from tests.shared.policy.views import decode, index, prefill, view
from tests.shared.policy.views import rates as rates_at

ALL = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
FIXED = Policies(LeastLoad(), FullSplit(), PowerOfTwo())
CHAT = Slo("default", 2.0, 0.1, 1.0, WhenFull.REJECT)
BATCH = Slo("batch", 600.0, 1.0, 0.1, WhenFull.DELAY)
FREE = Slo("free", 2.0, 0.1, 1.0, WhenFull.NEVER)


def rates(slower: float = 1.0) -> Rates:
    return rates_at(1.0 / slower, link=None)


def p(name: str = "p", queue_s: float = 0.0) -> InstanceView:
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
        ledger.class_demand.arrived(job, now)
        ledger.class_demand.placed(job, now)
        if number < jobs - open_jobs:
            ledger.class_demand.ended(job.job_id, True, now + stay_s)
    return ledger


def test_a_clock_that_is_set_back_while_a_job_runs_gives_no_negative_stay() -> None:
    ledger = busy_with(CHAT, 5, -1.0)
    assert ledger.class_demand.missing(BATCH, 1.0) == 0.0
    assert ledger.class_demand.spread(CHAT, 1.0) == 0.0


def delay_of(error: type[Overloaded], *args: object, **more: object) -> Overloaded:
    with pytest.raises(error) as refused:
        ask(*args, **more)  # type: ignore[arg-type]
    assert type(refused.value) is error
    assert refused.value.retry_after_s is not None
    return refused.value


def test_a_job_that_would_miss_its_target_is_refused_until_the_queue_has_drained() -> None:
    assert "'default'" in delay_of(Overloaded, asked(CHAT), p(queue_s=8.0), d(decodes=200, context=1500)).message
    refused = [delay_of(Overloaded, asked(CHAT), p(queue_s=s), d(), policies=FIXED) for s in (4.0, 8.0, 16.0)]
    assert {one.cause for one in refused} == {"ttft"}
    assert [one.retry_after_s for one in refused] == pytest.approx([2.2, 6.2, 14.2], abs=0.5)
    waited = p(queue_s=8.0 - (refused[1].retry_after_s or 0.0) - 0.1)
    assert ask(asked(CHAT), waited, d(), policies=FIXED).prefill is not None
    assert delay_of(Overloaded, asked(CHAT), d(decodes=200, context=2000)).cause == "tpot"
    assert ask(asked(CHAT), d(decodes=100, context=1000)).decode is not None


def test_targets_that_no_instance_could_meet_are_not_refused_for_load() -> None:
    assert ask(asked(CHAT, prompt=30_000), decode("d", rates=rates(), max_model_len=1 << 17, total_blocks=40_000))
    assert ask(asked(Slo("fast", 2.0, 0.001, 1.0, WhenFull.REJECT)), d())


@pytest.mark.parametrize("slo", [FREE, CHAT])
def test_jobs_that_may_not_be_refused_or_have_begun_are_placed_whatever_the_load(slo: Slo) -> None:
    assert ask(asked(slo, begun=slo is CHAT), p(queue_s=50.0), d(decodes=255, context=3000)).policy


@pytest.mark.parametrize(
    ("views", "cause"),
    [
        ([p(queue_s=3.0), d()], "prefill"),
        ([p(), d(decodes=256, context=100, max_seqs=200)], "room"),  # no seats
        ([p(), d(decodes=50, free_blocks=0, waiting_tokens=4000)], "room"),  # no memory
    ],
)
def test_batch_waits_for_what_is_full(views: list[InstanceView], cause: str) -> None:
    delayed = delay_of(Delayed, asked(BATCH), *views, policies=FIXED)
    assert delayed.cause == cause
    assert SOON_S <= (delayed.retry_after_s or 0.0) <= LATE_S


def test_batch_goes_where_it_is_not_in_the_way_or_asks_again_when_the_first_place_is_likely_to_be_free() -> None:
    route = ask(asked(BATCH), p("a", queue_s=3.0), p("b", queue_s=QUEUE_S / 5), d(decodes=150, context=800))
    assert route.prefill is None or route.prefill.instance_id == "b"
    assert ask(asked(BATCH), p("a", queue_s=3.0), d()).prefill is None
    long, short, busy = p("a", queue_s=3.0), p("b", queue_s=0.9), d(queued_prefill=10, queued_prefill_tokens=60_000)
    soon = delay_of(Delayed, asked(BATCH), long, short, busy)
    assert soon.retry_after_s == pytest.approx(0.9 - QUEUE_S, abs=0.05)
    assert delay_of(Delayed, asked(BATCH), long, busy).retry_after_s == LATE_S


def test_batch_leaves_step_times_and_room_to_heavier_classes_that_arrive() -> None:
    here, few = d(decodes=100, context=400, prefill_share=1.0, chunk_size=2048), busy_with(CHAT, 20, 1.0)
    assert delay_of(Delayed, asked(BATCH), here, ledger=few, now=11.0).cause == "tpot", "2,048 prompt tokens take 0.2 s"
    assert ask(asked(BATCH), here, ledger=few, now=11.0, step_budget="on"), "steps keep to the targets"
    slow = d(decodes=200, context=1600)  # 0.104 s a step
    assert ask(asked(BATCH), slow)
    assert delay_of(Delayed, asked(BATCH), slow, ledger=busy_with(CHAT, 20, 1.0), now=11.0).cause == "tpot"
    assert ask(asked(BATCH), slow, ledger=busy_with(CHAT, 20, 1.0), now=11.0 + 61.0), "no heavier job arrives any more"
    room = d(decodes=180, context=100, max_seqs=200)
    assert ask(asked(BATCH), room, ledger=busy_with(CHAT, 10, 2.0), now=10.0)
    assert delay_of(Delayed, asked(BATCH), room, ledger=busy_with(CHAT, 300, 2.0), now=10.0).cause == "reserve"
    there = busy_with(CHAT, 300, 2.0, open_jobs=60)
    assert ask(asked(BATCH), room, ledger=there, now=10.0), "open jobs need no further room"


def _place_all(index: ClusterIndex, jobs: list[JobView], *, book: bool) -> None:
    for job in jobs:
        assigned = index.ledger.add(job, decide(job, index, ALL, 10.0, Random(0)), 10.0)
        for assignment in assigned if book else ():
            index.book(assignment)


def test_each_placement_takes_of_the_room_before_the_next_broadcast() -> None:
    ledger = busy_with(CHAT, 60, 2.0)
    index = ClusterIndex(view(d(decodes=170, context=100, max_seqs=200)), rng=Random(0), ledger=ledger)
    with pytest.raises(Delayed, match="heavier classes"):
        _place_all(index, [asked(BATCH, job_id=f"b{number}") for number in range(40)], book=False)
    assert 5 < ledger.class_demand.placements - 60 < 30


def test_callers_with_more_than_their_share_are_refused_first() -> None:
    views = [p(queue_s=1.3), d()]
    assert ask(asked(CHAT), *views, policies=FIXED)
    assert delay_of(Overloaded, asked(CHAT, over_share=True), *views, policies=FIXED).cause == "ttft"
    assert ask(asked(CHAT, over_share=True), p(), d(), policies=FIXED)


def test_outcomes_and_refusals_change_what_predicted_times_may_take() -> None:
    ledger = WorkloadLedger()

    def margin_after(count: int, met: bool) -> float:
        for _ in range(count):
            ledger.class_demand.placed(asked(CHAT, job_id="one"), 0.0)
            ledger.class_demand.ended("one", met, 1.0)
        return ledger.class_demand.margin(CHAT)

    first, worse = margin_after(1, True), margin_after(5, False)
    assert worse < margin_after(100, True) <= first
    assert margin_after(1000, False) == pytest.approx(0.5), "it has a floor"
    ledger = busy_with(CHAT, 20, 1.0)
    margin, before = ledger.class_demand.margin(CHAT), ledger.class_demand.others(BATCH, 10.0)
    for _ in range(5):
        ledger.class_demand.refused(CHAT)
    assert ledger.class_demand.others(BATCH, 10.0).tpot_s < before.tpot_s < CHAT.tpot_s
    assert ledger.class_demand.margin(CHAT) == margin
    assert ledger.class_demand.others(CHAT, 10.0) == CHAT, "no class is heavier"


def test_cost_to_heavier_classes_counts_by_their_weight_and_targets() -> None:
    route = ask(
        asked(BATCH), d("busy", decodes=120, context=1200), d("idle"), ledger=busy_with(CHAT, 20, 1.0), now=10.0
    )
    assert route.decode is not None
    assert route.decode.instance_id == "idle"


# Jobs whose KV finds no room


def full(name: str = "d", jobs: int = 16, left: int = 500, **more: object) -> InstanceView:
    """Its memory holds so many answers to their ends, and nothing beside them for the next `left` steps."""
    ahead = ahead_of([(506, left)] * jobs, 16)
    blocks = sum(-(-(506 + left) // 16) for _ in range(jobs))
    return d(name, jobs, total_blocks=blocks, free_blocks=blocks - 32 * jobs, kv_ahead=ahead, **more)


def waiting(slo: Slo = FREE, answer: int = 600, **more: object) -> JobView:
    return JobView("j", 100, answer, slo, **{"can_wait": True, **more})  # type: ignore[arg-type]


def test_a_job_waits_before_its_prompt_is_computed_where_its_answer_has_no_room_to_its_end() -> None:
    for slo in (FREE, CHAT):
        held = delay_of(Delayed, waiting(msgspec.structs.replace(slo, ttft_s=100.0)), p(), full())
        assert (held.cause, held.retry_after_s) == ("room", HOLD_LOOK_S)
    assert "first token" in delay_of(Overloaded, waiting(CHAT), p(), full()).message, "it would wait too long"
    assert ask(waiting(), p(), full(), policies=FIXED)
    assert ask(waiting(begun=True), p(), full())
    assert ask(waiting(can_wait=False), p(), full())
    busier = d("e", 24, kv_ahead=ahead_of([(506, 20)] * 24, 16))
    assert ask(waiting(), p(), full("d", 8), busier).decode == Choice(busier).ref, "it has room there"
    soon = full(left=40)  # room in about a second
    delay_of(Delayed, waiting(), p(), soon)
    assert ask(waiting(), p(queue_s=4.0), soon, policies=Policies(Adaptive(), FullSplit(), AdaptiveDispatch()))


@pytest.mark.parametrize("factor", [3.0, 8.0])
def test_a_job_does_not_wait_for_the_best_instance_where_another_one_meets_its_targets(factor: float) -> None:
    """The jobs behind it would wait, too. The other takes 60 ms a token, or 160 of the 100 that are allowed."""
    views = p(), full(left=8), decode("slow", rates=rates(factor), total_blocks=40_000, max_seqs=256)
    assert ask(waiting(begun=True), *views).decode == Choice(views[1]).ref, "by itself it is better off there"
    if factor == 3.0:
        assert ask(waiting(), *views).decode == Choice(views[2]).ref
    else:
        delay_of(Delayed, waiting(), *views)


def test_what_was_just_placed_has_taken_its_room() -> None:
    views = p(), d("d", total_blocks=320), d("e", total_blocks=320)
    index = ClusterIndex(ClusterView(1, 0.0, views), rng=Random(0))
    jobs = [msgspec.structs.replace(waiting(answer=400), job_id=f"j{number}") for number in range(21)]
    with pytest.raises(Delayed):
        _place_all(index, jobs, book=True)
    assert [one.load.decoding for one in index.decode.views] == [10, 10]


def test_a_held_job_begins_while_its_first_token_can_still_be_in_time() -> None:
    smooth = msgspec.structs.replace(FREE, first_token=FirstTokenOut.SMOOTH)
    assert ask(waiting(waited_s=1.7), p(), full())
    for job in (waiting(waited_s=5.0), waiting(smooth, waited_s=1.7)):
        delay_of(Delayed, job, p(), full())


# A paused stream: how long its pause is expected to last, and when it goes on elsewhere
STEP = StepRates(StepForm(0.02, 1e-4), StepForm(0.02), StepForm(0.02, 1e-4))  # 20 ms, and 0.1 ms a prompt token
LOCAL = Policies(LeastLoad(), NoSplit(), PowerOfTwo())


@pytest.mark.parametrize(
    ("beside", "room", "held", "chunk", "expected_s"),
    [
        ([], 1600, 400, 512, 0.02 + 400 * 1e-4),
        ([(100, 50)], 1600, 700, 513, 2 * 0.02 + 700 * 1e-4),  # two chunks of at most 512 tokens beside a decode
        ([(700, 64), (700, 256)], 1600, 600, 512, 64 * 0.02 + 2 * 0.02 + 600 * 1e-4),  # both fit, and nothing beside
        ([(700, 256), (700, 256)], 1600, 600, 512, 256 * 0.02 + 2 * 0.02 + 600 * 1e-4),
    ],
)
def test_a_pause_lasts_until_there_is_room_and_the_prompt_is_computed_again(
    beside: list[tuple[int, int]], room: int, held: int, chunk: int, expected_s: float
) -> None:
    assert pause_s(Beside.from_jobs(beside, 16), room, held, 100, 16, STEP, chunk) == pytest.approx(expected_s)


def test_it_moves_only_where_that_is_clearly_sooner() -> None:
    assert moves(2.0, MOVE_SHARE * 2.0)
    assert not moves(2.0, MOVE_SHARE * 2.0 + 0.01)
    assert moves(MOVE_LEAST_S + 0.01, 0.005)
    assert not moves(MOVE_LEAST_S - 0.01, 0.0)


def pausing(name: str, *others: tuple[int, int]) -> InstanceView:
    """With 100 blocks of 16 tokens, and these decodes: tokens held, tokens to come."""
    held, load = sum(now for now, _ in others), {"decoding": len(others), "running": len(others)}
    free = 100 - -(-held // 16)
    shape = decode(name, rates=Rates(step=STEP), total_blocks=100, max_seqs=64, free_blocks=free, **load)
    ahead = msgspec.structs.replace(shape.load, context_tokens=held, kv_ahead=ahead_of(others, 16))
    return msgspec.structs.replace(shape, load=ahead)


@pytest.mark.parametrize("policies", [ALL, FIXED, LOCAL])
@pytest.mark.parametrize("first_token", FirstTokenOut)
def test_a_paused_job_goes_on_where_it_fits_clearly_sooner(policies: Policies, first_token: FirstTokenOut) -> None:
    prefills, full = prefill("p", rates=Rates(step=STEP), total_blocks=1000), ((700, 300), (800, 300))

    def moved(paused_s: float, *views: InstanceView) -> Route:
        job = JobView("j", 500, 200, Slo(first_token=first_token), begun=True, started=True, pause_s=paused_s)
        return decide(job, ClusterIndex(view(*views), rng=Random(0)), policies, 0.0, Random(0), ("here",))

    route = moved(3.0, prefills, pausing("here", *full), pausing("free"))
    assert route.decode is None or route.decode.instance_id == "free"
    reason = route.reasons[0]
    assert (reason.what, reason.figures["pause_s"]) == ("sooner", 3.0)
    assert 0.0 < float(reason.figures["elsewhere_s"]) < 1.0
    for paused_s, there in ((3.0, pausing("there", *full)), (0.1, pausing("there"))):
        with pytest.raises(Stays, match="stays"):
            moved(paused_s, prefills, pausing("here", *full), there)
    with pytest.raises(Unavailable):
        moved(3.0, pausing("here", *full))


@pytest.mark.parametrize("placement", ["adaptive", "least_load", "round_robin"])
def test_a_job_is_placed_on_instances_that_serve_its_adapter(placement: str) -> None:
    a, b = {"a": "1"}, {"b": "1"}
    prefills = prefill("p0"), prefill("p1", adapters=a), prefill("p2", adapters=b)
    cluster = index(*prefills, decode("d0"), decode("d1", adapters=a), decode("d2", adapters=b))
    policies = Policies(registry.placement(placement), registry.split("full", {}), registry.dispatch("power_of_two"))
    for seed in range(20):
        found = decide(JobView("j", 100, 50, adapter="a"), cluster, policies, 0.0, Random(seed), exclude=["d0"])
        assert {ref.instance_id for ref in (found.prefill, found.decode) if ref is not None} <= {"p1", "d1"}
    with pytest.raises(Unavailable, match="serves the adapter 'c'"):
        decide(JobView("j", 100, 50, adapter="c"), cluster, policies, 0.0, Random(0))
    with pytest.raises(Unavailable):  # the only ones have just failed the job
        decide(JobView("j", 100, 50, adapter="a"), cluster, policies, 0.0, Random(0), exclude=["p1", "d1"])


@pytest.mark.parametrize("placement", ["adaptive", "least_load", "round_robin"])
def test_a_job_is_placed_on_instances_that_process_all_of_its_media(placement: str) -> None:
    both, sees = {"media": ("image", "video")}, {"media": ("image",)}
    prefills = prefill("p0"), prefill("p1", **both), prefill("p2", **sees)
    decodes = decode("d0"), decode("d1", **both), decode("d2", **sees)
    policies = Policies(registry.placement(placement), registry.split("full", {}), registry.dispatch("power_of_two"))
    cluster, film = index(*prefills, *decodes), JobView("j", 100, 50, media=("image", "video"))
    for seed in range(20):
        found = decide(film, cluster, policies, 0.0, Random(seed), exclude=["d0"])
        assert {ref.instance_id for ref in (found.prefill, found.decode) if ref is not None} <= {"p1", "d1"}
        found = decide(JobView("j", 100, 50, media=("image",)), cluster, policies, 0.0, Random(seed))
        assert not {ref.instance_id for ref in (found.prefill, found.decode) if ref is not None} & {"p0", "d0"}
    with pytest.raises(Unavailable, match="serves prompts with audio items"):
        decide(JobView("j", 100, 50, media=("audio",)), cluster, policies, 0.0, Random(0))
    text = index(prefill("p0"), decode("d0"))
    with pytest.raises(Unavailable, match="serves the adapter 'a' and prompts with image items"):
        decide(JobView("j", 100, 50, adapter="a", media=("image",)), text, policies, 0.0, Random(0))


PLACEMENTS = pytest.mark.parametrize("placement", ["adaptive", "least_load", "round_robin"])
SPLITS = pytest.mark.parametrize("split", ["full", "fraction", "adaptive"])


def decided(placement: str, split: str, cluster: ClusterIndex, **job: Any) -> set[tuple[str, str]]:
    """The pairs of instances on which such jobs were placed."""
    policies = Policies(registry.placement(placement), registry.split(split, {}), registry.dispatch("power_of_two"))
    routes = [decide(JobView("j", 800, 50, **job), cluster, policies, 0.0, Random(seed)) for seed in range(20)]
    refs = [(route.prefill, route.decode) for route in routes]
    return {(p.instance_id if p else "", d.instance_id if d else "") for p, d in refs}


@PLACEMENTS
@SPLITS
def test_a_job_that_forbids_mixed_precision_stays_at_one(placement: str, split: str) -> None:
    prefills = prefill("p", rate=1e-4), prefill("p8", rate=1e-5, precision="fp8")
    cluster = index(*prefills, decode("d"), decode("d8", precision="fp8"))
    assert decided(placement, split, cluster, one_precision=True) <= {("p", "d"), ("p", ""), ("", "d")}
    begun = {"one_precision": True, "precision": "fp8", "begun": True}
    assert decided(placement, split, cluster, **begun) <= {("p8", "d8"), ("p8", ""), ("", "d8")}
    if placement != "round_robin":  # it takes turns, and no job is booked here
        assert any("p8" in pair for pair in decided(placement, split, cluster))


@PLACEMENTS
def test_without_a_prefill_instance_of_its_precision_a_decode_instance_computes_the_whole_job(placement: str) -> None:
    cluster = index(prefill("p8", precision="fp8"), decode("d"))
    assert decided(placement, "full", cluster, one_precision=True) == {("", "d")}
    only = index(prefill("p"), decode("d4", precision="int4"), decode("e4", precision="int4"))
    assert decided(placement, "full", only, one_precision=True) <= {("", "d4"), ("", "e4")}  # there is no other
    with pytest.raises(Unavailable, match="no ready decode instance has the precision of this request"):
        decided(placement, "full", cluster, one_precision=True, precision="int8", begun=True)
