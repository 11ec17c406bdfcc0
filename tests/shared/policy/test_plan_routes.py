from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceState, InstanceView
from shared.domain.route import Route
from shared.policy import registry
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger, pair_key
from shared.policy.placement import Policies, place
from shared.policy.placement_policies import PlanRoute, PlanRoutes
from tests.shared.policy.views import decode, job, prefill, view

PLAN = PlanRoutes((PlanRoute("p", "d", 0.5), PlanRoute("p", "e", 0.25), PlanRoute("q", "e", 0.25)))
ALL = [prefill("p"), prefill("q"), decode("d"), decode("e")]


def run(plan: PlanRoutes, views: list[InstanceView], jobs: int, split: str = "full", prompt: int = 100) -> list[Route]:
    policies = Policies(plan, registry.split(split), registry.dispatch("power_of_two"))
    ledger, rng, routes = WorkloadLedger(), Random(0), []
    for number in range(jobs):
        cluster = ClusterIndex(view(*views), rng=rng, ledger=ledger)
        routes.append(place(job(prompt, 10, job_id=f"j{number}"), cluster, policies, 0.0, rng))
        ledger.add(job(job_id=f"j{number}"), routes[-1])
    return routes


def pairs(routes: list[Route]) -> Counter[str]:
    return Counter(
        pair_key(r.prefill.instance_id if r.prefill else "", r.decode.instance_id if r.decode else "") for r in routes
    )


def test_shares_and_both_instances() -> None:
    routes = run(PLAN, ALL, 40)
    assert pairs(routes) == {"p>d": 20, "p>e": 10, "q>e": 10}
    assert {route.split for route in routes} == {100}
    assert routes[0].reasons[1].what == "placement:plan"


def test_a_pair_that_is_not_ready_leaves_its_share_to_the_others() -> None:
    views = [prefill("p"), prefill("q", state=InstanceState.DRAINING), decode("d"), decode("e")]
    assert pairs(run(PLAN, views, 30)) == {"p>d": 20, "p>e": 10}


def test_a_pair_that_comes_back_does_not_catch_up() -> None:
    policies = Policies(PLAN, registry.split("full"), registry.dispatch("power_of_two"))
    ledger, rng = WorkloadLedger(), Random(0)

    def place_some(views: list[InstanceView], count: int) -> Counter[str]:
        routes = []
        for number in range(count):
            cluster = ClusterIndex(view(*views), rng=rng, ledger=ledger)
            routes.append(place(job(job_id=f"{number}"), cluster, policies, 0.0, rng))
            ledger.add(job(job_id=f"{number}"), routes[-1])
        return pairs(routes)

    place_some(ALL[:1] + ALL[2:], 1000)
    assert place_some(ALL, 8) == {"p>d": 4, "p>e": 2, "q>e": 2}


def test_the_split_is_decided_between_the_two_of_the_plan() -> None:
    for route in run(PlanRoutes((PlanRoute("q", "e", 1.0),)), ALL, 5, split="fraction"):
        assert (route.prefill and route.prefill.instance_id, route.split) == ("q", 50)
        assert route.decode is not None
        assert route.decode.instance_id == "e"


def test_a_route_without_prefill_is_local() -> None:
    plan = PlanRoutes((PlanRoute("", "d", 1.0), PlanRoute("p", "e", 1.0)))
    routes = run(plan, ALL, 10)
    assert pairs(routes) == {">d": 5, "p>e": 5}
    assert {route.split for route in routes if route.prefill is None} == {0}
    assert pairs(run(PlanRoutes((PlanRoute("", "d", 1.0),)), [decode("d"), decode("e")], 4)) == {">d": 4}


def test_while_no_route_can_the_least_loaded_does() -> None:
    lost = PlanRoutes((PlanRoute("x", "y", 1.0),))
    (route,) = run(lost, ALL, 1)
    assert route.prefill is not None
    assert route.decode is None
    assert any("none of its routes" in reason.what for reason in route.reasons)
    short = [prefill("p", max_model_len=50), prefill("q"), decode("d"), decode("e")]
    (route,) = run(PlanRoutes((PlanRoute("p", "d", 1.0),)), short, 1)
    assert route.prefill is not None
    assert route.prefill.instance_id == "q"


@settings(deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["p", "q", ""]), st.sampled_from(["d", "e"])), st.floats(0.1, 5), min_size=1
    ),
    st.integers(1, 60),
)
def test_shares_are_kept(shares: dict[tuple[str, str], float], jobs: int) -> None:
    plan = PlanRoutes(tuple(PlanRoute(*pair, share) for pair, share in shares.items()))
    taken, total = pairs(run(plan, ALL, jobs)), sum(shares.values())
    for pair, share in shares.items():
        assert abs(taken[pair_key(*pair)] - jobs * share / total) <= len(shares) / 2 + 1e-6
