from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.policy import registry
from shared.policy.role_flip import FlipDecision, IdleFlip, PressureFlip, RoleFlip, Seen, load_share
from tests.shared.policy.views import decode, instance, prefill, view

BUSY = {"free_blocks": 100}  # of 1000
QUIET = {"free_blocks": 950}


def watch(policy: RoleFlip, views: list[ClusterView], every_s: float = 1.0) -> list[tuple[float, FlipDecision]]:
    """Every decision with its time, when the policy sees these clusters one after the other."""
    state, made = policy.start(), []
    for step, cluster in enumerate(views):
        state, decision = policy.step(state, cluster, step * every_s)
        if decision is not None:
            made.append((step * every_s, decision))
    return made


def first(policy: RoleFlip, *instances: InstanceView, seconds: int = 120) -> tuple[float, str, Role] | None:
    made = watch(policy, [view(*instances)] * seconds)
    return (made[0][0], made[0][1].instance_id, made[0][1].to) if made else None


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (decode("d", free_blocks=1000), 0.0),
        (decode("d", free_blocks=250), 0.75),
        (decode("d", free_blocks=0, queued_prefill_tokens=9999), 1.0),
        (prefill("p", queued_prefill_tokens=128), 0.25),
        (prefill("p", queued_prefill_tokens=9999), 1.0),
        (prefill("p", free_blocks=500, queued_prefill_tokens=128), 0.5),
    ],
)
def test_load_share(one: InstanceView, share: float) -> None:
    assert load_share(one) == pytest.approx(share)


IDLE: list[tuple[str, list[InstanceView], tuple[float, str, Role] | None]] = [
    ("idle for a minute (TetriInfer 5.1)", [prefill("p"), prefill("q"), decode("d", **BUSY)], (60.0, "p", Role.DECODE)),
    (
        "under 10 % is idle (TetriInfer 3.5)",
        [prefill("p", **BUSY), decode("d", **BUSY), decode("e", **QUIET)],
        (60.0, "e", Role.PREFILL),
    ),
    ("10 % is not", [prefill("p", **BUSY), decode("d", **BUSY), decode("e", free_blocks=900)], None),
    ("the last of a role stays", [prefill("p"), decode("d", **BUSY), decode("e", **BUSY)], None),
    (
        "the last ready of a role stays",
        [prefill("p"), prefill("q", state=InstanceState.UNRESPONSIVE), decode("d", **BUSY)],
        None,
    ),
    ("all are idle: nothing would be won", [prefill("p"), prefill("q"), decode("d"), decode("e")], None),
    (
        "another one drains",
        [prefill("p"), prefill("q"), decode("d", **BUSY), decode("e", state=InstanceState.DRAINING)],
        None,
    ),
]


@pytest.mark.parametrize(("what", "instances", "expected"), IDLE, ids=[row[0] for row in IDLE])
def test_idle_by_example(what: str, instances: list[InstanceView], expected: tuple[float, str, Role] | None) -> None:
    assert first(IdleFlip(), *instances) == expected


def test_a_moment_of_work_starts_the_minute_anew() -> None:
    idle, busy = (
        view(prefill("p"), prefill("q", **BUSY), decode("d", **BUSY)),
        view(prefill("p", queued_prefill_tokens=400), prefill("q", **BUSY), decode("d", **BUSY)),
    )
    made = watch(IdleFlip(), [idle] * 50 + [busy] + [idle] * 70)
    assert [(at, decision.instance_id) for at, decision in made] == [(111.0, "p")]


def test_a_flip_that_was_not_carried_out_is_decided_again_after_a_minute() -> None:
    made = watch(IdleFlip(), [view(prefill("p"), prefill("q", **BUSY), decode("d", **BUSY))] * 180)
    assert [at for at, _ in made] == [60.0, 121.0]


