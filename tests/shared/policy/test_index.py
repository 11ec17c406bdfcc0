"""Loads that are taken in one by one come to what an index built of all of them is."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.monitor_link import HEARTBEAT_S
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, InstanceState, InstanceView, Promised, Role
from shared.domain.job import JobView
from shared.domain.policies import PolicySet
from shared.domain.rates import ChunkedCost, PartialPrefillCost, Rates, StepForm, StepRates
from shared.domain.route import InstanceRef, PolicySpec, Route, Work
from shared.errors import Delayed, Unavailable
from shared.policy.assignment import Assignment, assignments, mark_of, promise_of
from shared.policy.decider import Decider
from shared.policy.decode_admission import ahead_of
from shared.policy.index import (
    FORGET_S,
    HOLD_S,
    UNKNOWN_S_PER_TOKEN,
    ClusterIndex,
    LoadTracker,
    chunked_rate,
    prefill_rate,
    queued_prefill_s,
)
from shared.policy.placement import LeastLoad
from tests.shared.policy.views import decode, index, instance, job, prefill, view

CHUNKED = Rates(PartialPrefillCost(1e-4, 0.01), ChunkedCost(0.0, 1e-6, 0.0256))


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
        assert waits(cluster) == {"p": 0.6}
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
    assert abs(cluster.backlog.cost_s("idle", 1000) - 0.05) < 1e-9
    assert abs(cluster.backlog.cost_s("busy", 1000) - 0.2) < 1e-9
    choice = LeastLoad().choose(job(1000), cluster, (), 0.0, Random(0))
    assert choice is not None
    assert choice.instance.instance_id == "idle"


def test_in_a_coupled_cluster_a_booked_job_counts_as_prefill_and_as_decode() -> None:
    cluster = index(decode("a", rates=CHUNKED), decode("b", rates=CHUNKED))
    for _ in range(10):
        choice = LeastLoad().choose(job(500, 10), cluster, (), 0.0, Random(0))
        assert choice is not None
        cluster.book(Assignment(choice.instance.instance_id, 0.0, prefill_tokens=500, decode_tokens=500))
    assert [v.load.decoding for v in cluster.candidates.views] == [5, 5]
    assert all(waits_s > 0 for waits_s in waits(cluster).values())


def test_what_is_worked_out_once_a_broadcast_is_shared() -> None:
    cluster = index(decode("a"))
    made = cluster.cached("k", list)
    assert cluster.cached("k", list) is made
    assert cluster.for_dispatch().cached("k", list) is made
    assert ClusterIndex(view(), rng=Random(0)).cached("k", list) is not made


@pytest.mark.parametrize(
    ("cost", "rate"),
    [
        (None, (0.0, 0.0)),
        (PartialPrefillCost(1e-4, 0.02), (1e-4, 0.02)),
        (PartialPrefillCost(1e-4, -0.02), (1e-4, 0.0)),  # a fit's intercept may be negative; a cost may not
        (PartialPrefillCost(0.0, 0.02), (0.0, 0.0)),
    ],
)
def test_prefill_rate(cost: PartialPrefillCost | None, rate: tuple[float, float]) -> None:
    assert prefill_rate(Rates(prefill=cost)) == rate


def test_a_chunked_rate_falls_back_to_the_plain_one() -> None:
    plain = Rates(prefill=PartialPrefillCost(1e-4, 0.02))
    assert chunked_rate(decode("d", rates=plain)) == (1e-4, 0.02)
    odd = Rates(prefill=PartialPrefillCost(1e-4, 0.02), chunked=ChunkedCost(0.0, 0.0, -1.0))
    assert chunked_rate(decode("d", rates=odd)) == (1e-4, 0.02)


def test_more_decodes_than_a_step_has_tokens_leave_one() -> None:
    rates = Rates(chunked=ChunkedCost(0.0, 0.0, 0.01))
    assert chunked_rate(decode("d", rates=rates, decoding=9999)) == (0.01, 0.0)


def test_queued_seconds() -> None:
    assert queued_prefill_s(prefill("p", rate=1e-3, base=0.5, queued_prefill_tokens=100, queued_prefill=2)) == 1.1
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


# Loads that are taken in one by one come to what an index built of all of them is
NAMES = ("p0", "p1", "d0", "d1", "d2")
FORM = StepForm(0.01, 1e-4, 1e-8, 1e-3)
RATES = (
    Rates(),
    Rates(PartialPrefillCost(1e-4, 0.01)),
    Rates(PartialPrefillCost(5e-4, 0.02), step=StepRates(FORM, FORM, FORM)),
)
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
    costs = {name: index.backlog.cost_s(name, 1000) for name in waits}
    pressed = {key[2]: key[0] for keys in index.pressures.classes() for key in keys}
    kinds = sorted(sorted(key[2] for key in keys) for keys in index.pressures.classes() if keys)
    return index.prefill.views, index.decode.views, waits, costs, pressed, kinds, index.coupled, index.size, index.turn


@given(EVENTS)
def test_step_by_step_is_the_same_as_all_at_once(events: list[tuple[str, object, object]]) -> None:
    one, all_at_once = LoadTracker(), LoadTracker()
    views = {name: instance(name, Role.PREFILL if name[0] == "p" else Role.DECODE) for name in NAMES}
    now, sequence = 100.0, 1
    first = view(*views.values(), sequence=sequence)
    assert one.hear(ClusterDelta.of(first), now, Random(0))
    all_at_once.update(first, now, Random(0))
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
            assert one.hear(ClusterDelta(sequence, now, changed=() if loads else (after,), loads=loads), now, Random(0))
            all_at_once.update(view(*views.values(), sequence=sequence), now, Random(0))
            _same_where_told(one.current, all_at_once.current, after)
    sequence += 1
    told = ClusterDelta(sequence, now, loads={name: one.load for name, one in views.items()})
    assert one.hear(told, now, Random(0))
    all_at_once.update(view(*views.values(), sequence=sequence), now, Random(0))
    assert picture(one.current) == picture(all_at_once.current)


def _after(before: InstanceView, what: str, value: object, now: float) -> InstanceView:
    load = value if isinstance(value, InstanceLoad) else before.load
    fields = {name: getattr(load, name) for name in load.__struct_fields__}
    load = InstanceLoad(**{**fields, "time_s": now if what == "load" else before.load.time_s})
    rates = value if isinstance(value, Rates) else before.info.rates
    role = value if isinstance(value, Role) else before.role
    state = value if isinstance(value, InstanceState) else before.state
    return InstanceView(instance(before.instance_id, rates=rates).info, role, state, load)


def _same_where_told(one: ClusterIndex, other: ClusterIndex, about: InstanceView) -> None:
    """Others may still count what is forgotten once their own load is told, or a time is over."""
    name = about.instance_id
    assert one.prefill.get(name) == other.prefill.get(name)
    assert one.decode.get(name) == other.decode.get(name)


def test_other_policies_hold_at_once_though_nobody_moves() -> None:
    tracker, rng = LoadTracker(), Random(0)
    tracker.update(view(instance("p0"), sequence=5), 0.0, rng)
    assert not tracker.current.limited
    others = PolicySet(revision=2, step_budget=PolicySpec("on"))
    assert tracker.hear(ClusterDelta(6, 0.1, policies=others), 0.1, rng)
    assert tracker.current.limited
    assert tracker.current.view.policies == others
    assert tracker.moves == 1


def test_a_delta_after_a_gap_changes_nothing() -> None:
    tracker, rng = LoadTracker(), Random(0)
    assert not tracker.hear(ClusterDelta(1, 0.0), 0.0, rng)
    assert not tracker.known
    tracker.update(view(instance("p0"), sequence=5), 0.0, rng)
    before = tracker.current
    assert not tracker.hear(ClusterDelta(7, 0.1, gone=("p0",)), 0.1, rng)
    assert tracker.current is before
    assert tracker.hear(ClusterDelta(6, 0.1, loads={"p0": InstanceLoad(running=3), "new": InstanceLoad()}), 0.1, rng)
    assert tracker.current is before
    assert tracker.current.prefill.views[0].load.running == 3
    assert (tracker.current.sequence, tracker.current.size, tracker.moves) == (6, 1, 1)
    assert tracker.hear(ClusterDelta(7, 0.2, gone=("p0",)), 0.2, rng)
    assert (tracker.current.size, tracker.moves) == (0, 2)


# What several schedulers know of each other's placements: at the latest after `BOUND_S`, from loads off the wire
BROADCAST_S = 0.1  # `broadcast_period_s` of the monitor
HOP_S = 0.002  # of any message
BOUND_S = HEARTBEAT_S + BROADCAST_S + 4 * HOP_S  # the route, the announcement, the heartbeat, the broadcast
SLOW_FORM = StepForm(0.05, 0.0, 0.0, 0.0)
SLOW_RATES = Rates(step=StepRates(SLOW_FORM, SLOW_FORM, SLOW_FORM))
PROMPT, ANSWER = 6, 500  # of a stream; it takes 512 tokens of KV


@dataclass
class Instance:
    """A decode instance as far as its load goes. The jobs on their way to it, and those that decode, which do not end
    meanwhile.
    """

    shape: InstanceView
    promised: dict[str, Promised] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Streams that it has room for."""
        info = self.shape.info
        return info.total_blocks * info.block_size // 512

    def load(self, now: float) -> InstanceLoad:
        info, jobs = self.shape.info, len(self.active)
        return InstanceLoad(
            time_s=now,
            decoding=jobs,
            context_tokens=PROMPT * jobs,
            free_blocks=info.total_blocks - jobs,
            inflight=jobs,
            kv_ahead=ahead_of([(PROMPT, ANSWER)] * jobs, info.block_size),
            accepted=tuple(mark_of(name) for name in self.active),
            promised=tuple(self.promised.values()),
        )


