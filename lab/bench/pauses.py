"""Scenarios of pauses, for `polyphase bench policies`: what readers of streams feel, beside simple policies.

Bursts of streams onto idle instances whose KV they fill, bursts of prompts, a flood beside interactive requests, and
steady load near the limit of KV memory; on equal and on unlike instances, with a length predictor and without.
A scenario is a cluster file of emulated instances and the requests of a seed. Here the file is simulated;
`pauses_live` starts it.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.console import Console

from lab.bench.comparison import Row, faster, median_of, of_result, of_samples
from lab.bench.live_clusters import SERVICES, Variant, model_with_context, send
from lab.bench.scenarios import learned
from lab.calibrate.host_watch import TimerWatch
from lab.calibrate.target import Target, Traffic
from lab.simulate.deployment import Deployment, load_deployment
from lab.suite import on_free_ports
from services.launcher.cluster_file import load_cluster
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import Slo, WhenFull
from shared.policy.registry import from_words
from shared.sim.cluster import simulate
from shared.sim.outcomes import Outcomes
from shared.sim.prediction import Prediction
from shared.sim.spec import with_words
from shared.sim.workload import Mix, Workload

TABLE = "pauses"
ADAPTIVE = "placement=adaptive+split=adaptive+dispatch=adaptive"
SIMPLE = {
    "full": "placement=least_load+split=full+power_of_two",
    "balanced": "placement=least_load+balanced+power_of_two",
    "none": "placement=least_load+split=none+power_of_two",
}
POLICIES = {"adaptive": ADAPTIVE, **SIMPLE}
SEEDS = (1, 2, 3, 4, 5)
LEAST_S, FACTOR = 0.25, 1.5  # the p90 of longest gaps: at most so long, or so many times that of the best simple policy
SLACK = 0.01  # of attainment, for scenarios in which all or nearly all requests meet their targets
MAX_TOKENS = 1024  # what clients ask for at most, where lengths are predicted
_GIB = 1 << 30
_FAST = "A100-SXM-80"
_STEP_S = 0.05  # of instances whose steps take a fixed time
TARGETS, _BATCH = Slo(), Slo("batch", 600.0, 1.0, weight=0.1, when_full=WhenFull.DELAY)
_BATCH_SAID = {"weight": _BATCH.weight, "when_full": _BATCH.when_full.value}
_ENGINE: dict[str, Any] = {
    "engine": "emulated",
    "emulated_model": "Llama-3-8B",
    "emulated_link_gbps": 100.0,
    "max_seqs": 256,
}

Make = Callable[[np.random.Generator], Workload]
Parts = dict[str, dict[str, Any]]  # "aims" and "figures" of a bench


@dataclass(frozen=True, slots=True)
class PauseScenario:
    """Instances, and the requests of a seed.

    judged: the class whose streams are judged; empty: all. predicted: with a length predictor, which is only simulated.
    slowdown: a live run and all of its targets take so many times as long, so that this machine can stream all tokens.
    """

    name: str
    instances: tuple[dict[str, Any], ...]
    make: Make
    judged: str = ""
    max_model_len: int = 2048
    predicted: bool = False
    slowdown: float = 1.0

    def cluster_into(self, folder: Path, model: str = "demo", slowdown: float = 1.0) -> Path:
        """Writes the cluster file, of a suite `slowdown` times as slow, into `folder`."""
        file = folder / f"{self.name}.yaml"
        classes = {"default": TARGETS.slower(slowdown).targets, "batch": _BATCH_SAID | _BATCH.slower(slowdown).targets}
        cluster = {
            **SERVICES,
            "name": self.name,
            "model": model,
            "max_model_len": self.max_model_len,
            "gateway": {"slo": classes},
            "instance_defaults": {**_ENGINE, "emulated_slowdown": slowdown},
            "instances": list(self.instances),
        }
        file.write_text(yaml.safe_dump(cluster))
        return file

    def slower(self, workload: Workload, slowdown: float) -> Workload:
        """The requests for a cluster that is so many times as slow."""
        mix = workload.mix
        if mix is not None:
            workload = replace(workload, mix=replace(mix, classes=tuple(each.slower(slowdown) for each in mix.classes)))
        return workload.with_arrivals(slowdown * workload.arrival_s)

    def run(self, policy: str, seed: int, folder: Path) -> Row:
        """A simulated run, as a row of the table."""
        deployment = load_deployment(self.cluster_into(folder))
        return self.simulated(deployment, self.make(np.random.default_rng(seed)), policy, seed)

    def simulated(
        self, deployment: Deployment, workload: Workload, policy: str, seed: int, slowdown: float = 1.0
    ) -> Row:
        """A run of these requests on a deployment that is so many times as slow; the row is of the usual speed."""
        run = with_words(replace(deployment.run, seed=seed), policy)
        if self.predicted:
            prediction = Prediction(width_tokens=200, buckets=10, accuracy=0.75)
            run = replace(run, prediction=prediction, max_tokens=MAX_TOKENS)
        result = simulate(self.slower(workload, slowdown), deployment.instances, run)
        mix = workload.mix
        if self.judged and mix is not None:
            names = np.array([slo.name for slo in mix.classes])
            rows = names[mix.class_of] == self.judged
            result = replace(result, outcomes=_only(result.outcomes, rows))
        return faster(of_result({}, result, TARGETS.slower(slowdown)), slowdown)


def pause_scenarios() -> Iterator[PauseScenario]:
    """All of them."""
    for name, sizes in (("equal", (8192, 8192)), ("unlike", (11_264, 5_632))):
        fixed = tuple(_fixed(f"d{at}", "decode", tokens) for at, tokens in enumerate(sizes))
        fits = 16 + 16 if name == "equal" else 22 + 11  # streams of 6 + 500 tokens, which take 512
        yield PauseScenario(f"burst_{name}", (_fixed("p0", "prefill", 8192), *fixed), partial(_burst, fits, 500))
    for name, second in (("equal", _FAST), ("unlike", "L4"), ("unlike_a10", "A10")):
        ample = _four(second, 48, 48 if second == _FAST else 4)
        yield PauseScenario(f"prompts_{name}", ample, _prompts, max_model_len=8192, slowdown=2.0)
    for name, second, gib in (("equal", _FAST, 16), ("unlike", "A10", 4)):
        sized = _four(second, 16, gib)
        for classes in (True, False):
            kind = "classes" if classes else "one_class"
            judged = "default" if classes else ""
            make = partial(_flood, classes)
            yield PauseScenario(f"overload_{name}_{kind}", sized, make, judged, max_model_len=8192, slowdown=2.0)
    for name, kv_tokens in (("equal", (8192, 8192, 8192)), ("unlike", (12_288, 8192, 4096))):
        decodes = tuple(_fixed(f"d{at}", "decode", size) for at, size in enumerate(kv_tokens))
        prefills = (_fixed("p0", "prefill", 8192), _fixed("p1", "prefill", 8192))
        for share in (0.85, 1.0, 1.15):
            make = partial(_steady, share * sum(kv_tokens))
            for predicted in (False, True):
                word = "_predicted" if predicted else ""
                yield PauseScenario(f"kv_{share:g}_{name}{word}", (*prefills, *decodes), make, predicted=predicted)


def pauses_side_by_side() -> tuple[list[Row], Parts]:
    """Rows (medians over the seeds), aims and figures."""
    found: dict[str, dict[str, Row]] = {}
    with TemporaryDirectory(prefix="polyphase-pauses-") as name:
        for scenario in pause_scenarios():
            found[scenario.name] = {
                policy: median_of([scenario.run(words, seed, Path(name)) for seed in SEEDS])
                for policy, words in POLICIES.items()
            }
    rows = [{"scenario": name, "policy": policy, **row} for name, of in found.items() for policy, row in of.items()]
    return rows, beside_simple(found, "pauses")


def beside_simple(found: Mapping[str, Mapping[str, Row]], prefix: str) -> Parts:
    """Aims and figures of rows by scenario and policy: where `adaptive` is most behind the best simple policy."""
    gap, behind = (0.0, ""), (0.0, "")
    for name, of in found.items():
        simple = [of[policy] for policy in SIMPLE]
        allowed_s = max(LEAST_S, FACTOR * min(row["longest_gap_p90_s"] for row in simple))
        gap = max(gap, (of["adaptive"]["longest_gap_p90_s"] / allowed_s, name))
        behind = max(behind, (max(row["attainment"] for row in simple) - of["adaptive"]["attainment"], name))
    over, less = f"{prefix}_longest_gap_p90_over_allowed", f"{prefix}_attainment_behind_best_simple"
    aims = {
        over: {"want": "<= 1", "got": f"{gap[0]:.3f} ({gap[1]})", "met": gap[0] <= 1.0},
        less: {"want": f"<= {SLACK}", "got": f"{behind[0]:.4f} ({behind[1]})", "met": behind[0] <= SLACK},
    }
    return {"aims": aims, "figures": {over: round(gap[0], 4), less: round(behind[0], 4)}}


def _only(outcomes: Outcomes, rows: NDArray[np.bool_]) -> Outcomes:
    return Outcomes(**{each.name: getattr(outcomes, each.name)[rows] for each in fields(outcomes)})


def _four(second: str, gib: int, second_gib: int) -> tuple[dict[str, Any], ...]:
    """In each role a fast accelerator and another one, with so much KV."""
    return tuple(
        {"id": f"{role[0]}{at}", "role": role, "accelerator": each, "kv_cache_bytes": size * _GIB}
        for role in ("prefill", "decode")
        for at, (each, size) in enumerate(((_FAST, gib), (second, second_gib)))
    )


def _fixed(name: str, role: str, tokens: int) -> dict[str, Any]:
    """An instance with KV for so many tokens of 128 KiB, whose steps take a fixed time."""
    speed = {"accelerator": _FAST, "emulated_step_s": _STEP_S}
    return {"id": name, "role": role, "kv_cache_bytes": tokens << 17, **speed}


def _burst(count: int, answer: int, rng: np.random.Generator) -> Workload:
    """Three bursts of as many streams as fit exactly."""
    arrivals = np.concatenate([60.0 * number + np.sort(rng.uniform(0.0, 0.05, count)) for number in range(3)])
    return Workload("bursts", arrivals, np.full(3 * count, 6), np.full(3 * count, answer))


def _prompts(rng: np.random.Generator) -> Workload:
    """Three bursts of 24 prompts of 400 to 4,000 tokens."""
    count = 24
    arrivals = np.concatenate([30.0 * number + np.sort(rng.uniform(0.0, 0.2, count)) for number in range(3)])
    return Workload("prompts", arrivals, rng.integers(400, 4001, 3 * count), rng.integers(50, 200, 3 * count))


def _flood(classes: bool, rng: np.random.Generator) -> Workload:
    """Three interactive requests a second beside 300 of 500 to 3,000 + 200 tokens at once."""
    few, many = 120, 300
    arrivals = np.concatenate([rng.uniform(0.0, 40.0, few), rng.uniform(1.0, 1.5, many)])
    order = np.argsort(arrivals, kind="stable")
    prompts = np.concatenate([rng.integers(50, 400, few), rng.integers(500, 3001, many)])[order]
    answers = np.concatenate([rng.integers(50, 200, few), np.full(many, 200)])[order]
    class_of = np.concatenate([np.zeros(few, np.int64), np.full(many, int(classes))])[order]
    mix = Mix((TARGETS, _BATCH), class_of, ("",), np.zeros(few + many, np.int64))
    return Workload("flood", arrivals[order], prompts, answers, mix=mix)


def _steady(held_tokens: float, rng: np.random.Generator) -> Workload:
    """Prompts of 50 to 400 and answers of 200 to 900 tokens, which hold so many tokens of KV on average, for 90 s."""
    rate = held_tokens / ((225 + 550 / 2) * 550 * _STEP_S)
    count = round(90.0 * rate)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    return Workload("steady", arrivals, rng.integers(50, 401, count), rng.integers(200, 901, count))


# MERGED pauses_live.py
# Scenarios of pauses on live emulated instances, and the same requests simulated from the same cluster file.
#
# Of each workload the requests of its first seconds are sent. A length predictor would need a trained checkpoint: the
# scenarios with one are only simulated. Figures are in the accelerators' own time.


LIVE_TABLE = "pauses, live and simulated"
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
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": [], "tables": {LIVE_TABLE: []}}
    live: dict[str, dict[str, Row]] = {}
    for scenario in scenarios:
        with TemporaryDirectory(prefix="polyphase-pauses-") as name:
            pairs, noise = asyncio.run(_measured(scenario, Path(name), runs))
        live[scenario.name] = {policy: pair[0] for policy, pair in pairs.items()}
        for policy, pair in pairs.items():
            head = {"scenario": scenario.name, "policy": policy}
            result["tables"][LIVE_TABLE] += [
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
