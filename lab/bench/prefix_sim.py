"""Mooncake's traces on eight simulated nodes: what `adaptive` finds in their prefix caches, beside `least_load`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from lab.bench.prefix_oracle import imbalance, oracle_tokens
from lab.bench.scenarios import learned
from lab.simulate.deployment import Deployment, load_deployment
from shared.domain.job import Slo
from shared.errors import NotFound
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment
from shared.sim.spec import InstanceSpec, RunSpec, with_words
from shared.sim.traces import read_trace
from shared.sim.workload import Workload

TRACES = {name: Path("traces/mooncake") / f"{name}_trace.jsonl" for name in ("conversation", "synthetic")}
REQUESTS = 4_000  # the first of each
SYSTEMS = {"adaptive": "adaptive", "least_load": "least_load+split=none+power_of_two"}
SHARES = (0.5, 0.75, 0.9)  # of what `least_load` serves when all come at once
SLO = Slo()  # the default class
SEED = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One run. saved_tokens: prompt tokens that nobody computed. imbalance: see `imbalance`, of computed tokens."""

    rate: float
    saved_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    attainment: float
    imbalance: float
    longest_gap_p90_s: float  # of the requests' longest gaps
    longest_gap_max_s: float


@dataclass(frozen=True, slots=True)
class Oracles:
    """Tokens that a cache for all would have saved: one without bounds, one as large as all nodes' KV memory."""

    unbounded: int
    pooled: int


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on the cluster."""

    trace: str
    data: Path

    def work(self) -> Workload:
        """Its first requests, as they came."""
        return _work(self.data / TRACES[self.trace])

    def oracles(self) -> Oracles:
        """The same at every rate: they only know an order."""
        work, nodes = self.work(), instances()
        assert work.prefixes is not None  # these traces name them
        prompts = list(zip(work.prefixes, work.prompt_tokens.tolist(), strict=True))
        blocks = sum(node.kv_tokens for node in nodes) // work.prefix_block_tokens
        found = (sum(oracle_tokens(prompts, work.prefix_block_tokens, most)) for most in (None, blocks))
        return Oracles(*found)

    def capacity(self) -> float:
        """Requests a second."""
        work = self.work()
        return len(work) / simulate(work.at_once(), instances(), _run("least_load")).duration_s

    def point(self, system: str, rate: float) -> Point:
        """One run of it, with the trace's pattern of arrivals at that rate."""
        work = self.work().at_rate(rate)
        result = simulate(work, instances(), _run(system))
        rows = result.outcomes
        computed = [use.prefill_tokens for use in result.instances]
        median_s, last_s = (float(np.percentile(rows.ttft_s, share)) for share in (50, 99))
        return Point(
            rate,
            int(work.prompt_tokens.sum()) - sum(computed),
            float(np.mean(rows.ttft_s)),
            median_s,
            last_s,
            float(np.nanmean(rows.tpot_s)),
            attainment(rows, SLO).every,
            imbalance(computed),
            float(np.nanpercentile(rows.longest_gap_s, 90)),
            float(np.nanmax(rows.longest_gap_s)),
        )


def cases(data: Path) -> Iterator[Case]:
    """All traces. Raises NotFound where they are not."""
    for trace, path in TRACES.items():
        if not (data / path).is_file():
            raise NotFound(f"no {data / path}: it is Mooncake's FAST25-release/traces/{path.name}")
        yield Case(trace, data)


@cache
def _work(path: Path) -> Workload:
    return read_trace(path).head(REQUESTS)


@cache
def instances() -> tuple[InstanceSpec, ...]:
    """The nodes, each with the rates that it would have learned of itself."""
    rng = Random(SEED)
    return tuple(learned(one, rng) for one in _deployment().instances)


@cache
def _deployment() -> Deployment:
    return load_deployment(Path(__file__).with_name("clusters") / "prefix.yaml")


def _run(system: str) -> RunSpec:
    return with_words(replace(_deployment().run, slo=SLO, seed=SEED), SYSTEMS[system])
