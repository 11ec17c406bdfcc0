"""Placement by what is not to be computed: worked examples, and that it stays least_load without knowledge."""

from collections import Counter
from math import e
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cost.library import Library
from shared.cost.step import Batch
from shared.cost.step_rates import step_rates_of
from shared.domain.instance import InstanceState, InstanceView
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import Route
from shared.policy import registry
from shared.policy.dispatch import Choice
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger, pair_key
from shared.policy.papers.costs import ChunkedCost, HuaweiCost, PartialPrefillCost
from shared.policy.papers.huawei import Memory, Penalty, Workload, batch_time_s
from shared.policy.papers.thunderserve import PlanRoute, PlanRoutes
from shared.policy.placement import Policies, place
from tests.shared.policy.views import decode, job, prefill, score, tokens_at, view

# In chunks of 512 tokens: 1e-5 s a token and 0.01 s a prefill; 1e-4 s a decode and 0.01 s a step.
FAST = StepRates(StepForm(0.02, 1e-5 - 0.02 / 512), StepForm(0.01, sequence_s=1e-4), StepForm(0.01))
SLOW = FAST.scaled(4.0)


def machine(instance_id: str, steps: StepRates | None, blocks: int = 1000, **load: Any) -> InstanceView:
    return decode(instance_id, rates=Rates(steps), total_blocks=blocks, **load)


def indexed(ledger: WorkloadLedger, *views: InstanceView, seed: int = 0) -> ClusterIndex:
    return ClusterIndex(view(*views), rng=Random(seed), ledger=ledger)


def chosen(choice: Choice | None) -> str:
    assert choice is not None
    return choice.instance.instance_id


def test_costs_follow_from_step_rates() -> None:
    """The times of steps of an A10, within the errors of the papers' forms."""
    model, chunk = Library.built_in().step_model("A10", "Llama-3-8B"), 512
    steps = step_rates_of(model.step_time_s, chunk, 64)
    in_chunks = sum(model.prefill_time_s(chunk, before) for before in (0, 512))
    assert PartialPrefillCost.from_steps(steps, chunk).time_s(1024) == pytest.approx(in_chunks, rel=0.2)
    for before, mean in ((0, 500), (2000, 1000)):
        mixed = model.step_time_s(Batch(((chunk - 16, before),), 16, 16 * mean))
        assert ChunkedCost.from_steps(steps, chunk).time_s(before, 16 * mean) == pytest.approx(mixed, rel=0.15)
    cost = HuaweiCost.from_steps(steps, chunk)
    assert cost.decode_s(16, 500, 1) == pytest.approx(model.decode_time_s(16, 16 * 500), rel=0.1)
    assert cost.decode_s(8, 512, 100) == pytest.approx(sum(cost.decode_s(8, 512 + at, 1) for at in range(100)))
    prompts = sum(model.step_time_s(Batch(((512, 0),))) for _ in range(8))
    assert cost.prefill_s(8, 512) == pytest.approx(prompts, rel=0.1)


def test_a_batch_that_fills_the_instance_by_hand() -> None:
    # 16000 tokens hold 10 jobs of 1600. Prefill: 1e-5 * 10 * 1500 + 0.01; 100 steps of 1e-4 * 10 + 0.01.
    cost = HuaweiCost.from_steps(FAST, 512)
    assert batch_time_s(cost, 16_000, 1500, 100) == pytest.approx((0.16 + 1.1) / 10)
    assert batch_time_s(cost, 1000, 1500, 100) == pytest.approx(0.025 + 100 * 0.0101)  # one at least
    assert batch_time_s(cost, 16_000, 1600, 0) == pytest.approx((0.16 + 0.01) / 10)  # a prefill instance


@pytest.mark.parametrize(
    ("penalty", "factor"), [(Penalty.EXP, e), (Penalty.POWER, 2**0.5), (Penalty.LINEAR, 2.0)], ids=str
)
def test_penalties_at_half_full(penalty: Penalty, factor: float) -> None:
    ledger = WorkloadLedger()
    policy, policies = Workload(penalty=penalty), registry.dispatch("random")
    one = machine("a", FAST)
    asked = job(1500, 100)
    run = Policies(policy, registry.split("full"), policies)
    # Five jobs of 1600 tokens are half of 16000.
    works = []
    for number in range(6):
        route = place(asked, indexed(ledger, one), run, 0.0, Random(0)).route
        ledger.add(job(job_id=f"j{number}"), route)
        assert route.work is not None
        works.append(route.work)
    assert works[0].score == pytest.approx(0.126)
    assert works[5].score == pytest.approx(0.126 * factor)
    assert tokens_at(ledger, "a") == 6 * 1600
    assert score(ledger, "a") == pytest.approx(sum(work.score for work in works))


EXAMPLES: list[tuple[str, list[tuple[StepRates | None, int]], list[int], str]] = [
    # Machines as (cost, blocks of 16 tokens); unfinished jobs of 1600 tokens on each; who gets the next.
    ("both idle: the stronger", [(SLOW, 1000), (FAST, 1000)], [0, 0], "m1"),
    ("a few jobs do not outweigh a fourfold speed", [(SLOW, 1000), (FAST, 1000)], [0, 2], "m1"),
    ("a long queue does", [(SLOW, 1000), (FAST, 1000)], [0, 5], "m0"),
    ("alike but for memory: the roomier, both half full", [(FAST, 1000), (FAST, 4000)], [1, 1], "m1"),
    ("a kind that nobody measured counts as the mean", [(None, 1000), (FAST, 1000)], [0, 1], "m0"),
]


