"""Loads that are taken in one by one come to what an index built of all of them is."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import InstanceRef, Route
from shared.errors import Unavailable
from shared.policy.index import HOLD_S, UNKNOWN_S_PER_TOKEN, ClusterIndex, LoadTracker, chunked_rate, queued_prefill_s
from shared.policy.ledger import Assignment, assignments, mark_of, promise_of, promised_to
from shared.policy.placement import LeastLoad
from tests.shared.policy.views import chunked_rates, decode, index, instance, job, prefill, prompt_rates, view

CHUNKED = chunked_rates(0.0, 1e-6, 0.0256)


def update(live: LoadTracker, whole: ClusterView, now: float, rng: Random) -> None:
    assert live.apply(ClusterDelta.from_view(whole), now, rng)


def waits(cluster: ClusterIndex) -> dict[str, float]:
    return {instance_id: waits_s for keys in cluster.backlog.classes() for waits_s, _, instance_id in keys}


def test_a_cluster_is_coupled_iff_no_instance_has_the_prefill_role() -> None:
    assert index(decode("a")).coupled
    assert index().coupled
    mixed = index(decode("a"), prefill("b", state=InstanceState.STARTING))
    assert not mixed.coupled
    assert (mixed.placing, len(mixed.candidates)) == (Role.PREFILL, 0)


def test_bookings_show_in_loads_and_backlogs_whenever_the_backlog_is_built() -> None:
    for early in (True, False):
        cluster = index(prefill("p", rate=1e-3, base=0.5), decode("d", free_blocks=10))
        if early:
            assert waits(cluster) == {"p": 0.0}
        cluster.book(Assignment("p", 0.0, prefill_tokens=100))
        cluster.book(Assignment("d", 0.0, prefill_tokens=20, decode_tokens=33, heavy=True))
        cluster.book(Assignment("nobody", 0.0, prefill_tokens=20, decode_tokens=33))
        assert waits(cluster) == {"p": pytest.approx(0.6)}
        p, d = cluster.prefill.views[0].load, cluster.decode.views[0].load
        assert (p.queued_prefill, p.queued_prefill_tokens, p.decoding) == (1, 100, 0)
        assert (d.queued_prefill_tokens, d.decoding, d.heavy_decodes, d.context_tokens, d.free_blocks) == (
            20,
            1,
            1,
            33,
            7,
        )
        assert cluster.turn == 3


def test_each_dispatcher_has_its_own_view_of_a_broadcast() -> None:
    cluster = index(prefill("p"), decode("d", free_blocks=10))
    first, second = cluster.for_dispatch(), cluster.for_dispatch()
    first.book(Assignment("d", 0.0, decode_tokens=16))
    assert [i.decode.views[0].load.free_blocks for i in (cluster, first, second)] == [10, 9, 10]
    cluster.book(Assignment("d", 0.0, decode_tokens=32))
    assert [i.decode.views[0].load.free_blocks for i in (cluster, first, second)] == [8, 9, 10]
    assert (cluster.turn, first.turn, second.turn) == (1, 1, 0)
    assert second.view is cluster.view


def test_in_a_coupled_cluster_decodes_slow_prefill_down() -> None:
    # A step of 512 tokens takes 25.6 ms + 1 us a context token; 256 decodes leave room for 256 prompt tokens.
    idle = decode("idle", rates=CHUNKED)
    busy = decode("busy", rates=CHUNKED, decoding=256, context_tokens=25_600)
    cluster = index(idle, busy)
    assert chunked_rate(idle)[0] * 1000 == pytest.approx(0.05)
    assert chunked_rate(busy)[0] * 1000 == pytest.approx(0.2)
    choice = LeastLoad().choose(job(1000), cluster, (), 0.0, Random(0))
    assert choice is not None
    assert choice.instance.instance_id == "idle"


def test_queued_seconds() -> None:
    busy = prefill("p", rate=1e-3, base=0.5, queued_prefill_tokens=100, queued_prefill=2)
    assert queued_prefill_s(busy) == pytest.approx(1.1)
    assert queued_prefill_s(prefill("p", queued_prefill_tokens=100)) == pytest.approx(100 * UNKNOWN_S_PER_TOKEN)


def backlogs(live: LoadTracker) -> dict[str, float]:
    return {instance_id: waits_s for keys in live.current.backlog.classes() for waits_s, _, instance_id in keys}


def test_before_the_first_broadcast_there_is_nothing_to_decide_on() -> None:
    live = LoadTracker()
    assert not live.known
    with pytest.raises(Unavailable, match="no broadcast"):
        _ = live.current


def test_assignments_count_until_a_load_was_taken_after_them() -> None:
    live, rng = LoadTracker(), Random(0)
    update(live, view(prefill("p", time_s=10.0)), 10.1, rng)
    live.book(Assignment("p", 10.15, prefill_tokens=100))
    assert backlogs(live) == {"p": 100.0}
    update(live, view(prefill("p", time_s=10.12)), 10.2, rng)  # taken before the assignment: still on top
    assert backlogs(live) == {"p": 100.0}
    update(live, view(prefill("p", time_s=10.22, queued_prefill_tokens=100)), 10.3, rng)
    assert backlogs(live) == {"p": 100.0}  # the load has it now: not twice


def test_without_broadcasts_bookings_end_with_their_jobs_or_after_a_time() -> None:
    live, rng = LoadTracker(), Random(0)
    update(live, view(decode("d", free_blocks=1000), decode("e", free_blocks=1000)), 10.0, rng)
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
    update(live, view(decode("d")), now + HOLD_S + 2, rng)
    assert live.stale_s(now + HOLD_S + 2.1) == 0.0


def test_a_bound_decode_counts_over_broadcasts_until_a_load_shows_it() -> None:
    live, rng = LoadTracker(), Random(0)
    before, shown = view(decode("d"), prefill("p")), view(decode("d", decoding=1, time_s=40.0), prefill("p"))
    update(live, before, 10.0, rng)
    route = Route(InstanceRef("p", 1, ""), InstanceRef("d", 1, ""), 60, "adaptive")
    live.ledger.add(job(100, job_id="j"), route, 10.0)
    for assignment in assignments(job(100, job_id="j"), route, 10.0):
        live.book(assignment)

    def decoding() -> tuple[int, int, int]:
        load = live.current.decode.views[0].load
        return load.decoding, load.context_tokens, load.queued_prefill_tokens

    assert decoding() == (1, 100, 40)
    update(live, before, 30.0, rng)  # long after, its prompt is still computed elsewhere
    assert decoding() == (1, 100, 40)
    assert live.current.decode.views[0].load.inbound_bytes == 60 * decode("d").info.kv_bytes_per_token
    live.arrived("j", 35.0)
    update(live, before, 35.1, rng)
    assert decoding() == (1, 100, 40)
    update(live, shown, 40.0, rng)
    assert decoding() == (1, 0, 0)


def test_a_load_that_names_the_jobs_that_came_shows_those_however_long_they_took() -> None:
    live, rng = LoadTracker(), Random(0)
    update(live, view(decode("d", time_s=10.0)), 10.0, rng)
    for name in ("slow", "quick"):
        live.book(Assignment("d", 10.01, decode_tokens=10, job_id=name))
    came = (mark_of("quick"),)
    update(live, view(decode("d", time_s=10.2, decoding=1, accepted=came)), 10.2, rng)
    assert live.current.decode.views[0].load.decoding == 2, "one in the load, the other on its way"
    came = (mark_of("quick"), mark_of("slow"))
    update(live, view(decode("d", time_s=10.3, decoding=2, accepted=came)), 10.3, rng)
    assert live.current.decode.views[0].load.decoding == 2


def test_a_decode_that_has_come_counts_once_although_nobody_has_reported_it_yet() -> None:
    live, rng = LoadTracker(), Random(0)
    update(live, view(prefill("p"), decode("d", time_s=10.0)), 10.0, rng)
    asked = job(100, 50, job_id="j")
    route = Route(InstanceRef("p", 1, ""), InstanceRef("d", 1, ""), 100, "adaptive")
    live.ledger.add(asked, route, 10.0)
    for assignment in assignments(asked, route, 10.0):
        live.book(assignment)
    assert live.current.decode.views[0].load.decoding == 1
    came = (mark_of("j"),)
    update(live, view(prefill("p"), decode("d", time_s=10.1, decoding=1, accepted=came)), 10.1, rng)
    live.apply(ClusterDelta(2, 10.2, loads={"d": InstanceLoad(time_s=10.2, decoding=1, accepted=came)}), 10.2, rng)
    assert live.current.decode.views[0].load.decoding == 1


# Loads that are taken in one by one come to what an index built of all of them is
NAMES = ("p0", "p1", "d0", "d1", "d2")
FORM = StepForm(0.01, 1e-4, 1e-8, 1e-3)
RATES = (Rates(), prompt_rates(1e-4, 0.01), Rates(StepRates(FORM, FORM, FORM)))
LOADS = st.builds(
    InstanceLoad,
    queued_prefill=st.integers(0, 3),
    queued_prefill_tokens=st.integers(0, 500),
    decoding=st.integers(0, 5),
    context_tokens=st.integers(0, 5000),
    free_blocks=st.integers(0, 50),
    inflight=st.integers(0, 2),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.sampled_from(NAMES), LOADS),
        st.tuples(st.just("rates"), st.sampled_from(NAMES), st.sampled_from(RATES)),
        st.tuples(st.just("role"), st.sampled_from(NAMES), st.sampled_from(Role)),
        st.tuples(st.just("state"), st.sampled_from(NAMES), st.sampled_from(InstanceState)),
        st.tuples(st.just("place"), st.sampled_from(NAMES[:2]), st.sampled_from(NAMES[2:])),
        st.tuples(st.just("came"), st.integers(0, 30), st.none()),
        st.tuples(st.just("pass"), st.floats(0.0, 0.6), st.none()),
    ),
    max_size=30,
)


def picture(index: ClusterIndex) -> object:
    """All that a decision looks at, but for how ties break."""
    waits = {key[2]: key[0] for keys in index.backlog.classes() for key in keys}
    pressed = {key[2]: key[0] for keys in index.pressures.classes() for key in keys}
    kinds = sorted(sorted(key[2] for key in keys) for keys in index.pressures.classes() if keys)
    return index.prefill.views, index.decode.views, waits, pressed, kinds, index.coupled, index.size, index.turn


@given(EVENTS)
def test_step_by_step_is_the_same_as_all_at_once(events: list[tuple[str, object, object]]) -> None:
    one, all_at_once = LoadTracker(), LoadTracker()
    views = {name: instance(name, Role.PREFILL if name[0] == "p" else Role.DECODE) for name in NAMES}
    now, sequence = 100.0, 1
    first = view(*views.values(), sequence=sequence)
    assert one.apply(ClusterDelta.from_view(first), now, Random(0))
    update(all_at_once, first, now, Random(0))
    for number, (what, who, value) in enumerate(events):
        if what == "pass":
            now += who  # type: ignore[operator]
        elif what == "place":
            route = Route(InstanceRef(str(who), 1, ""), InstanceRef(str(value), 1, ""), 60, "adaptive")
            for tracker in (one, all_at_once):
                tracker.ledger.add(job(100, job_id=f"j{number}"), route, now)
                for assignment in assignments(job(100, job_id=f"j{number}"), route, now):
                    tracker.book(assignment)
        elif what == "came":
            for tracker in (one, all_at_once):
                tracker.arrived(f"j{who}", now)
            continue  # it shows from the next broadcast on
        else:
            before = views[str(who)]
            views[str(who)] = after = _after(before, what, value, now)
            sequence += 1
            loads = {after.instance_id: after.load} if what == "load" else {}
            assert one.apply(
                ClusterDelta(sequence, now, changed=() if loads else (after,), loads=loads), now, Random(0)
            )
            update(all_at_once, view(*views.values(), sequence=sequence), now, Random(0))
            _same_where_told(one.current, all_at_once.current, after)
    sequence += 1
    told = ClusterDelta(sequence, now, loads={name: one.load for name, one in views.items()})
    assert one.apply(told, now, Random(0))
    update(all_at_once, view(*views.values(), sequence=sequence), now, Random(0))
    assert picture(one.current) == picture(all_at_once.current)


def test_instances_that_come_go_and_change_move_within_the_index() -> None:
    rng, there = Random(5), dict[str, InstanceView]()
    rates = (prompt_rates(1e-4, 0.01), Rates(StepRates(FORM, FORM, FORM)))
    for number in range(20):
        role = Role.PREFILL if number % 2 else Role.DECODE
        there[f"i{number}"] = instance(f"i{number}", role, rates=rates[number % 3 % 2], decoding=number)
    live, sequence = LoadTracker(), 1
    assert live.apply(ClusterDelta.from_view(view(*there.values())), 0.0, rng)
    index = live.current
    for step in range(60):
        name, sequence = f"i{rng.randrange(30)}", sequence + 1
        known = there.pop(name, None)
        if known is None or rng.random() < 0.6:
            role, state = rng.choice(list(Role)), rng.choice([InstanceState.READY, InstanceState.DRAINING])
            there[name] = instance(name, role, state, rates=rates[step % 2], decoding=step, queued_prefill_tokens=step)
            delta = ClusterDelta(sequence, 0.0, changed=(there[name],))
        else:
            delta = ClusterDelta(sequence, 0.0, gone=(name,))
        assert live.apply(delta, 0.0, rng)
        assert live.current is index, "it is not built again"
        assert picture(index) == picture(ClusterIndex(view(*there.values()), rng=rng))


def _after(before: InstanceView, what: str, value: object, now: float) -> InstanceView:
    load = value if isinstance(value, InstanceLoad) else before.load
    fields = {name: getattr(load, name) for name in load.__struct_fields__}
    load = InstanceLoad(**{**fields, "time_s": now if what == "load" else before.load.time_s})
    rates = value if isinstance(value, Rates) else before.info.rates
    role = value if isinstance(value, Role) else before.role
    state = value if isinstance(value, InstanceState) else before.state
    return InstanceView(instance(before.instance_id, rates=rates).info, role, state, load)


def _same_where_told(one: ClusterIndex, other: ClusterIndex, about: InstanceView) -> None:
    name = about.instance_id
    assert one.prefill.get(name) == other.prefill.get(name)
    assert one.decode.get(name) == other.decode.get(name)


def test_a_decode_that_another_scheduler_has_bound_counts_by_the_load_and_an_own_one_once() -> None:
    one, route = job(100, job_id="j"), Route(InstanceRef("p", 1, ""), InstanceRef("d", 1, ""), 60, "adaptive")
    _, bound = assignments(one, route, 5.0)
    promised = promise_of(bound)
    assert promised_to("d", promised, 5.0) == replace(bound, job_id="")
    for own in (False, True):
        live = LoadTracker()
        if own:
            live.ledger.add(one, route, 5.0)
        update(live, view(prefill("p"), decode("d", promised=(promised,))), 10.0, Random(0))
        load = live.current.decode.views[0].load
        assert (load.decoding, load.coming, load.context_tokens) == (1, 1, 100)


def test_a_delta_after_a_gap_changes_nothing() -> None:
    tracker, rng = LoadTracker(), Random(0)
    assert not tracker.apply(ClusterDelta(1, 0.0), 0.0, rng)
    assert not tracker.known
    update(tracker, view(instance("p0"), sequence=5), 0.0, rng)
    before = tracker.current
    assert not tracker.apply(ClusterDelta(7, 0.1, gone=("p0",)), 0.1, rng)
    assert tracker.current is before
    assert tracker.apply(ClusterDelta(6, 0.1, loads={"p0": InstanceLoad(running=3), "new": InstanceLoad()}), 0.1, rng)
    assert tracker.current is before
    assert tracker.current.prefill.views[0].load.running == 3
    assert (tracker.current.sequence, tracker.current.size, tracker.moves) == (6, 1, 1)
    assert tracker.apply(ClusterDelta(7, 0.2, gone=("p0",)), 0.2, rng)
    assert (tracker.current.size, tracker.moves) == (0, 2)


PROMPT, ANSWER = 6, 500  # of a stream; it takes 512 tokens of KV


def test_an_adapter_that_an_instance_loads_or_unloads_counts_with_the_next_broadcast() -> None:
    tracker, rng = LoadTracker(), Random(0)
    update(tracker, ClusterView(1, 0.0, (prefill("p"), decode("d", adapters={"a": "1"}))), 0.0, rng)
    with_adapter = job(adapter="a")
    assert tracker.current.lacking(with_adapter) == {"p"}
    assert tracker.current.lacking(job()) == frozenset()
    for sequence, held, lacking in ((2, {"a": "1"}, set()), (3, {}, {"p"})):
        delta = ClusterDelta(sequence, 0.0, changed=(prefill("p", adapters=held),))
        assert tracker.apply(delta, 0.0, rng)
        assert tracker.current.lacking(with_adapter) == lacking
