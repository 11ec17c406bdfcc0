"""Clusters and workloads of the policy benchmarks: clusters of unequal instances under three kinds of requests, and
workloads that turn from conversation to code and back."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from shared.cost.learning import StepLearner
from shared.cost.step_rates import profile_batches
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.rates import Rates
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import InstanceSpec, RunSpec, with_words
from shared.sim.workload import CHATS, TURNS_A_CHAT, Workload, conversations
from tools.simulate.deployment import Deployment, load_deployment
from tools.simulate.workloads import WorkloadOptions, at_rate, make_workload

CLUSTERS = ("equal", "fast_slow", "prefill_heavy", "mixed_32")
CHATS_PER_S = {"equal": 12.0, "fast_slow": 6.0, "prefill_heavy": 15.0, "mixed_32": 60.0}  # about what is served
KINDS = {"conversation": "azure-conv", "code": "azure-code", "mixed": "Mixed"}
SLO = Slo(ttft_s=2.0, tpot_s=0.1)
TARGET = 0.9  # attainment at which a rate counts as served
MAX_TOKENS = 1024  # max_tokens of all requests
PREDICTION = Prediction(width_tokens=200, buckets=10, accuracy=0.75)
SEED = 1
# What is known live of speeds: learned from so many steps, which vary so much, by a start that was so much off.
LEARNED_STEPS, NOISE, START_OFF = 400, 0.05, 1.5


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and a kind of requests, a key of KINDS or `CHATS`; `seed` draws the requests. aggregated: each instance
    serves whole requests. slower: its targets, over those of `SLO`.
    """

    cluster: str
    kind: str
    seed: int = SEED
    aggregated: bool = False
    slower: float = 1.0

    @property
    def name(self) -> str:
        more = "_aggregated" * self.aggregated + (f"_slo_{self.slower:g}" if self.slower != 1.0 else "")
        return f"{self.cluster}_{self.kind}{more}"

    @property
    def slo(self) -> Slo:
        return SLO if self.slower == 1.0 else SLO.slower(self.slower)

    def attained(self, policy: str, rate: float, requests: int, head: int | None = None) -> float:
        """The share of requests within their SLO: `requests` of them at `rate` a second, under policies in words.

        head: the number of requests, from the first on, that are sent and counted; None for all.
        """
        return attainment(self.result(policy, rate, requests, head).outcomes, self.slo).every

    def result(self, policy: str, rate: float, requests: int, head: int | None = None) -> SimResult:
        run = replace(with_words(run_of(self.cluster), policy), slo=self.slo)
        workload = self.workload(rate, requests)
        specs = instances(self.cluster)
        if self.aggregated:
            specs = tuple(replace(spec, role=Role.DECODE) for spec in specs)
        if self.kind == CHATS:
            specs = tuple(replace(spec, limits=replace(spec.limits, prefix_cache=True)) for spec in specs)
        return simulate(workload if head is None else workload.head(head), specs, run)

    def workload(self, rate: float, requests: int) -> Workload:
        if self.kind == CHATS:
            return _chats(self.cluster, requests, self.seed).at_rate(rate)
        options = WorkloadOptions(KINDS[self.kind], requests=requests, seed=self.seed, arrivals="poisson")
        return at_rate(_requests(self.kind, requests, self.seed), options, rate)


def all_scenarios(seed: int = SEED) -> Iterator[Scenario]:
    """Every cluster with every kind of requests."""
    return (Scenario(cluster, kind, seed) for cluster in CLUSTERS for kind in KINDS)


def slo_scenarios(seed: int = SEED) -> Iterator[Scenario]:
    """The Azure traces on clusters with fast and slow instances, with tighter and looser targets."""
    for cluster in ("fast_slow", "prefill_heavy"):
        for kind in ("conversation", "code"):
            yield from (Scenario(cluster, kind, seed, slower=slower) for slower in (0.5, 2.0))


def chat_scenarios(seed: int = SEED) -> Iterator[Scenario]:
    """Every cluster with chats whose turns repeat all that was said before; its instances have prefix caches."""
    return (Scenario(cluster, CHATS, seed) for cluster in CLUSTERS)


@cache
def _chats(cluster: str, requests: int, seed: int) -> Workload:
    """Chats at about the rate that the cluster serves. They are the same at all rates; near this one their pauses are
    as long as they should be.
    """
    return conversations(requests, seed, CHATS_PER_S[cluster] / TURNS_A_CHAT)


@cache
def _requests(kind: str, requests: int, seed: int) -> Workload:
    return make_workload(WorkloadOptions(KINDS[kind], requests=requests, seed=seed))


@cache
def shipped(name: str) -> Deployment:
    """A cluster file of the benchmarks, for the simulator."""
    return load_deployment(Path(__file__).with_name("clusters") / f"{name}.yaml")


