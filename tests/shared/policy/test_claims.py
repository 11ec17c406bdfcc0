"""Room that is kept for a job which has been held for long."""

import heapq
from random import Random

import msgspec
import pytest

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, InstanceLoad
from shared.domain.job import FirstTokenOut, JobView, Slo
from shared.domain.policies import PolicySet
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import PolicySpec
from shared.errors import Delayed
from shared.policy import overload
from shared.policy.claims import FORGET_S, KEEP_S, Claims
from shared.policy.decider import Decider
from shared.policy.decode_admission import ahead_of
from shared.policy.overload import HOLD_LOOK_S
from tests.shared.policy.views import decode, job

STEP_S = 0.02
FORM = StepForm(STEP_S, 0.0, 0.0, 0.0)
RATES = Rates(step=StepRates(FORM, FORM, FORM))
SMOOTH = Slo("smooth", 5.0, 0.2, first_token=FirstTokenOut.SMOOTH)
LIGHT = Slo("light", 5.0, 0.2, weight=0.25, first_token=FirstTokenOut.SMOOTH)


def asked(job_id: str, prompt: int, answer: int, slo: Slo = SMOOTH) -> JobView:
    return job(prompt, answer, job_id, slo=slo, can_wait=True)


def test_only_jobs_that_were_held_for_less_long_leave_the_room() -> None:
    claims = Claims()
    old, young = asked("old", 100, 50), asked("young", 100, 60)
    claims.hold(old, "d", 100, 50, 0.0)
    claims.hold(young, "d", 100, 60, 1.0)
    assert claims.before(asked("new", 10, 10), 1.0) == {}, "not held for long enough"
    for each in (old, young):
        claims.hold(each, "d", 100, each.max_tokens, 1.0 + KEEP_S)
    now = 1.0 + KEEP_S
    assert claims.before(asked("new", 10, 10), now) == {"d": [(100, 50), (100, 60)]}
    assert claims.before(young, now) == {"d": [(100, 50)]}
    assert claims.before(old, now) == {}
    assert claims.before(msgspec.structs.replace(asked("new", 10, 10), begun=True), now) == {}
    claims.drop("old")
    assert claims.before(young, now) == {}


def test_heavier_classes_leave_it_later_by_the_ratio_of_the_weights() -> None:
    claims = Claims()
    for now in (0.0, 3.9 * KEEP_S, 4.0 * KEEP_S):
        claims.hold(asked("j", 100, 50, LIGHT), "d", 100, 50, now)
        assert bool(claims.before(asked("heavier", 10, 10), now)) == (now >= 4.0 * KEEP_S)
        assert bool(claims.before(asked("alike", 10, 10, LIGHT), now)) == (now > 0.0)


def test_one_that_does_not_ask_any_more_is_forgotten() -> None:
    claims = Claims()
    claims.hold(asked("gone", 100, 50), "d", 100, 50, 0.0)
    claims.hold(asked("gone", 100, 50), "d", 100, 50, KEEP_S)
    assert claims.before(asked("new", 10, 10), KEEP_S + FORGET_S)
    assert not claims.before(asked("new", 10, 10), KEEP_S + FORGET_S + 0.01)
    claims.hold(asked("other", 100, 50), "d", 100, 50, KEEP_S + FORGET_S + 0.01)
    assert len(claims) == 1


def test_its_instance_stays_the_same_once_room_is_kept_there() -> None:
    claims = Claims()
    for now, there in ((0.0, "d0"), (1.0, "d1"), (KEEP_S, "d0"), (KEEP_S + 1.0, "d0")):
        claims.hold(asked("j", 100, 50), there, 100, 50, now)
    assert claims.instance_of("j") == "d1"
    claims.move("j", "d0")
    assert claims.instance_of("j") == "d0"


