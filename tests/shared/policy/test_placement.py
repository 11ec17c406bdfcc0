from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceState, InstanceView, Role
from shared.domain.rates import Rates
from shared.domain.route import Route
from shared.errors import Delayed, InvalidRequest, Unavailable
from shared.policy import registry
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger, assignments
from shared.policy.papers.huawei import Single
from shared.policy.placement import Policies, place
from tests.shared.policy.views import decode, index, instance, job, prefill, prompt_rates, view


def policies(placement: str = "least_load", split: str = "full", **parameters: Any) -> Policies:
    return Policies(registry.placement(placement), registry.split(split, parameters), registry.dispatch("power_of_two"))


def chosen(route: Route) -> str:
    assert route.prefill is not None
    return route.prefill.instance_id


# Columns: prefill instances as (queued tokens, queued jobs, seconds a token, base seconds), prompt, who wins.
EXAMPLES = [
    ("shorter queue, rates unknown", [(500, 1, 0, 0), (100, 1, 0, 0)], 100, "p1"),
    ("same queue, faster instance", [(500, 1, 2e-4, 0), (500, 1, 1e-4, 0)], 100, "p1"),
    ("longer queue on a much faster instance", [(100, 1, 10e-4, 0), (400, 1, 1e-4, 0)], 100, "p1"),
    ("both idle: the faster, by the job's own time", [(0, 0, 4e-4, 0), (0, 0, 1e-4, 0)], 1000, "p1"),
    ("slow but idle beats fast but full, short job", [(0, 0, 4e-4, 0), (5000, 9, 1e-4, 0)], 100, "p0"),
    ("fixed cost of the queue's jobs counts", [(0, 9, 1e-4, 0.1), (100, 1, 1e-4, 0.1)], 100, "p1"),
    ("unknown rate takes the median of the known", [(300, 1, 0, 0), (200, 1, 1e-4, 0)], 100, "p1"),
]


@pytest.mark.parametrize(("what", "loads", "prompt", "winner"), EXAMPLES, ids=[e[0] for e in EXAMPLES])
def test_least_load_by_example(what: str, loads: list[Any], prompt: int, winner: str) -> None:
    views = [
        prefill(f"p{at}", queued_prefill_tokens=tokens, queued_prefill=jobs, rate=rate, base=base)
        for at, (tokens, jobs, rate, base) in enumerate(loads)
    ]
    route = place(job(prompt), index(*views, decode("d")), policies(), 0.0, Random(0)).route
    assert chosen(route) == winner


def test_under_cronus_at_most_two_requests_are_in_a_prefill_instance() -> None:
    # Cronus 4.2: a request waits at the frontend until the instance has no waiting request beside the one it computes.
    cluster, wanted = index(prefill("p", rate=1e-4), decode("d")), policies(split="cronus")
    for number in range(2):
        asked = job(100, job_id=f"j{number}", can_wait=True)
        route = place(asked, cluster, wanted, 0.0, Random(0)).route
        assert chosen(route) == "p"
        for assignment in assignments(asked, route, 0.0):
            cluster.book(assignment)
    with pytest.raises(Delayed, match=r"each prefill instance has at least 2 requests \(split: cronus\)") as held:
        place(job(100, job_id="j2", can_wait=True), cluster, wanted, 0.0, Random(0))
    assert held.value.cause == "prefills"
    assert held.value.retry_after_s
    # A request that has begun, or whose gateway cannot let it wait, goes on.
    assert chosen(place(job(100, can_wait=True, begun=True), cluster, wanted, 0.0, Random(0)).route) == "p"
    assert chosen(place(job(100), cluster, wanted, 0.0, Random(0)).route) == "p"
    unlimited = policies(split="cronus", max_prefills=0)
    assert chosen(place(job(100, can_wait=True), cluster, unlimited, 0.0, Random(0)).route) == "p"


@pytest.mark.parametrize("placement", ["least_load", "round_robin", "adaptive"])
def test_under_cronus_a_full_prefill_instance_is_passed_over(placement: str) -> None:
    fast, slow = prompt_rates(1e-6), prompt_rates(1e-3)
    cluster = index(prefill("a", rates=fast, queued_prefill=2), prefill("b", rates=slow), decode("d", rates=fast))
    wanted = policies(placement, "cronus")
    assert chosen(place(job(100, can_wait=True), cluster, wanted, 0.0, Random(0)).route) == "b"
    full = index(prefill("a", rates=fast, queued_prefill=2), decode("d", rates=fast))
    with pytest.raises(Delayed):
        place(job(100, can_wait=True), full, wanted, 0.0, Random(0))


def test_reasons_name_filters_the_chosen_and_the_runner_up() -> None:
    cluster = index(prefill("a", queued_prefill_tokens=50), prefill("b"), prefill("c"), decode("d"))
    route = place(job(10), cluster, policies(), 0.0, Random(0), ("c",)).route
    by_name = {reason.what: reason.figures for reason in route.reasons}
    assert by_name["filter: ready, not excluded, context fits"]["excluded"] == "c"
    assert by_name["placement:least_load"] == {"chosen": "b", "score": 10.0, "runner_up": "a", "runner_up_score": 60.0}


