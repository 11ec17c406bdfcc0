"""What role flip policies respect and remember; the policy `idle`."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.policy.papers.tetriinfer import IdleFlip
from shared.policy.role_flip import FlipContext, FlipDecision, FlipHistory, RoleFlip, load_share
from tests.shared.policy.views import decode, instance, prefill, view

BUSY = {"free_blocks": 100}  # of 1000
QUIET = {"free_blocks": 950}


def watch(
    policy: RoleFlip, views: list[ClusterView], context: FlipContext = FlipContext()
) -> list[tuple[float, FlipDecision]]:
    history, made = FlipHistory(), []
    for second, cluster in enumerate(views):
        if (decision := policy.propose(cluster, float(second), history, context)) is not None:
            made.append((float(second), decision))
    return made


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


IDLE: list[tuple[str, list[InstanceView], tuple[str, Role] | None]] = [
    ("idle for a minute (TetriInfer 5.1)", [prefill("p"), prefill("q"), decode("d", **BUSY)], ("p", Role.DECODE)),
    (
        "under 10 % is idle (TetriInfer 3.5)",
        [prefill("p", **BUSY), decode("d", **BUSY), decode("e", **QUIET)],
        ("e", Role.PREFILL),
    ),
    ("10 % is not", [prefill("p", **BUSY), decode("d", **BUSY), decode("e", free_blocks=900)], None),
    ("all are idle", [prefill("p"), prefill("q"), decode("d"), decode("e")], None),
]


@pytest.mark.parametrize(("what", "instances", "expected"), IDLE, ids=[row[0] for row in IDLE])
def test_idle_by_example(what: str, instances: list[InstanceView], expected: tuple[str, Role] | None) -> None:
    made = watch(IdleFlip(), [view(*instances)] * 120)
    found = [(at, decision.instance_id, decision.to) for at, decision in made[:1]]
    assert found == ([(60.0, *expected)] if expected else [])


def test_all_ranks_of_a_role_may_be_its_only_instance() -> None:
    ranks = [replace(one := decode(f"d.{at}", **QUIET), info=replace(one.info, rank_of="d")) for at in range(2)]
    both = view(prefill("p", **BUSY), *ranks)
    assert watch(IdleFlip(), [both] * 70) == []
    assert watch(IdleFlip(), [view(*both.instances, decode("e", **BUSY))] * 70)


def test_work_or_a_flip_starts_the_minute_again() -> None:
    idle = view(prefill("p"), prefill("q", **BUSY), decode("d", **BUSY))
    busy = view(prefill("p", queued_prefill_tokens=400), prefill("q", **BUSY), decode("d", **BUSY))
    assert [at for at, _ in watch(IdleFlip(), [idle] * 50 + [busy] + [idle] * 70)] == [111.0]
    made = watch(IdleFlip(), [idle] * 180)  # the flip was decided, but not carried out
    assert [at for at, _ in made] == [60.0, 121.0]
    (reason,) = made[0][1].reasons
    assert (reason.what, reason.figures["highest_load_of_other_role"]) == ("role_flip:idle", 0.9)


loads = st.fixed_dictionaries(
    {"queued_prefill_tokens": st.sampled_from([0, 20, 50_000]), "free_blocks": st.sampled_from([0, 100, 950, 1000])}
)
states = st.sampled_from([InstanceState.READY] * 3 + list(InstanceState))
members = st.tuples(st.sampled_from(list(Role)), states, loads)


@settings(deadline=None)
@given(st.lists(st.lists(members, max_size=6), min_size=1, max_size=25), st.integers(0, 3))
def test_no_flip_takes_the_last_of_a_role_or_comes_while_one_drains(clusters: list[list[Any]], for_s: int) -> None:
    views = [view(*(instance(f"i{at}", *one[:2], **one[2]) for at, one in enumerate(c))) for c in clusters]
    for at, decision in watch(IdleFlip(for_s=for_s), views):
        cluster = views[round(at)]
        chosen = cluster.get(decision.instance_id)
        assert chosen is not None
        assert (chosen.state, chosen.role) == (InstanceState.READY, decision.to.other)
        assert len(cluster.ready(chosen.role)) >= 2
        assert all(v.state is not InstanceState.DRAINING for v in cluster.instances)


@pytest.mark.parametrize(
    ("context", "flips"),
    [
        (FlipContext(), "d"),
        (FlipContext(kept=frozenset({"d"})), "e"),
        (FlipContext(kept=frozenset({"d", "e", "f"})), ""),
        (FlipContext(barred=frozenset({Role.PREFILL})), ""),
        (FlipContext(barred=frozenset({Role.DECODE})), "d"),
    ],
)
def test_roles_that_an_operator_has_set_stay(context: FlipContext, flips: str) -> None:
    waits = prefill("p", queued_prefill_tokens=30_000, rate=1e-4)
    cluster = view(waits, decode("d", free_blocks=990), decode("e", free_blocks=980), decode("f", **BUSY))
    made = watch(IdleFlip(for_s=5.0), [cluster] * 10, context)
    assert [decision.instance_id for _, decision in made[:1]] == ([flips] if flips else [])


def test_an_operators_flip_takes_precedence_for_a_while_and_bars_its_opposite() -> None:
    flips = [(100.0, "p", Role.DECODE), (40.0, "q", Role.PREFILL)]
    assert FlipContext.after_flips(None, flips, 120.0, 60.0) == FlipContext(
        None, frozenset({"p"}), frozenset({Role.PREFILL})
    )
    assert FlipContext.after_flips(None, flips, 160.0, 60.0) == FlipContext()
    assert FlipContext.after_flips(None, flips, 99.0, 60.0).barred == frozenset(Role)