class Crowd:
    """Small jobs that come faster than their answers end, each from a gateway of its own, and one large job among them.

    Simulated time; an answer's tokens come every `STEP_S`. All ask again when they were told to.
    """

    def __init__(self, schedulers: int = 1, instances: int = 1) -> None:
        self.views = [decode(f"d{at}", rates=RATES, total_blocks=8192 // 16) for at in range(instances)]
        self.running: dict[str, dict[str, tuple[float, JobView]]] = {one.instance_id: {} for one in self.views}
        self.schedulers = [Decider(seed) for seed in range(schedulers)]
        self.placed: dict[str, tuple[float, float]] = {}  # when it came, and when it was placed
        self._sequence = 1
        whole = ClusterView(1, 0.0, tuple(self.views), PolicySet(step_budget=PolicySpec("off")))
        for each in self.schedulers:
            assert each.hear(ClusterDelta.of(whole), 0.0)

    def run(self, large: JobView, small_slo: Slo, small_per_s: float, until_s: float, large_s: float = 20.0) -> None:
        rng, events, number = Random(1), list[tuple[float, int, JobView, float]](), 0
        for at in range(int(small_per_s * until_s)):
            came_s = at / small_per_s
            events.append((came_s, at, asked(f"s{at}", 50, rng.randint(150, 206), small_slo), came_s))
        events.append((large_s, -1, large, large_s))
        heapq.heapify(events)
        told_s = 0.0
        while events:
            now, number, one, came_s = heapq.heappop(events)
            if now > until_s or large.job_id in self.placed:
                return
            while told_s + 0.1 <= now:
                told_s += 0.1
                self._broadcast(told_s)
            scheduler = self.schedulers[max(0, number) % len(self.schedulers)]
            try:
                route = scheduler.decide(msgspec.structs.replace(one, waited_s=now - came_s), (), now)
            except Delayed as delay:
                heapq.heappush(events, (now + (delay.retry_after_s or 0.0), number, one, came_s))
                continue
            assert route.decode is not None
            self.running[route.decode.instance_id][one.job_id] = now, one
            self.placed[one.job_id] = came_s, now

    def _broadcast(self, now: float) -> None:
        self._sequence += 1
        loads = {}
        for view in self.views:
            there = self.running[view.instance_id]
            for job_id, (began_s, one) in list(there.items()):
                if now - began_s >= one.max_tokens * STEP_S:
                    del there[job_id]
                    for each in self.schedulers:
                        each.ended(job_id, one.max_tokens, True, now)
            given = [(int((now - began_s) / STEP_S), one) for began_s, one in there.values()]
            held = [one.prompt_tokens + tokens for tokens, one in given]
            ahead = ahead_of([(h, one.max_tokens - t) for h, (t, one) in zip(held, given, strict=True)], 16)
            loads[view.instance_id] = InstanceLoad(
                time_s=now,
                decoding=len(held),
                context_tokens=sum(held),
                free_blocks=max(0, 512 - sum(-(-tokens // 16) for tokens in held)),
                inflight=len(held),
                kv_ahead=ahead,
            )
        for each in self.schedulers:
            assert each.hear(ClusterDelta(self._sequence, now, loads=loads), now)


ANSWER_S = 206 * STEP_S  # the longest of a small job


@pytest.mark.parametrize(("slo", "keep_s"), [(SMOOTH, KEEP_S), (LIGHT, 4.0 * KEEP_S)])
@pytest.mark.parametrize("instances", [1, 2])
def test_a_large_job_waits_no_longer_than_until_room_is_kept_and_the_answers_there_have_ended(
    slo: Slo, keep_s: float, instances: int
) -> None:
    crowd = Crowd(instances=instances)
    crowd.run(asked("large", 3000, 1000, slo), SMOOTH, 12.0 * instances, 80.0)
    came_s, placed_s = crowd.placed["large"]
    assert placed_s - came_s <= keep_s + ANSWER_S + 2 * HOLD_LOOK_S
    small = [placed_s - came_s for job_id, (came_s, placed_s) in crowd.placed.items() if job_id != "large"]
    assert len(small) > 100, "the others go on"


def test_what_another_scheduler_places_delays_it_until_it_begins_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other scheduler does not know that room is kept, and fills the instance by itself."""
    monkeypatch.setattr(overload, "HOLD_MOST_S", 8.0)
    crowd = Crowd(schedulers=2)
    crowd.run(asked("large", 3000, 1000), SMOOTH, 20.0, 20.0, large_s=6.0)
    came_s, placed_s = crowd.placed["large"]
    assert placed_s - came_s <= 8.0 + HOLD_LOOK_S


def test_a_job_that_does_not_ask_leaves_no_room_kept_for_it() -> None:
    """Its client has left: small jobs go on as before."""
    crowd = Crowd()
    large = asked("large", 3000, 1000)
    crowd.run(large, SMOOTH, 12.0, 6.0, large_s=100.0)
    (scheduler,) = crowd.schedulers
    for now in (6.0, 8.1):
        with pytest.raises(Delayed):
            scheduler.decide(large, (), now)
    with pytest.raises(Delayed):
        scheduler.decide(asked("small", 50, 150), (), 8.2)
    scheduler.ended("large", 0, None, 8.3)
    assert not scheduler.ledger.claims.before(asked("small", 50, 150), 8.3)
