"""What `bench plan --part live` plans and starts: unlike accelerators, two workloads, and plans as slow cluster files.

The clusters would stream more tokens than this machine can carry: their times are `factor` times as long, and with
them arrivals, targets, links and whatever a service waits for on behalf of a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from lab.bench.live_clusters import SERVICES, model_with_context
from lab.bench.plan_cases import cluster, problem_of
from lab.bench.turning import lengths
from shared.domain.job import Slo
from shared.plan.inventory import Inventory
from shared.plan.judge import Ask
from shared.plan.methods.registry import method
from shared.plan.plan import Plan, Target, plan_text
from shared.plan.problem import Problem
from shared.plan.search import Outcome, Search, searched
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload

MODEL, CONTEXT = "Llama-3-8B", 4096
NODES = {"a100": ("A100-SXM-80", 1), "a40": ("A40", 2), "ti": ("RTX-3090-Ti", 2)}
GBPS = 25.0  # between any two of them
SLO = Slo(ttft_s=1.0, tpot_s=0.06)
KINDS = ("code", "conversation")
REQUESTS, SEED = 3000, 1
TOKENS_PER_S = 600.0  # that come at most: the machine streams three times as many, and has other work
LEAST_FACTOR = 3.0  # what the services add is small beside the accelerators' times, as it is in a real cluster
PATIENCE_S, JOB_S, DRAIN_S, PULL_S = 10.0, 600.0, 30.0, 10.0  # the services' own, in the accelerators' time


@dataclass(frozen=True)
class Planned:
    """A plan, who searched for it, and for what kind of requests."""

    kind: str
    search: Search
    outcome: Outcome

    @property
    def problem(self) -> Problem:
        """What was asked."""
        return self.search.problem

    @property
    def plan(self) -> Plan:
        """What was found."""
        return self.outcome.plan

    @property
    def promised(self) -> Workload:
        """The requests of the run that the promise is made of."""
        return self.search.judge.workload(Ask(self.plan, self.outcome.promise.rate))


def problem_for(kind: str, data: Path | None, inventory: Inventory | None = None) -> Problem:
    """That kind of requests, of the trace where it is there, on an inventory, or that of NODES."""
    requests = replace(lengths(kind, REQUESTS, CONTEXT, SEED, data), name=kind)
    return replace(problem_of(inventory or cluster(NODES, GBPS), MODEL, requests, SLO), longest_tokens=CONTEXT)


def search_for(problem: Problem, seconds: float = inf) -> Search:
    """Judged as engines are that send KV when the prompt is computed: emulated ones do."""
    return Search(problem, perf_counter, RunSpec(streaming=False, step_budget=True), perf_counter() + seconds)


def planned(kind: str, problem: Problem, seconds: float = 60.0) -> Planned:
    """Ours."""
    search = search_for(problem, seconds)
    return Planned(kind, search, searched("best", method("best"), search))


def factor_for(tokens_per_s: float, at_most: float = TOKENS_PER_S) -> float:
    """How slow a cluster that answers so many tokens a second has to be for `at_most` to come."""
    return float(max(LEAST_FACTOR, ceil(tokens_per_s / at_most)))


def slower(workload: Workload, factor: float) -> Workload:
    """The same requests so many times as far apart."""
    return workload.with_arrivals(factor * workload.arrival_s)


def slower_slo(slo: Slo, factor: float) -> Slo:
    """Targets so many times as long."""
    return slo.slower(factor)


def file_of(one: Planned, factor: float, folder: Path, more: Mapping[str, Any] | None = None) -> Path:
    """The plan's cluster file in `folder`, so many times as slow; `more`: further sections. Returns it."""
    model = folder / "model"
    if not model.exists():
        model_with_context(model, CONTEXT)
    estimator = one.search.estimator
    target = Target(f"bench plan live ({one.kind})", str(model), MODEL)
    text = plan_text(one.problem, one.plan, estimator.costs, estimator.places, target)
    file = folder / f"{one.kind}.yaml"
    file.write_text(yaml.safe_dump(slowed(yaml.safe_load(text), factor) | dict(more or {}), sort_keys=False))
    return file


def slowed(content: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A plan's file with all times that requests see `factor` times as long, and nothing beside what serves them."""
    gateway = content["gateway"]
    slo = {name: {key: factor * value for key, value in one.items()} for name, one in gateway["slo"].items()}
    waits = {"patience_s": factor * PATIENCE_S, "job_timeout_s": factor * JOB_S}
    engine = {"emulated_slowdown": factor, "pull_timeout_s": factor * PULL_S}
    return {
        **content,
        "planner": {"enabled": False},
        "predictor": SERVICES["predictor"],
        "dashboard": SERVICES["dashboard"],
        "gateway": {**gateway, "slo": slo, **waits},
        "monitor": {"drain_timeout_s": factor * DRAIN_S},
        "instance_defaults": {**content["instance_defaults"], **engine},
    }
