"""Scenarios of pauses on live emulated instances, and the same requests simulated from the same cluster file.

Of each workload the requests of its first seconds are sent. A length predictor would need a trained checkpoint: the
scenarios with one are only simulated. Figures are in the accelerators' own time.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from lab.bench.live_clusters import Variant, model_with_context
from lab.bench.live_replay import send
from lab.bench.pauses import POLICIES, TARGETS, Parts, PauseScenario, beside_simple, pause_scenarios
from lab.bench.scenarios import learned
from lab.bench.side_by_side import Row, faster, median_of, of_samples
from lab.calibrate.host_watch import TimerWatch
from lab.calibrate.target import Target
from lab.calibrate.traffic import Traffic
from lab.demo.run import on_free_ports
from lab.simulate.deployment import load_deployment
from services.launcher.cluster_file import load_cluster
from services.launcher.up import RunningSuite, running_suite
from shared.policy.registry import from_words
from shared.sim.workload import Workload

TABLE = "pauses, live and simulated"
USUAL = ("burst_unlike", "prompts_unlike", "overload_unlike_classes", "overload_unlike_one_class", "kv_1.15_unlike")
LASTS_S = 45.0  # of arrivals
AIM_PERCENT = 20.0
TRIES, LATE_S = 3, 0.03  # of a run in which timers of the clients were later than this; the quietest counts
COMPARED = ("longest_gap_p90_s", "longest_gap_max_s")  # live and simulated


def pause_scenarios_live() -> dict[str, PauseScenario]:
    """Those that can be started, by name."""
    return {one.name: one for one in pause_scenarios() if not one.predicted}


def run_pauses_live(scenarios: Sequence[PauseScenario], runs: int) -> dict[str, Any]:
    """Figures, aims and rows, medians over so many runs of each scenario and policy, each with another seed."""
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": [], "tables": {TABLE: []}}
    live: dict[str, dict[str, Row]] = {}
    for scenario in scenarios:
        with TemporaryDirectory(prefix="polyphase-pauses-") as name:
            pairs, noise = asyncio.run(_measured(scenario, Path(name), runs))
        live[scenario.name] = {policy: pair[0] for policy, pair in pairs.items()}
        for policy, pair in pairs.items():
            head = {"scenario": scenario.name, "policy": policy}
            result["tables"][TABLE] += [
                {**head, "run": run, **row} for run, row in zip(("live", "simulated"), pair, strict=True)
            ]
        compared = compared_of(scenario, *pairs["adaptive"])
        result["figures"] |= noise | compared["figures"]
        result["aims"] |= compared["aims"]
    for part, entries in beside_simple(live, "pauses_live").items():
        result[part] |= entries
    return result


def workload_of(scenario: PauseScenario, seed: int) -> Workload:
    """The requests of its first seconds."""
    workload = scenario.make(np.random.default_rng(seed))
    return workload.head(int(np.searchsorted(workload.arrival_s, LASTS_S)))


def variant(policy: str) -> Variant:
    """One of POLICIES, as the API of a live cluster takes it."""
    parts = (from_words(part) for part in POLICIES[policy].split("+"))
    return Variant(policy, {kind: spec.name for part in parts for kind, spec in part.items()})


def compared_of(scenario: PauseScenario, live: Row, simulated: Row) -> Parts:
    """By how many percent the simulator is off. Where steps take a fixed time, a gap may differ by one of them: a
    stream joins between two steps, and live it is chance how those of two instances stand to each other.
    """
    step_s = max(one.get("emulated_step_s", 0.0) for one in scenario.instances)
    parts: Parts = {"figures": {}, "aims": {}}
    for column in COMPARED:
        name = f"{scenario.name}_adaptive_{column.removesuffix('_s')}_off_percent"
        off_s = simulated[column] - live[column]
        parts["figures"][name] = round(100.0 * off_s / live[column], 1)
        parts["aims"][name] = {
            "want": f"within {AIM_PERCENT:g}" + (f", or {step_s:g} s" if step_s else ""),
            "got": f"{parts['figures'][name]:g} ({off_s:.3f} s)",
            "met": abs(off_s) <= max(AIM_PERCENT / 100.0 * live[column], step_s),
        }
    return parts


Pairs = dict[str, tuple[Row, Row]]  # by policy, live and simulated


class Noise(NamedTuple):
    """What disturbed a run: how late timers of the clients were at most, and the cores that other processes used."""

    late_s: float
    foreign_cores: float


async def _measured(scenario: PauseScenario, folder: Path, runs: int) -> tuple[Pairs, dict[str, float]]:
    """And figures of what disturbed it."""
    model_with_context(folder / "model", max(4096, scenario.max_model_len))
    file = scenario.cluster_into(folder, str(folder / "model"), scenario.slowdown)
    console = Console(stderr=True)
    async with running_suite(on_free_ports(load_cluster(file)), folder / "state", console) as running:
        return await running.supervisor.during(_compared(scenario, file, running, runs, console))


async def _compared(
    scenario: PauseScenario, file: Path, running: RunningSuite, runs: int, console: Console
) -> tuple[Pairs, dict[str, float]]:
    target, rng = Target.local(running.suite), Random(1)
    traffic = await Traffic.to(target)
    deployment = load_deployment(file)
    known = tuple(learned(spec, rng, noise=0.0, start_off=1.0) for spec in deployment.instances)
    deployment = replace(deployment, instances=known)
    gc.collect()
    gc.freeze()  # to look through all that is loaded would stop the clients for as long as a pause lasts
    pairs, noise = Pairs(), list[Noise]()
    for policy, words in POLICIES.items():
        rows, simulated = list[Row](), list[Row]()
        for seed in range(1, runs + 1):
            workload = workload_of(scenario, seed)
            tries = list[tuple[Noise, Row]]()
            while len(tries) < TRIES and (not tries or tries[-1][0].late_s > LATE_S):
                tries.append(await _live(scenario, running, target, traffic, workload, policy))
            best, row = min(tries, key=lambda one: one[0])
            args = (deployment, workload, words, seed, scenario.slowdown)
            rows.append(row)
            simulated.append(await asyncio.to_thread(scenario.simulated, *args))
            noise.append(best)
            console.print(f"{scenario.name}, {policy}, {seed}, {best}: live, simulated", rows[-1], simulated[-1])
        pairs[policy] = median_of(rows), median_of(simulated)
    figures = {
        f"{scenario.name}_timers_late_max_s": max(one.late_s for one in noise),
        f"{scenario.name}_foreign_cores": fmean(one.foreign_cores for one in noise),
    }
    return pairs, {name: round(value, 3) for name, value in figures.items()}


async def _live(
    scenario: PauseScenario, running: RunningSuite, target: Target, traffic: Traffic, workload: Workload, policy: str
) -> tuple[Noise, Row]:
    async with TimerWatch() as timers:
        slow = scenario.slower(workload, scenario.slowdown)
        samples, foreign_cores = await send(target, traffic, slow, variant(policy))
    await running.suite.wait_idle()
    judged = [one for one in samples if one.shot.slo == scenario.judged or not scenario.judged]
    row = of_samples({}, judged, TARGETS.slower(scenario.slowdown))
    return Noise(timers.late_s, foreign_cores), faster(row, scenario.slowdown)