class Suite:
    """Schedulers, a monitor and decode instances on one simulated clock; messages take `HOP_S` and go through msgpack.

    `computes_s`: the prefill instance has a prompt computed, and the job comes to its decode instance, so long after it
    was placed.
    """

    def __init__(self, *sizes: int, schedulers: int = 2, computes_s: float = 1.0, phase: float = 0.0) -> None:
        self.now, self.computes_s = 1000.0, computes_s
        self.instances = {
            f"d{at}": Instance(decode(f"d{at}", total_blocks=size // 16, rates=SLOW_RATES))
            for at, size in enumerate(sizes)
        }
        self.prefill = instance("p0", Role.PREFILL, rates=SLOW_RATES, total_blocks=8192 // 16)
        self.schedulers = [Decider(seed) for seed in range(schedulers)]
        self.placed: list[tuple[float, int, str]] = []  # when, by which scheduler, to which instance
        self._events: list[tuple[float, int, object]] = []
        self._number = count()
        self._told: dict[str, InstanceLoad] = {}
        self._sequence = 1
        shapes = [self.prefill, *(one.shape for one in self.instances.values())]
        policies = PolicySet(split=PolicySpec("full"), step_budget=PolicySpec("off"))  # every job comes later
        whole = msgspec.structs.replace(ClusterDelta.of(view(*shapes)), policies=policies)
        for each in self.schedulers:
            assert each.hear(_wired(whole), self.now)
        self._every(phase * HEARTBEAT_S, HEARTBEAT_S, self._beat)
        self._every(0.0, BROADCAST_S, self._broadcast)

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, act = heappop(self._events)
            act()  # type: ignore[operator]
        self.now = until_s

    def place(self, scheduler: int, job_id: str) -> Route:
        one = job(PROMPT, ANSWER, job_id, can_wait=True)
        route = self.schedulers[scheduler].decide(one, (), self.now)
        assert route.decode is not None
        self.placed.append((self.now, scheduler, route.decode.instance_id))
        self._later(2 * HOP_S, lambda: self._announced(one, route))
        return route

    def _announced(self, one: JobView, route: Route) -> None:
        assert route.decode is not None
        there = self.instances[route.decode.instance_id]
        (bound,) = [each for each in assignments(one, route, self.now) if each.decode_tokens]
        if bound.coming:
            there.promised[one.job_id] = msgspec.msgpack.decode(
                msgspec.msgpack.encode(promise_of(bound)), type=Promised
            )
            self._later(self.computes_s, lambda: self._came(one.job_id, there))
        else:
            self._came(one.job_id, there)

    def _came(self, job_id: str, there: Instance) -> None:
        there.promised.pop(job_id, None)
        there.active.append(job_id)

    def _beat(self) -> None:
        for name, one in self.instances.items():
            load = one.load(self.now)
            self._later(HOP_S, lambda name=name, load=load: self._told.__setitem__(name, load))  # type: ignore[misc]

    def _broadcast(self) -> None:
        self._sequence += 1
        delta = ClusterDelta(self._sequence, self.now, loads=dict(self._told))
        self._told.clear()
        for each in self.schedulers:
            self._later(HOP_S, lambda each=each: each.hear(_wired(delta), self.now))  # type: ignore[misc]

    def _every(self, first_s: float, period_s: float, act: object) -> None:
        def again() -> None:
            act()  # type: ignore[operator]
            self._later(period_s, again)

        self._later(first_s, again)

    def _later(self, seconds: float, act: object) -> None:
        heappush(self._events, (self.now + seconds, next(self._number), act))


def _wired(delta: ClusterDelta) -> ClusterDelta:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=ClusterDelta)


def _counted(suite: Suite, scheduler: int) -> dict[str, tuple[int, int]]:
    """By instance: decodes that a scheduler counts there, and the most KV that it expects."""
    index = suite.schedulers[scheduler]._live.current
    return {one.instance_id: (one.load.decoding, max(one.load.kv_ahead, default=0)) for one in index.decode.views}


@given(st.floats(0.0, 1.0), st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 2)), min_size=1, max_size=12))
def test_each_counts_what_the_others_placed_within_the_bound(phase: float, steps: list[tuple[float, int]]) -> None:
    """Also while the prompt is computed, and when it has come: no job is forgotten or counted twice on the way."""
    suite = Suite(8192, 8192, schedulers=3, phase=phase)
    for number, (pause_s, scheduler) in enumerate(steps):
        suite.run(suite.now + pause_s)
        suite.place(scheduler, f"j{number}")
        for other in range(3):
            for name, (decoding, ahead) in _counted(suite, other).items():
                own = [one for one in suite.placed if one[2] == name and one[1] == other]
                old = [one for one in suite.placed if one[2] == name and one[0] <= suite.now - BOUND_S]
                everyone = [one for one in suite.placed if one[2] == name]
                assert len({*own, *old}) <= decoding <= len(everyone)
                assert ahead == 512 * decoding
    for _ in range(20):
        suite.run(suite.now + 0.1)
        if suite.now - suite.placed[-1][0] > BOUND_S:
            assert _counted(suite, 0) == _counted(suite, 1) == _counted(suite, 2)
            assert sum(decoding for decoding, _ in _counted(suite, 0).values()) == len(steps)


