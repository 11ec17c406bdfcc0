"""Scenarios of `bench policies` on live emulated instances, and simulated from the same cluster file.

Three of the twelve, or those of pauses (`pauses_live`). The clusters of the twelve would stream more tokens than this
machine can carry: all their times, and the targets of their requests, are so many times as long that about TOKENS_PER_S
come. Each runs at SHARE of the goodput that the simulator finds for `adaptive`, under `adaptive` and under fixed
policies. What policies know of lengths is what clients ask for at most, here what they get: an emulated engine ends no
answer earlier.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from lab.bench.comparison import Row, goodput, of_result, of_samples
from lab.bench.live import Round, judged
from lab.bench.live_clusters import PLAIN, SERVICES, Means, Replay, Variant, model_with_context, send
from lab.bench.pauses import TABLE as PAUSES
from lab.bench.pauses import USUAL, pause_scenarios_live, run_pauses_live
from lab.bench.policies import named
from lab.bench.scenarios import SLO, TARGET, Scenario, instances, learned
from lab.calibrate.target import Sample, Target, Traffic
from lab.simulate.deployment import load_deployment
from lab.suite import on_free_ports
from services.launcher.cluster_file import load_cluster
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment, summary
from shared.sim.outcomes import SimResult
from shared.sim.workload import Workload

SCENARIOS = (Scenario("equal", "conversation"), Scenario("fast_slow", "code"), Scenario("prefill_heavy", "mixed"))
ADAPTIVE = Variant("adaptive", dict.fromkeys(PLAIN, "adaptive"))
FIXED = Variant("fixed", {**PLAIN, "split": "balanced"})
TABLE = "side by side, live and simulated; milliseconds as slow as the rest"
SHARE = 0.7  # of goodput
LASTS_S = 15.0  # of arrivals, in the time of the accelerators
TOKENS_PER_S = 1_800.0
LEAST_FACTOR = 3.0  # what the services add is small beside the accelerators' times, as it is in a real cluster
FEWEST, FROM_PER_S, STEP = 600, 16.0, 1.02  # requests and rates to find goodput with
CONTEXT = 16384
SEED = 1


@dataclass(frozen=True, slots=True)
class Slowed:
    """A scenario `factor` times as slow. file: its cluster, to be started and to be simulated."""

    scenario: Scenario
    file: Path
    workload: Workload
    factor: float
    variants: tuple[Variant, ...] = (ADAPTIVE, FIXED)

    @property
    def name(self) -> str:
        """In figures."""
        return f"live_{self.scenario.name}"

    @property
    def slo(self) -> Slo:
        """Targets as slow as the instances."""
        return slowed_slo(self.factor)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Names of scenarios: of the twelve (three of them without any names), of pauses, or `pauses` for one of each kind
    of those. runs: of each scenario of pauses under each policy.
    """

    scenarios: tuple[str, ...] = ()
    runs: int = 1


def run_policies_live(options: LiveOptions | None = None) -> dict[str, Any]:
    """Figures, aims and notes, as every bench gives them."""
    options, known = options or LiveOptions(), pause_scenarios_live()
    names = [each for name in options.scenarios for each in (USUAL if name == PAUSES else (name,))]
    others = [name for name in names if name not in known]
    try:
        slowed_ones = named(others) if others else () if names else SCENARIOS
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message}; of pauses, live: {PAUSES}, {', '.join(known)}") from error
    result = _run_slowed(slowed_ones)
    of_pauses = [known[name] for name in dict.fromkeys(names) if name in known]
    if of_pauses:
        found = run_pauses_live(of_pauses, options.runs)
        result = {part: result[part] + found[part] if part == "notes" else result[part] | found[part] for part in found}
    return result


def _run_slowed(scenarios: Sequence[Scenario]) -> dict[str, Any]:
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": [], "tables": {TABLE: []} if scenarios else {}}
    with tempfile.TemporaryDirectory(prefix="polyphase-policies-") as name:
        folder = Path(name)
        model_with_context(folder / "model", CONTEXT)
        for scenario in scenarios:
            one = slowed(scenario, folder)
            pairs, shares, rows = asyncio.run(_measured(one, folder / "state" / scenario.name))
            found = judged(one, [Round((), pairs)])
            rate = {f"{one.name}_rate_per_s": one.workload.rate, f"{one.name}_times_as_slow": one.factor}
            result["tables"][TABLE] += rows
            result["figures"] |= rate | shares | found["figures"]
            result["aims"] |= found["aims"]
            result["notes"].append(f"{one.name}: {len(one.workload)} requests a run; milliseconds as slow as the rest")
    return result