def test_the_reasons_hold_the_figures() -> None:
    ((_, decision),) = watch(IdleFlip(for_s=1.0), [view(prefill("p"), prefill("q", **BUSY), decode("d", **BUSY))] * 2)
    assert decision.reasons[0].what == "role_flip:idle"
    assert decision.reasons[0].figures["highest_load_of_other_role"] == 0.9


QUEUED = {"queued_prefill_tokens": 30_000, "rate": 1e-4}  # 3 s of prefill
PRESSURE: list[tuple[str, list[InstanceView], tuple[float, str, Role] | None]] = [
    (
        "prefill waits, decode does not: the emptier one goes",
        [prefill("p", **QUEUED), decode("d", **QUIET), decode("e", free_blocks=980)],
        (5.0, "e", Role.PREFILL),
    ),
    (
        "decode memory is wanted twice over",
        [prefill("p"), prefill("q", queued_prefill_tokens=100), decode("d", free_blocks=0, running=8, waiting=8)],
        (5.0, "p", Role.DECODE),
    ),
    (
        "jobs wait for memory though none runs",
        [prefill("p"), prefill("q"), decode("d", waiting=3)],
        (5.0, "p", Role.DECODE),
    ),
    (
        "both are under pressure",
        [
            prefill("p", **QUEUED),
            decode("d", free_blocks=0, running=8, waiting=8),
            decode("e", free_blocks=0, running=8, waiting=8),
        ],
        None,
    ),
    ("unequal, but both light", [prefill("p", queued_prefill_tokens=3000, rate=1e-4), decode("d"), decode("e")], None),
    ("the last one stays", [prefill("p", **QUEUED), decode("d")], None),
    ("nobody to relieve", [decode("d"), decode("e")], None),
    (
        "it would turn the order round: 0.6 over 1 against 0.25 over 2",
        [
            prefill("p", queued_prefill_tokens=6000, rate=1e-4),
            decode("d", free_blocks=750),
            decode("e", free_blocks=750),
        ],
        None,
    ),
    (
        "another one drains",
        [prefill("p", **QUEUED), decode("d"), decode("e"), decode("f", state=InstanceState.DRAINING)],
        None,
    ),
]


@pytest.mark.parametrize(("what", "instances", "expected"), PRESSURE, ids=[row[0] for row in PRESSURE])
def test_pressure_by_example(
    what: str, instances: list[InstanceView], expected: tuple[float, str, Role] | None
) -> None:
    assert first(PressureFlip(), *instances) == expected


def test_pressure_has_to_last_and_flips_have_to_rest() -> None:
    high = view(prefill("p", **QUEUED), *(decode(f"d{at}") for at in range(4)))
    low = view(prefill("p"), *(decode(f"d{at}") for at in range(4)))
    assert watch(PressureFlip(), ([high] * 5 + [low]) * 20) == []
    assert [at for at, _ in watch(PressureFlip(), [high] * 80)] == [5.0, 35.0, 65.0]


def spread(prefill_s: float, wanted: float, roles: dict[str, Role]) -> ClusterView:
    """Work spread evenly over its role: seconds of prefill, and instances' worth of KV."""
    p = sum(role is Role.PREFILL for role in roles.values())
    d = len(roles) - p
    views = []
    for instance_id, role in roles.items():
        if role is Role.PREFILL:
            views.append(instance(instance_id, role, rate=1e-6, queued_prefill_tokens=round(prefill_s / p * 1e6)))
        else:
            share = wanted / d
            used = min(1.0, share)
            waiting = round(1000 * (share / used - 1)) if used else 0
            views.append(
                instance(
                    instance_id,
                    role,
                    total_blocks=10**6,
                    free_blocks=round(10**6 * (1 - used)),
                    running=1000,
                    waiting=waiting,
                )
            )
    return view(*views)