@pytest.mark.parametrize(("what", "machines", "jobs", "winner"), EXAMPLES, ids=[x[0] for x in EXAMPLES])
def test_workload_by_example(
    what: str, machines: list[tuple[StepRates | None, int]], jobs: list[int], winner: str
) -> None:
    ledger, asked = WorkloadLedger(), job(1500, 100)
    views = [machine(f"m{at}", cost, blocks) for at, (cost, blocks) in enumerate(machines)]
    run = Policies(Workload(), registry.split("full"), registry.dispatch("random"))
    for one, count in zip(views, jobs, strict=True):
        for number in range(count):
            ledger.add(
                job(job_id=f"{one.instance_id}-{number}"), place(asked, indexed(ledger, one), run, 0.0, Random(0)).route
            )
    assert chosen(Workload().choose(asked, indexed(ledger, *views), (), 0.0, Random(0))) == winner


def test_memory_only_looks_at_memory() -> None:
    views = [machine("slow", SLOW, 4000), machine("fast", FAST, 1000)]
    ledger, asked = WorkloadLedger(), job(1500, 100)
    run = Policies(Memory(), registry.split("full"), registry.dispatch("random"))
    counts = {"slow": 0, "fast": 0}
    for number in range(25):
        route = place(asked, indexed(ledger, *views, seed=number), run, 0.0, Random(number)).route
        ledger.add(job(job_id=f"j{number}"), route)
        assert route.decode is not None
        counts[route.decode.instance_id] += 1
    assert counts["slow"] > counts["fast"] >= 5


def test_on_prefill_instances_only_the_prompt_counts() -> None:
    views = [prefill("p", rates=Rates(FAST)), decode("d")]
    choice = Workload().choose(job(1600, 1000), indexed(WorkloadLedger(), *views), (), 0.0, Random(0))
    assert choice is not None
    assert choice.work is not None
    assert (choice.work.score, choice.work.tokens) == (pytest.approx(0.017), 1600)


@settings(deadline=None)
@given(
    st.sampled_from(["workload", "memory"]),
    st.lists(
        st.tuples(st.sampled_from([None, FAST, SLOW]), st.sampled_from([100, 1000]), st.sampled_from([90, 4096])),
        max_size=10,
    ),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3000), st.integers(0, 500)), max_size=30),
    st.sets(st.sampled_from(["m0", "m1"])),
    st.sampled_from(["exp", "power", "linear"]),
)
def test_the_chosen_has_the_least_sum(
    name: str, machines: list[Any], history: list[tuple[int, int, int]], exclude: set[str], penalty: str
) -> None:
    views = [machine(f"m{at}", cost, blocks, max_model_len=m) for at, (cost, blocks, m) in enumerate(machines)]
    policy = registry.placement(name, {"penalty": penalty} if name == "workload" else {})
    ledger, open_jobs = WorkloadLedger(), []
    for number, (end, prompt, output) in enumerate(history):
        asked = job(prompt, output, job_id=f"j{number}")
        cluster = indexed(ledger, *views)
        choice = policy.choose(asked, cluster, exclude, 0.0, Random(0))
        assert choice == policy.choose(asked, cluster, exclude, 0.0, Random(0))
        fitting = [v for v in views if v.instance_id not in exclude and v.info.max_model_len >= prompt + output]
        assert (choice is None) == (not fitting)
        if choice is None:
            continue
        assert choice.work is not None
        assert choice.instance.instance_id in {v.instance_id for v in fitting}
        total = score(ledger, choice.instance.instance_id) + choice.work.score
        alone = [policy.choose(asked, indexed(ledger, v), (), 0.0, Random(0)) for v in fitting]
        if all(v.info.rates.step for v in views) or name == "memory":  # else "the mean" differs when alone
            sums = [score(ledger, c.instance.instance_id) + c.work.score for c in alone if c and c.work]
            assert total == pytest.approx(min(sums))
        ledger.add(asked, Route(None, choice.ref, 0, name, work=choice.work))
        open_jobs.append(asked.job_id)
        if end < 3:
            ledger.complete(open_jobs.pop(0))
    for job_id in open_jobs:
        ledger.complete(job_id)
    assert not ledger.scores.any()


RATE, BASE = 0.001, 0.01


PLAN = PlanRoutes((PlanRoute("p", "d", 0.5), PlanRoute("p", "e", 0.25), PlanRoute("q", "e", 0.25)))
ALL = [prefill("p"), prefill("q"), decode("d"), decode("e")]


def run(plan: PlanRoutes, views: list[InstanceView], jobs: int, split: str = "full", prompt: int = 100) -> list[Route]:
    policies = Policies(plan, registry.split(split), registry.dispatch("power_of_two"))
    ledger, rng, routes = WorkloadLedger(), Random(0), []
    for number in range(jobs):
        cluster = ClusterIndex(view(*views), rng=rng, ledger=ledger)
        routes.append(place(job(prompt, 10, job_id=f"j{number}"), cluster, policies, 0.0, rng).route)
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
