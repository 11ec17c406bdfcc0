"""Deltas come to what they are the changes of, or say that something is missing."""

from collections.abc import Mapping

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.cluster import ClusterDelta, ClusterState
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.policies import PolicySet
from tests.shared.policy.views import decode, prefill, view

STEPS = st.lists(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.one_of(st.none(), st.tuples(st.sampled_from(Role), st.sampled_from(InstanceState), st.integers(0, 3))),
        max_size=5,
    ),
    max_size=12,
)


def made(name: str, what: tuple[Role, InstanceState, int]) -> InstanceView:
    role, state, load = what
    return InstanceView(prefill(name).info, role, state, InstanceLoad(running=load))


def between(sequence: int, before: Mapping[str, InstanceView], after: Mapping[str, InstanceView]) -> ClusterDelta:
    loads, changed = {}, []
    for name, one in after.items():
        known = before.get(name)
        if known is not None and (known.role, known.state) == (one.role, one.state):
            if known.load != one.load:
                loads[name] = one.load
        else:
            changed.append(one)
    gone = tuple(name for name in before if name not in after)
    return ClusterDelta(sequence, float(sequence), changed=tuple(changed), loads=loads, gone=gone)


@given(STEPS)
def test_all_changes_together_are_the_cluster(steps: list[dict[str, tuple[Role, InstanceState, int] | None]]) -> None:
    state, now, sequence = ClusterState(), dict[str, InstanceView](), 7
    assert state.apply(ClusterDelta(sequence, 0.0, whole=True))
    for step in steps:
        after = {name: made(name, what) for name, what in {**_plain(now), **step}.items() if what is not None}
        sequence += 1
        delta = between(sequence, now, after)
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=ClusterDelta)
        moved = {n: (v.role, v.state) for n, v in now.items()} != {n: (v.role, v.state) for n, v in after.items()}
        assert state.moved(wire) is moved
        assert state.apply(wire)
        assert {one.instance_id: one for one in state.view().instances} == after
        assert (state.sequence, len(state)) == (sequence, len(after))
        now = after


def _plain(now: Mapping[str, InstanceView]) -> dict[str, tuple[Role, InstanceState, int] | None]:
    return {name: (one.role, one.state, one.load.running) for name, one in now.items()}


def test_a_change_after_a_gap_changes_nothing_and_all_of_it_mends_that() -> None:
    state = ClusterState()
    assert not state.apply(ClusterDelta(1, 0.0))  # nothing is known yet
    assert state.view() == ClusterView(0, 0.0)
    assert state.apply(ClusterDelta.from_view(view(prefill("p"), sequence=5)))
    before = state.view()
    assert not state.apply(ClusterDelta(7, 0.0, gone=("p",)))
    assert not state.apply(ClusterDelta(5, 0.0, gone=("p",)))  # one that comes again
    assert state.view() is before
    assert state.apply(
        ClusterDelta.from_view(view(decode("d"), sequence=2))
    )  # of another monitor, whose clock is behind
    assert [one.instance_id for one in state.view().instances] == ["d"]


def test_policies_stay_until_others_are_told() -> None:
    state, others = ClusterState(), PolicySet(revision=3)
    assert state.apply(ClusterDelta(1, 0.0, whole=True, policies=others))
    assert state.apply(ClusterDelta(2, 0.0, loads={"nobody": InstanceLoad()}))
    assert state.view() == ClusterView(2, 0.0, (), others)
