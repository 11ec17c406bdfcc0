"""Macro-steps are exact under each policy, and the load that an instance reports is right."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView, Slo
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.dispatch import Choice, PowerOfTwo
from shared.policy.index import ClusterIndex
from shared.policy.papers.tetriinfer import ReserveDynamic, ReserveStatic
from shared.policy.placement import LeastLoad, Policies
from shared.policy.prefill_order import Fcfs, Ljf, PrefillOrder, Sjf
from shared.policy.split import FractionSplit, FullSplit, NoSplit, RandomSplit, Split
from shared.sim.cluster import simulate
from shared.sim.instance import SimInstance
from shared.sim.prediction import Prediction
from shared.sim.spec import EngineLimits, RunSpec, plain_policies
from shared.sim.workload import Workload
from tests.shared.sim.clusters import Linear, instance, several, workload

# The contexts of those that decode weigh: what a chunk may have shrinks from step to step.
RATES = Rates(step=StepRates(StepForm(0.01, 0.001), StepForm(0.01), StepForm(0.01, 0.001, context_s=1e-4)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 150), st.integers(1, 60)), min_size=2, max_size=25),
    st.sampled_from([Fcfs(), Sjf(2), Ljf()]),
    st.sampled_from(
        [
            Greedy(),
            ReserveStatic(),
            ReserveStatic(reserve_all=True),
            ReserveDynamic(unpredicted_tokens=20),
            ReserveDynamic(),
        ]
    ),
    st.sampled_from([NoSplit(), FullSplit(), RandomSplit()]),
    st.sampled_from([256, 400, 3_200]),
    st.booleans(),
    st.booleans(),
)
def test_macro_steps_are_exact(
    requests: list[tuple[float, int, int]],
    order: PrefillOrder,
    admission: DecodeAdmission,
    split: Split,
    kv_tokens: int,
    step_budget: bool,
    predicted: bool,
) -> None:
    limits = EngineLimits(64, 8, 16, step_budget=step_budget)
    model = Linear(context_s=1e-6)
    roles = (("p", Role.PREFILL), ("d", Role.DECODE))
    specs = [instance(name, role, model, kv_tokens=kv_tokens, limits=limits, rates=RATES) for name, role in roles]
    run = RunSpec(
        policies=Policies(LeastLoad(), split, PowerOfTwo()),
        prefill_order=order,
        decode_admission=admission,
        slo=Slo(ttft_s=1.0, tpot_s=0.06, itl_s=0.07),
        prediction=Prediction(width_tokens=20, buckets=4, accuracy=0.8) if predicted else None,
    )
    work = workload(*sorted(requests))
    macro, steps = (simulate(work, specs, replace(run, stepwise=stepwise)) for stepwise in (False, True))
    for name in ("first_token_s", "last_token_s", "longest_gap_s"):
        assert getattr(macro.outcomes, name) == pytest.approx(
            getattr(steps.outcomes, name), rel=1e-9, abs=1e-9, nan_ok=True
        )
    assert macro.outcomes.gaps_over.tolist() == steps.outcomes.gaps_over.tolist()
    if macro.outcomes.completed.all() and macro.gaps.count:
        assert np.nanmax(macro.outcomes.longest_gap_s) == pytest.approx(macro.gaps.percentile_s(1.0), rel=0.006)
    for one, other in zip(macro.instances, steps.instances, strict=True):
        assert (one.preemptions, one.steps, one.decode_tokens) == (other.preemptions, other.steps, other.decode_tokens)


def test_a_budget_keeps_steps_beside_decodes_within_the_target() -> None:
    work = workload((0.0, 10, 60), (0.2, 400, 2))
    plain = RunSpec(policies=Policies(LeastLoad(), NoSplit(), PowerOfTwo()), slo=Slo(ttft_s=1.0, tpot_s=0.06))
    for own, everywhere, longest in ((False, False, 0.26), (True, False, 0.054), (False, True, 0.054)):
        limits = EngineLimits(256, 8, 16, step_budget=own)
        specs = [instance("d", Role.DECODE, limits=limits, rates=RATES)]
        gaps = simulate(work, specs, replace(plain, step_budget=everywhere)).gaps
        assert gaps.percentile_s(1.0) == pytest.approx(longest, rel=0.2)


@pytest.mark.parametrize("budget", [False, True])
def test_decisions_know_of_the_budget(budget: bool) -> None:
    class Watching(LeastLoad):
        def choose(self, job: JobView, index: ClusterIndex, *rest: Any) -> Choice | None:
            known.append(index.limited)
            return super().choose(job, index, *rest)

    known: list[bool] = []
    run = RunSpec(policies=Policies(Watching(), NoSplit(), PowerOfTwo()), step_budget=budget)
    simulate(workload((0.0, 10, 6)), [instance("d", Role.DECODE, rates=RATES)], run)
    assert known == [budget]


def test_a_prompt_does_not_start_before_all_of_it_fits() -> None:
    # Of nine blocks the first holds seven while it has 97 to 112 tokens. The second needs four, of which its first
    # chunk would take two or three.
    work = workload((0.0, 80, 60), (0.33, 60, 2))
    limits = EngineLimits(64, 8, 16, step_budget=True)
    specs = [instance("d", Role.DECODE, kv_tokens=144, limits=limits, rates=RATES)]
    run = RunSpec(policies=Policies(LeastLoad(), NoSplit(), PowerOfTwo()), slo=Slo(ttft_s=1.0, tpot_s=0.06))
    macro, steps = (simulate(work, specs, replace(run, stepwise=each)) for each in (False, True))
    assert macro.outcomes.first_token_s == pytest.approx(steps.outcomes.first_token_s)
    assert macro.instances[0].preemptions == steps.instances[0].preemptions == 0
    assert macro.outcomes.first_token_s[1] > macro.outcomes.last_token_s[0]


def test_queued_tokens_are_without_what_the_instance_is_known_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    view = SimInstance.view

    def watched(self: SimInstance, now: float) -> InstanceView:
        found = view(self, now)
        seen.append(found.load.queued_prefill_tokens)
        return found

    monkeypatch.setattr(SimInstance, "view", watched)
    work = Workload(
        "two turns, and one after them",
        np.array([0.0, 50.0, 50.001, 50.2, 100.0]),
        np.array([2048, 2560, 2560, 16, 16]),
        np.full(5, 2),
        prefixes=((1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (), ()),
        prefix_block_tokens=512,
    )
    limits = EngineLimits(512, 8, 16, prefix_cache=True)
    specs = [instance("d", Role.DECODE, kv_tokens=20_000, limits=limits)]
    adaptive = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
    simulate(work, specs, RunSpec(policies=adaptive, broadcast_s=0.0))
    assert max(seen) == 2 * 512, "of each second turn one block is new"


@pytest.mark.parametrize("split", [FullSplit(), NoSplit(), FractionSplit(fraction=0.5)], ids=lambda one: one.name)
def test_queued_tokens_are_those_of_queued_jobs(monkeypatch: pytest.MonkeyPatch, split: Split) -> None:
    """As live (services.worker.jobs.prefill_queue): jobs whose prefill is not done, in the engine or not yet."""
    seen: list[tuple[int, int]] = []
    view = SimInstance.view

    def watched(self: SimInstance, now: float) -> InstanceView:
        found = view(self, now)
        seen.append((found.load.queued_prefill, found.load.queued_prefill_tokens))
        return found

    monkeypatch.setattr(SimInstance, "view", watched)
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(0.02, 200))
    work = Workload("drawn", arrivals, rng.integers(200, 900, 200), rng.integers(1, 40, 200))
    policies = msgspec.structs.replace(plain_policies(), split=split)
    simulate(work, several(2, 2), RunSpec(policies=policies))
    assert max(jobs for jobs, _ in seen) > 5
    assert [pair for pair in seen if bool(pair[0]) is not bool(pair[1])] == []
