from collections import Counter
from random import Random

import pytest

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad
from shared.domain.route import InstanceRef, Route, Work
from shared.errors import Unavailable
from shared.policy.assignment import Assignment, assignments, mark_of
from shared.policy.index import FORGET_S, HOLD_S, LoadTracker
from tests.shared.policy.views import decode, job, prefill, view


def backlogs(live: LoadTracker) -> dict[str, float]:
    return {instance_id: waits_s for keys in live.current.backlog.classes() for waits_s, _, instance_id in keys}


def test_before_the_first_broadcast_there_is_nothing_to_decide_on() -> None:
    live = LoadTracker()
    assert not live.known
    with pytest.raises(Unavailable, match="no broadcast"):
        _ = live.current


def test_assignments_count_until_a_load_was_taken_after_them() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(prefill("p", time_s=10.0)), 10.1, rng)
    live.book(Assignment("p", 10.15, prefill_tokens=100))
    assert backlogs(live) == {"p": 100.0}
    live.update(view(prefill("p", time_s=10.12)), 10.2, rng)  # taken before the assignment: still on top
    assert backlogs(live) == {"p": 100.0}
    live.update(view(prefill("p", time_s=10.22, queued_prefill_tokens=100)), 10.3, rng)
    assert backlogs(live) == {"p": 100.0}  # the load has it now: not twice


def test_a_clock_that_lags_does_not_count_for_ever() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(prefill("p", time_s=1.0)), 10.0, rng)
    live.book(Assignment("p", 10.0, prefill_tokens=100))
    live.update(view(prefill("p", time_s=1.1)), 10.0 + FORGET_S, rng)
    assert backlogs(live) == {"p": 0.0}


def test_a_lost_instance_takes_its_assignments_along() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(prefill("p"), prefill("q")), 10.0, rng)
    live.book(Assignment("p", 10.0, prefill_tokens=100))
    live.update(view(prefill("q")), 10.1, rng)
    assert backlogs(live) == {"q": 0.0}


def test_decode_assignments_count_too() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(decode("d", free_blocks=10)), 10.0, rng)
    live.book(Assignment("d", 10.0, decode_tokens=33, heavy=True))
    load = live.current.decode.views[0].load
    assert (load.decoding, load.heavy_decodes, load.context_tokens, load.free_blocks) == (1, 1, 33, 7)


def test_without_broadcasts_bookings_end_with_their_jobs_or_after_a_time() -> None:
    """The monitor is away for minutes; jobs come and go."""
    live, rng = LoadTracker(), Random(0)
    live.update(view(decode("d", free_blocks=1000), decode("e", free_blocks=1000)), 10.0, rng)
    now = 10.0
    for number in range(3000):  # 10 a second for 5 minutes, each over after 2 s
        now = 10.0 + number / 10
        live.book(Assignment("d", now, decode_tokens=100, job_id=f"j{number}"))
        if number >= 20:
            live.ended(f"j{number - 20}")
    load = live.current.decode.views[0].load
    assert load.decoding <= 30
    assert load.free_blocks >= 1000 - 30 * 7
    assert live.stale_s(now) == pytest.approx(now - 10.0)
    live.book(Assignment("d", now + HOLD_S + 1, decode_tokens=100))  # all others are too old, ended or not
    assert live.current.decode.views[0].load.decoding == 1
    live.update(view(decode("d")), now + HOLD_S + 2, rng)
    assert live.stale_s(now + HOLD_S + 2.1) == 0.0


def test_turns_go_on_over_broadcasts() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(prefill("p")), 10.0, rng)
    live.book(Assignment("p", 10.0, prefill_tokens=1))
    live.update(view(prefill("p")), 10.1, rng)
    assert live.current.turn == 1


def test_idle_instances_are_liked_differently_after_each_broadcast() -> None:
    live, rng, first = LoadTracker(), Random(0), Counter[str]()
    for step in range(300):
        live.update(view(prefill("a"), prefill("b"), prefill("c")), step / 10, rng)
        (keys,) = live.current.backlog.classes()
        first[keys[0][2]] += 1
    assert min(first.values()) > 60


def test_the_ledger_outlives_broadcasts_until_its_instance_is_gone() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(decode("d", inflight=1)), 10.0, rng)
    live.ledger.add(job(job_id="j"), Route(None, InstanceRef("d", 1, ""), 0, "workload", work=Work(2.0, 30)), 10.0)
    for step in range(1, 4):
        live.update(view(decode("d", inflight=1)), 10.0 + step, rng)
        assert live.current.ledger is live.ledger
        assert (live.ledger.score("d"), live.ledger.tokens_at("d")) == (2.0, 30)
    live.update(view(decode("e")), 14.0, rng)
    assert len(live.ledger) == 0


def test_a_bound_decode_counts_over_broadcasts_until_a_load_shows_it() -> None:
    live, rng = LoadTracker(), Random(0)
    before, shown = view(decode("d"), prefill("p")), view(decode("d", decoding=1, time_s=40.0), prefill("p"))
    live.update(before, 10.0, rng)
    route = Route(InstanceRef("p", 1, ""), InstanceRef("d", 1, ""), 60, "adaptive")
    live.ledger.add(job(100, job_id="j"), route, 10.0)
    for assignment in assignments(job(100, job_id="j"), route, 10.0):
        live.book(assignment)

    def decoding() -> tuple[int, int, int]:
        load = live.current.decode.views[0].load
        return load.decoding, load.context_tokens, load.queued_prefill_tokens

    assert decoding() == (1, 100, 40)
    live.update(before, 30.0, rng)  # long after, its prompt is still computed elsewhere
    assert decoding() == (1, 100, 40)
    assert live.current.decode.views[0].load.inbound_bytes == 60 * decode("d").info.kv_bytes_per_token
    live.arrived("j", 35.0)
    live.update(before, 35.1, rng)
    assert decoding() == (1, 100, 40)
    live.update(shown, 40.0, rng)
    assert decoding() == (1, 0, 0)


def test_a_load_that_names_the_jobs_that_came_shows_those_however_long_they_took() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(decode("d", time_s=10.0)), 10.0, rng)
    for name in ("slow", "quick"):
        live.book(Assignment("d", 10.01, decode_tokens=10, job_id=name))
    came = (mark_of("quick"),)
    live.update(view(decode("d", time_s=10.2, decoding=1, accepted=came)), 10.2, rng)
    assert live.current.decode.views[0].load.decoding == 2, "one in the load, the other on its way"
    came = (mark_of("quick"), mark_of("slow"))
    live.update(view(decode("d", time_s=10.3, decoding=2, accepted=came)), 10.3, rng)
    assert live.current.decode.views[0].load.decoding == 2


def test_a_decode_that_has_come_counts_once_although_nobody_has_reported_it_yet() -> None:
    live, rng = LoadTracker(), Random(0)
    live.update(view(prefill("p"), decode("d", time_s=10.0)), 10.0, rng)
    asked = job(100, 50, job_id="j")
    route = Route(InstanceRef("p", 1, ""), InstanceRef("d", 1, ""), 100, "adaptive")
    live.ledger.add(asked, route, 10.0)
    for assignment in assignments(asked, route, 10.0):
        live.book(assignment)
    assert live.current.decode.views[0].load.decoding == 1
    came = (mark_of("j"),)
    live.update(view(prefill("p"), decode("d", time_s=10.1, decoding=1, accepted=came)), 10.1, rng)
    live.hear(ClusterDelta(2, 10.2, loads={"d": InstanceLoad(time_s=10.2, decoding=1, accepted=came)}), 10.2, rng)
    assert live.current.decode.views[0].load.decoding == 1