@cache
def run_of(cluster: str) -> RunSpec:
    """As live: loads are as old as broadcasts, lengths are predicted correctly three times in four."""
    return replace(shipped(cluster).run, slo=SLO, prediction=PREDICTION, max_tokens=MAX_TOKENS, seed=SEED)


@cache
def instances(cluster: str) -> tuple[InstanceSpec, ...]:
    """The cluster's instances, each with the rates that it would have learned of itself."""
    return with_learned_rates(shipped(cluster).instances)


def with_learned_rates(
    specs: Iterable[InstanceSpec], seed: int = SEED, noise: float = NOISE, start_off: float = START_OFF
) -> tuple[InstanceSpec, ...]:
    """The instances with rates learned from steps of `noise` (of a log-normal), from a start that was so much off."""
    rng = Random(seed)
    return tuple(_learned(spec, rng, noise, start_off) for spec in specs)


def _learned(spec: InstanceSpec, rng: Random, noise: float, start_off: float) -> InstanceSpec:
    start, budget, seats = spec.rates.step, spec.limits.batched_tokens, spec.limits.sequences
    assert start is not None
    learner = StepLearner(start.scaled(start_off), budget, seats)
    batches = [batch for of_kind in profile_batches(budget, seats).values() for batch in of_kind]
    now = 0.0
    for _ in range(LEARNED_STEPS):
        batch = rng.choice(batches)
        seconds = spec.model.step_time_s(batch) * rng.lognormvariate(0.0, noise)
        now += seconds
        learner.add(batch, seconds, now)
    known = spec.rates
    rates = Rates(learner.rates(now), price_per_hour=known.price_per_hour, weight=known.weight)
    return replace(spec, rates=rates)


# Workloads that turn from conversation to code and back.

TRACES = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
SPARE = 1.5  # requests that are drawn for each that is used: some are too long


@dataclass(frozen=True, slots=True)
class Phase:
    """So many seconds of one kind of requests. arrivals: a name of `shared.sim.workload.ARRIVALS`."""

    kind: str
    rate: float
    seconds: float
    arrivals: str = "poisson"


def turning(phases: Sequence[Phase], longest_tokens: int, seed: int, data: Path | None = None) -> Workload:
    """One phase after the other. Prompt and answer are at most `longest_tokens` together.

    Lengths are those of Azure's traces in `data`, from another place for each seed; where the traces are missing, made.
    """
    parts, start_s = [], 0.0
    for number, phase in enumerate(phases):
        part = _part(phase, longest_tokens, seed + 100 * number, data)
        parts.append(part.with_arrivals(start_s + part.arrival_s - part.arrival_s[0]))
        start_s += phase.seconds
    columns = ("arrival_s", "prompt_tokens", "output_tokens")
    return Workload("turning", *(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _part(phase: Phase, longest_tokens: int, seed: int, data: Path | None) -> Workload:
    wanted = max(2, round(phase.rate * phase.seconds))
    found = lengths(phase.kind, round(SPARE * wanted) + 50, longest_tokens, seed, data)
    options = WorkloadOptions(phase.kind, seed=seed, arrivals=phase.arrivals)
    timed = at_rate(found.head(wanted).at_once(), options, phase.rate)
    return timed.head(int(np.searchsorted(timed.arrival_s - timed.arrival_s[0], phase.seconds)))


def trace_of(kind: str, data: Path | None) -> Path | None:
    """The trace of that kind below `data`; None if it is missing."""
    trace = data / "traces" / "azure2023" / TRACES[kind] if data is not None else None
    return trace if trace is not None and trace.exists() else None


def lengths(kind: str, count: int, longest_tokens: int, seed: int, data: Path | None) -> Workload:
    """`count` requests of that kind without those that are too long, all at once: of Azure's trace, else made."""
    if (trace := trace_of(kind, data)) is not None:
        whole = make_workload(WorkloadOptions(str(trace)))
        rows = (seed * 997 + np.arange(count)) % len(whole)  # as they follow each other there
    else:
        whole = make_workload(WorkloadOptions(KINDS[kind], requests=count, seed=seed))
        rows = np.arange(count)
    rows = rows[(whole.prompt_tokens + whole.output_tokens)[rows] <= longest_tokens]
    prompts, outputs = whole.prompt_tokens[rows], whole.output_tokens[rows]
    return replace(whole, arrival_s=np.zeros(len(rows)), prompt_tokens=prompts, output_tokens=outputs)


def shares(
    at_s: NDArray[np.float64], met: NDArray[np.bool_], phases: Sequence[Phase], settle_s: float = 0.0
) -> list[float]:
    """By phase the share of its requests that met their targets, without those of its first `settle_s`.

    at_s, met: arrival and whether the targets were met, shape [n] each.
    """
    found, start_s = [], 0.0
    for phase in phases:
        inside = (at_s >= start_s + settle_s) & (at_s < start_s + phase.seconds)
        found.append(float(met[inside].mean()) if inside.any() else float("nan"))
        start_s += phase.seconds
    return found