def slowed(scenario: Scenario, folder: Path) -> Slowed:
    """The scenario so slow that this machine can serve it, with its cluster file in `folder`."""
    rate = SHARE * goodput(lambda rate: _attained(scenario, rate, folder), FROM_PER_S, STEP)
    requests = max(50, round(LASTS_S * rate))
    workload = scenario.workload(rate, requests)
    factor = float(max(LEAST_FACTOR, np.ceil(rate * float(workload.output_tokens.mean()) / TOKENS_PER_S)))
    file = cluster_into(folder, scenario, factor)
    return Slowed(scenario, file, workload.with_arrivals(factor * workload.arrival_s), factor)


def slowed_slo(factor: float) -> Slo:
    """The scenarios' targets, `factor` times as long."""
    return SLO.slower(factor)


def cluster_into(folder: Path, scenario: Scenario, factor: float) -> Path:
    """A cluster file with the scenario's instances, `factor` times as slow. Returns it."""
    slo = slowed_slo(factor)
    entries = [
        {
            "id": one.instance_id,
            "role": one.role.value,
            "accelerator": one.accelerator,
            "chunk_size": one.limits.batched_tokens,
            "max_seqs": one.limits.sequences,
            "kv_cache_bytes": int(one.kv_tokens * one.kv_bytes_per_token),
            "emulated_link_gbps": one.link.bandwidth_bytes_s * 8e-9,
        }
        for one in instances(scenario.cluster)
    ]
    cluster = {
        **SERVICES,
        "name": f"bench policies ({scenario.cluster})",
        "model": str(folder / "model"),
        "max_model_len": CONTEXT,
        "gateway": {"slo": {"default": slo.targets}},
        "instance_defaults": {"engine": "emulated", "emulated_model": "Llama-3-8B", "emulated_slowdown": factor},
        "instances": entries,
    }
    file = folder / f"{scenario.name}-{factor:g}.yaml"
    file.write_text(yaml.safe_dump(cluster))
    return file


def _attained(scenario: Scenario, rate: float, folder: Path) -> bool:
    deployment = load_deployment(cluster_into(folder, scenario, 1.0))
    run = replace(deployment.run, policies=ADAPTIVE.policies())
    workload = scenario.workload(rate, max(FEWEST, round(LASTS_S * rate)))
    return attainment(simulate(workload, deployment.instances, run).outcomes, SLO).every >= TARGET


Measured = tuple[dict[str, tuple[Replay, Means]], dict[str, float], list[Row]]


async def _measured(one: Slowed, folder: Path) -> Measured:
    """By variant what was live and what was simulated; the shares of requests within their targets; rows of a table."""
    console = Console(stderr=True)
    async with running_suite(on_free_ports(load_cluster(one.file)), folder, console) as running:
        return await running.supervisor.during(_compared(one, running, console))


async def _compared(one: Slowed, running: RunningSuite, console: Console) -> Measured:
    target = Target.local(running.suite)
    traffic = await Traffic.to(target, SEED)
    pairs, shares, rows = {}, {}, list[Row]()
    for variant in one.variants:
        samples, foreign_cores = await send(target, traffic, one.workload, variant)
        await running.suite.wait_idle()
        run = await asyncio.to_thread(simulated_run, one, variant)
        said, attained = told(one, run)
        head = {"scenario": one.scenario.name, "policy": variant.label}
        rows += [
            of_samples({**head, "run": "live"}, samples, one.slo),
            of_result({**head, "run": "simulated"}, run, one.slo),
        ]
        pairs[variant.label] = (Replay(Means.of(samples), foreign_cores), said)
        shares[f"{one.name}_{variant.label}_share_live"] = round(share_within(samples, one.slo), 4)
        shares[f"{one.name}_{variant.label}_share_simulated"] = round(attained, 4)
        console.print(f"{one.name}, {variant.label}: {pairs[variant.label]}", soft_wrap=True)
    return pairs, shares, rows


def simulated(one: Slowed, variant: Variant) -> tuple[Means, float]:
    """Means, and the share of requests within their targets, of the cluster file in virtual time."""
    return told(one, simulated_run(one, variant))


def told(one: Slowed, result: SimResult) -> tuple[Means, float]:
    """The same of a run."""
    return Means.of_summary(summary(result, one.slo)), attainment(result.outcomes, one.slo).every


def simulated_run(one: Slowed, variant: Variant) -> SimResult:
    """The cluster file in virtual time.

    Each instance tells what it would have learned, of steps that take what they should: the papers' costs are derived
    from that, and not quite those of the catalogue.
    """
    deployment, rng = load_deployment(one.file), Random(SEED)
    known = [learned(spec, rng, noise=0.0, start_off=1.0) for spec in deployment.instances]
    return simulate(one.workload, known, replace(deployment.run, policies=variant.policies()))


def share_within(samples: Sequence[Sample], slo: Slo) -> float:
    """The share of requests within their targets."""
    return sum(one.met(slo) for one in samples) / len(samples)