@settings(deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 11),
    st.floats(0, 20),
    st.floats(0, 20),
    st.floats(1, 4),
    st.floats(0, 20),
    st.floats(0, 60),
)
def test_constant_loads_never_flip_an_instance_back(
    count: int, prefills: int, prefill_s: float, wanted: float, ratio: float, for_s: float, cooldown_s: float
) -> None:
    policy = PressureFlip(ratio, 0.5, 1.0, for_s, cooldown_s)
    at = min(prefills, count - 1)
    roles = {f"i{n:02}": Role.PREFILL if n < at else Role.DECODE for n in range(count)}
    state, directions, last_s = policy.start(), set(), None
    for step in range(60):
        now = step * 25.0
        state, decision = policy.step(state, spread(prefill_s, wanted, roles), now)
        if decision is not None:
            assert last_s is None or now - last_s >= cooldown_s
            assert roles[decision.instance_id] is decision.to.other
            roles[decision.instance_id], last_s = decision.to, now
            directions.add(decision.to)
            assert set(roles.values()) == set(Role)
    assert len(directions) <= 1


loads = st.fixed_dictionaries(
    {
        "queued_prefill_tokens": st.sampled_from([0, 20, 400, 50_000]),
        "free_blocks": st.sampled_from([0, 100, 950, 1000]),
        "running": st.integers(0, 3),
        "waiting": st.integers(0, 3),
    }
)
members = st.tuples(
    st.sampled_from(list(Role)), st.sampled_from([InstanceState.READY] * 3 + list(InstanceState)), loads
)


@settings(deadline=None)
@given(
    st.sampled_from(["idle", "pressure"]),
    st.lists(st.lists(members, max_size=6), min_size=1, max_size=25),
    st.integers(0, 3),
)
def test_no_flip_takes_the_last_of_a_role_or_comes_while_one_drains(
    name: str, clusters: list[list[tuple[Role, InstanceState, Any]]], for_s: int
) -> None:
    policy = registry.role_flip(name, {"for_s": for_s})
    views = [view(*(instance(f"i{at}", *one[:2], **one[2]) for at, one in enumerate(c))) for c in clusters]
    made = watch(policy, views)
    assert made == watch(policy, views)
    for at, decision in made:
        cluster = views[round(at)]
        chosen = cluster.of(decision.instance_id)
        assert chosen is not None
        assert (chosen.state, chosen.role) == (InstanceState.READY, decision.to.other)
        assert len(cluster.ready(chosen.role)) >= 2
        assert all(v.state is not InstanceState.DRAINING for v in cluster.instances)
        assert decision.reasons


@pytest.mark.parametrize("policy", [IdleFlip(for_s=5.0), PressureFlip()], ids=["idle", "pressure"])
@pytest.mark.parametrize(
    ("seen", "flips"),
    [
        (Seen(), "d"),
        (Seen(kept=frozenset({"d"})), "e"),
        (Seen(kept=frozenset({"d", "e", "f"})), ""),
        (Seen(barred=frozenset({Role.PREFILL})), ""),
        (Seen(barred=frozenset({Role.DECODE})), "d"),
    ],
)
def test_what_a_person_has_set_stays(policy: RoleFlip, seen: Seen, flips: str) -> None:
    waits = prefill("p", queued_prefill_tokens=30_000, rate=1e-4)
    cluster = view(waits, decode("d", free_blocks=990), decode("e", free_blocks=980), decode("f", **BUSY))
    state, found = policy.start(), ""
    for second in range(20):
        state, decision = policy.step(state, cluster, float(second), seen)
        found = found or (decision.instance_id if decision is not None else "")
    assert found == flips


def test_a_persons_flip_stands_for_a_while_and_bars_its_opposite() -> None:
    ordered = [(100.0, "p", Role.DECODE), (40.0, "q", Role.PREFILL)]
    assert Seen.of(None, ordered, 120.0, 60.0) == Seen(None, frozenset({"p"}), frozenset({Role.PREFILL}))
    assert Seen.of(None, ordered, 160.0, 60.0) == Seen()
    assert Seen.of(None, ordered, 99.0, 60.0).barred == frozenset(Role)