@pytest.mark.parametrize(
    "instances",
    [
        [prefill("p", state=InstanceState.UNRESPONSIVE), decode("d")],
        [prefill("p", state=InstanceState.DRAINING), decode("d")],
        [prefill("p", max_model_len=99), decode("d")],
    ],
    ids=["prefill silent", "prefill draining", "prompt too long for prefill"],
)
def test_without_prefill_the_decode_instance_does_it_all(instances: list[InstanceView]) -> None:
    route = place(job(100), index(*instances), policies(), 0.0, Random(0)).route
    assert route.prefill is None
    assert route.split == 0
    assert route.decode is not None
    assert any(reason.what.startswith("local:") for reason in route.reasons)


@pytest.mark.parametrize("placement", sorted(registry.PLACEMENT))
@pytest.mark.parametrize("local_only", [False, True])
def test_in_a_coupled_cluster_placement_chooses_who_does_it_all(placement: str, local_only: bool) -> None:
    cluster = index(decode("a", max_model_len=149), decode("b"), decode("c"))
    route = place(job(100, 50, local_only=local_only), cluster, policies(placement), 0.0, Random(0), ("b",)).route
    assert (route.prefill, route.split, route.policy) == (None, 0, placement)
    assert route.decode is not None
    assert route.decode.instance_id == "c"
    assert any(reason.what.startswith("placement:") for reason in route.reasons)
    with pytest.raises(Unavailable, match="just failed this job"):
        place(job(), cluster, policies(placement), 0.0, Random(0), ("a", "b", "c"))
    with pytest.raises(InvalidRequest, match="is 4096"):
        place(job(5000), cluster, policies(placement), 0.0, Random(0))


def test_what_a_route_books() -> None:
    asked = job(100, 1000)
    split = place(
        asked, index(prefill("p"), decode("d")), policies(split="fraction", fraction=0.3), 0.0, Random(0)
    ).route
    assert [(a.instance_id, a.prefill_tokens, a.decode_tokens, a.heavy) for a in assignments(asked, split, 0.0)] == [
        ("p", 30, 0, False),
        ("d", 70, 100, True),
    ]
    whole = place(asked, index(decode("d")), policies(), 0.0, Random(0)).route
    (booked,) = assignments(asked, whole, 0.0)
    assert (booked.instance_id, booked.prefill_tokens, booked.decode_tokens) == ("d", 100, 100)


@pytest.mark.parametrize(
    ("held", "computes_there", "computes_here", "comes"),
    [({}, 150, 150, 150), ({"p": 4}, 6, 150, 150), ({"d": 2}, 150, 150, 22), ({"d": 4}, 150, 44, 0)],
)
def test_a_route_books_no_tokens_that_instances_hold(
    held: dict[str, int], computes_there: int, computes_here: int, comes: int
) -> None:
    asked = job(300, 1000, prefix=(1, 2, 3, 4))  # blocks of 64 tokens, in engines of 16
    cluster = index(prefill("p"), decode("d"))
    for instance_id, blocks in held.items():
        cluster.prefixes.replace(instance_id, 1, asked.prefix[:blocks])
    route = place(asked, cluster, policies(split="fraction", fraction=0.5), 0.0, Random(0)).route
    there, here = assignments(asked, route, 0.0)
    booked = there.prefill_tokens, here.prefill_tokens, here.import_tokens
    assert booked == (computes_there, computes_here, comes)


def test_local_only_never_uses_a_prefill_instance() -> None:
    route = place(job(local_only=True), index(prefill("p"), decode("d")), policies(), 0.0, Random(0)).route
    assert (route.prefill, route.split) == (None, 0)


@pytest.mark.parametrize(
    ("instances", "exclude", "error", "says"),
    [
        ([], (), Unavailable, "none registered"),
        ([prefill("p")], (), Unavailable, "no decode instance is ready"),
        ([prefill("p"), decode("d", state=InstanceState.DRAINING)], (), Unavailable, "1 draining"),
        ([prefill("p"), decode("d", state=InstanceState.STARTING)], (), Unavailable, "1 starting"),
        ([prefill("p"), decode("d", state=InstanceState.UNRESPONSIVE)], (), Unavailable, "1 unresponsive"),
        ([prefill("p"), decode("d")], ("d",), Unavailable, "just failed this job"),
        ([prefill("p"), decode("d", max_model_len=149)], (), InvalidRequest, "is 149"),
    ],
)
@pytest.mark.parametrize("split", ["full", "none", "random"])
def test_no_decode_instance(
    instances: list[InstanceView], exclude: tuple[str, ...], error: type[Exception], says: str, split: str
) -> None:
    with pytest.raises(error, match=says):
        place(job(100, 50), index(*instances), policies(split=split), 0.0, Random(0), exclude)


@pytest.mark.parametrize(("fraction", "split"), [(0.0, 0), (0.25, 25), (0.501, 51), (1.0, 100)])
def test_a_partial_split_names_both_instances(fraction: float, split: int) -> None:
    cluster = index(prefill("p"), decode("d"))
    route = place(job(100), cluster, policies(split="fraction", fraction=fraction), 0.0, Random(0)).route
    assert route.split == split
    assert (route.prefill is None) == (split == 0)
    assert (route.decode is None) == (split == 100)


