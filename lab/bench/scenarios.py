"""Scenarios in which policies are compared: clusters of unlike instances, each under three kinds of requests."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import msgspec

from lab.simulate.deployment import load_deployment
from lab.simulate.workloads import WorkloadOptions, at_rate, make_workload
from shared.cost.learning import StepLearner
from shared.cost.linear import rates_of_steps
from shared.cost.step_rates import profile_batches
from shared.domain.job import Slo
from shared.domain.rates import StepForm, StepRates
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import InstanceSpec, RunSpec, with_words
from shared.sim.workload import Workload

CLUSTERS = ("equal", "fast_slow", "prefill_heavy", "mixed_32")
KINDS = {"conversation": "azure-conv", "code": "azure-code", "mixed": "Mixed"}
SLO = Slo(ttft_s=2.0, tpot_s=0.1)
TARGET = 0.9  # attainment at which a rate counts as served
MAX_TOKENS = 1024  # what clients ask for at most, whatever they get
SEED = 1
# What is known live of speeds: learned from so many steps, which vary so much, by a start that was so much off.
LEARNED_STEPS, NOISE, START_OFF = 400, 0.05, 1.5


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and a kind of requests; `seed` draws the requests."""

    cluster: str
    kind: str
    seed: int = SEED

    @property
    def name(self) -> str:
        """In figures."""
        return f"{self.cluster}_{self.kind}"

    def attained(self, policy: str, rate: float, requests: int, head: int | None = None) -> float:
        """The share of requests within their SLO: `requests` of them at `rate` a second, under policies in words.

        head: only the first so many of them are sent, and counted.
        """
        return attainment(self.result(policy, rate, requests, head).outcomes, SLO).every

    def result(self, policy: str, rate: float, requests: int, head: int | None = None) -> SimResult:
        """The run itself."""
        run, workload = with_words(run_of(self.cluster), policy), self.workload(rate, requests)
        return simulate(workload if head is None else workload.head(head), instances(self.cluster), run)

    def workload(self, rate: float, requests: int) -> Workload:
        """Poisson arrivals."""
        options = WorkloadOptions(KINDS[self.kind], requests=requests, seed=self.seed, arrivals="poisson")
        return at_rate(_requests(self.kind, requests, self.seed), options, rate)


def all_scenarios(seed: int = SEED) -> Iterator[Scenario]:
    """Every cluster with every kind of requests."""
    return (Scenario(cluster, kind, seed) for cluster in CLUSTERS for kind in KINDS)


@cache
def _requests(kind: str, requests: int, seed: int) -> Workload:
    return make_workload(WorkloadOptions(KINDS[kind], requests=requests, seed=seed))


@cache
def run_of(cluster: str) -> RunSpec:
    """As live: loads are as old as broadcasts, lengths are foreseen three times in four, and max_tokens says little."""
    run = load_deployment(_file(cluster)).run
    prediction = Prediction(width_tokens=200, buckets=10, accuracy=0.75)
    return replace(run, slo=SLO, prediction=prediction, max_tokens=MAX_TOKENS, seed=SEED)


@cache
def instances(cluster: str) -> tuple[InstanceSpec, ...]:
    """The instances, each with the rates that it would have learned of itself."""
    rng = Random(SEED)
    return tuple(learned(one, rng) for one in load_deployment(_file(cluster)).instances)


def _file(cluster: str) -> Path:
    return Path(__file__).with_name("clusters") / f"{cluster}.yaml"


def learned(spec: InstanceSpec, rng: Random, noise: float = NOISE, start_off: float = START_OFF) -> InstanceSpec:
    """It with the rates that it would have learned of itself, from steps that vary so much, and by such a start."""
    start, budget, seats = spec.rates.step, spec.limits.batched_tokens, spec.limits.sequences
    assert start is not None
    learner = StepLearner(_times(start, start_off), budget, seats)
    batches = [batch for of_kind in profile_batches(budget, seats).values() for batch in of_kind]
    now = 0.0
    for _ in range(LEARNED_STEPS):
        batch = rng.choice(batches)
        seconds = spec.model.step_time_s(batch) * rng.lognormvariate(0.0, noise)
        now += seconds
        learner.add(batch, seconds, now)
    rates = rates_of_steps(learner.rates(now), budget)
    known = spec.rates
    rates = msgspec.structs.replace(rates, price_per_hour=known.price_per_hour, weight=known.weight)
    return replace(spec, rates=rates)


def _times(step: StepRates, factor: float) -> StepRates:
    def longer(form: StepForm) -> StepForm:
        plain = {name: value * factor for name, value in msgspec.structs.asdict(form).items() if name != "steps"}
        return StepForm(**plain)

    return StepRates(longer(step.prefill), longer(step.decode), longer(step.mixed))