def _overfull(suite: Suite) -> Iterator[tuple[str, int]]:
    for name, one in suite.instances.items():
        yield name, max(0, len(one.active) + len(one.promised) - one.room)


@pytest.mark.parametrize("sizes", [(8192, 8192), (11_264, 5632)])
@pytest.mark.parametrize("phase", [0.0, 0.3, 0.9])
def test_streams_that_come_slower_than_the_bound_overfill_no_instance(sizes: tuple[int, int], phase: float) -> None:
    """Their prompts wait for two seconds at the prefill instance: no decode instance holds any of them meanwhile."""
    suite = Suite(*sizes, computes_s=2.0, phase=phase)
    fits = sum(one.room for one in suite.instances.values())
    for number in range(fits):
        suite.place(number % 2, f"j{number}")
        suite.run(suite.now + BOUND_S + 0.001)
    suite.run(suite.now + 3.0)
    assert dict(_overfull(suite)) == {"d0": 0, "d1": 0}
    with pytest.raises(Delayed):
        suite.place(0, "one too many")


@pytest.mark.parametrize("gap_s", [0.0, 0.004, 0.02, 0.05])
@pytest.mark.parametrize("sizes", [(8192, 8192), (11_264, 5632)])
def test_a_burst_overfills_by_what_the_others_placed_within_the_bound_at_most(
    gap_s: float, sizes: tuple[int, int]
) -> None:
    suite, rng = Suite(*sizes), Random(3)
    fits = sum(one.room for one in suite.instances.values())
    for number in range(fits):
        try:
            suite.place(number % 2, f"j{number}")
        except Delayed:
            continue  # it waits in its gateway; what matters here is what was placed
        suite.run(suite.now + rng.uniform(0.0, 2.0 * gap_s))
    suite.run(suite.now + 2.0)
    for name, over in _overfull(suite):
        there = [(when, by) for when, by, where in suite.placed if where == name]
        unknown = [sum(by != its and when - BOUND_S < then <= when for then, its in there) for when, by in there]
        assert over <= max(unknown, default=0)
        assert over <= 1, "each spreads what it places, so that little is placed twice"