loads = st.integers(0, 50_000)
rates = st.sampled_from([0.0, 1e-5, 1e-4, 3e-4])
states = st.sampled_from(list(InstanceState))


@st.composite
def clusters(draw: st.DrawFn) -> list[InstanceView]:
    return [
        instance(
            f"i{at}",
            draw(st.sampled_from(list(Role))),
            draw(states),
            rate=draw(rates),
            queued_prefill_tokens=draw(loads),
            free_blocks=draw(st.integers(0, 300)),
            max_model_len=draw(st.sampled_from([100, 4096])),
            decoding=draw(st.integers(0, 9)),
        )
        for at in range(draw(st.integers(0, 12)))
    ]


@settings(deadline=None)
@given(
    clusters(),
    st.integers(1, 500),
    st.sampled_from(sorted(registry.PLACEMENT)),
    st.sampled_from(sorted(registry.SPLIT)),
    st.sets(st.sampled_from(["i0", "i1"])),
    st.integers(0, 99),
)
def test_any_route_holds_what_it_promises(
    instances: list[InstanceView], prompt: int, placement: str, split: str, exclude: set[str], seed: int
) -> None:
    asked = job(prompt)
    cluster = view(*instances)

    def decide() -> Route:
        fresh = ClusterIndex(cluster, rng=Random(seed))
        return place(asked, fresh, policies(placement, split), 0.0, Random(seed), frozenset(exclude)).route

    try:
        route = decide()
    except (Unavailable, InvalidRequest):
        return
    assert decide() == route  # the same seed, the same decision
    assert 0 <= route.split <= prompt
    assert (route.prefill is None) == (route.split == 0)
    if placement == "adaptive":  # it names the decode instance, also where another one computes the prompt
        assert route.decode is not None
    else:
        assert (route.decode is None) == (route.split == prompt)
    for ref, role in ((route.prefill, Role.PREFILL), (route.decode, Role.DECODE)):
        if ref is not None:
            found = cluster.get(ref.instance_id)
            assert found is not None
            assert (found.role, found.state) == (role, InstanceState.READY)
            assert ref.instance_id not in exclude
            assert found.info.max_model_len >= prompt
    assert route.reasons


@pytest.mark.parametrize(("prompt", "output"), [(0, 10), (-1, 10), (10, -1)])
def test_a_job_that_makes_no_sense_is_refused(prompt: int, output: int) -> None:
    with pytest.raises(InvalidRequest):
        place(job(prompt, output), index(prefill("p"), decode("d")), policies(), 0.0, Random(0))


def run(name: str, views: list[InstanceView], jobs: int, exclude: tuple[str, ...] = (), each: int = 5) -> list[str]:
    policies = Policies(registry.placement(name), registry.split("full"), registry.dispatch("random"))
    ledger, rng, seen, turn = WorkloadLedger(), Random(0), [], 0
    for number in range(jobs):
        if number % each == 0:
            cluster = ClusterIndex(view(*views), rng=rng, turn=turn, ledger=ledger)
        asked = job(10, 5, job_id=f"j{number}")
        route = place(asked, cluster, policies, 0.0, rng, exclude).route
        for assignment in assignments(asked, route, 0.0):
            cluster.book(assignment)
        turn = cluster.turn
        ledger.add(asked, route)
        placed = route.prefill or route.decode
        assert placed is not None
        seen.append(placed.instance_id)
    return seen


def weighing(instance_id: str, weight: float) -> InstanceView:
    return decode(instance_id, rates=Rates(weight=weight))


def test_round_robin_goes_on_over_broadcasts() -> None:
    assert run("round_robin", [prefill("b"), prefill("a"), prefill("c"), decode("d")], 7, each=2) == list("abcabca")


def test_weights_of_four_and_one() -> None:
    # Huawei 5.2, WRR on two instances.
    assert run("weighted", [weighing("a", 4), weighing("b", 1)], 10, each=3) == list("aabaaaabaa")


def test_an_excluded_instance_loses_its_turns_to_the_next() -> None:
    assert run("weighted", [weighing("a", 4), weighing("b", 1), weighing("c", 1)], 4, ("a",)) == list("bcbc")


def test_single_is_the_first_or_the_named_one_while_it_can() -> None:
    views = [decode("b"), decode("a", max_model_len=50), decode("c")]

    def chosen(policy: Single, prompt: int, exclude: tuple[str, ...] = ()) -> str:
        choice = policy.choose(job(prompt, 10), index(*views), exclude, 0.0, Random(0))
        assert choice is not None
        return choice.instance.instance_id

    assert chosen(Single(), 20) == "a"
    assert chosen(Single(), 100) == "b"
    assert chosen(Single("c"), 20) == "c"
    assert chosen(Single("c"), 20, ("c",)) == "a"
    assert chosen(Single("gone"), 20) == "a"
    assert Single().choose(job(9999), index(*views), (), 0.0, Random(0)) is None
