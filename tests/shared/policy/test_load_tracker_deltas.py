"""Loads that are taken in one by one come to what an index built of all of them is."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.policies import PolicySet
from shared.domain.rates import PartialPrefillCost, Rates, StepForm, StepRates
from shared.domain.route import InstanceRef, PolicySpec, Route
from shared.policy.assignment import assignments
from shared.policy.index import ClusterIndex, LoadTracker
from tests.shared.policy.views import instance, job, view

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
