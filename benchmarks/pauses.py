"""Scenarios of pauses for `polyphase bench policies`: gaps between tokens that readers of streams see.

Bursts of streams that fill the KV of idle instances, bursts of prompts, a flood beside interactive requests, and steady
load near the limit of KV memory; on equal and on unequal instances, with and without a length predictor. A scenario is
simulated, or started on emulated instances and compared with a simulation of the same requests. Scenarios with a
predictor are only simulated: live, they would need a trained checkpoint.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.comparison import Row, faster, median_of, of_result, of_samples
from benchmarks.experiment import Arm, Experiment, Session, emulated_file, measured, model_with_context, slower
from benchmarks.results import Result, aim, merged
from shared.domain.job import Slo, WhenFull
from shared.sim.cluster import simulate
from shared.sim.outcomes import Outcomes, SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import with_words
from shared.sim.workload import Mix, Workload
from tools.simulate.deployment import Deployment, load_deployment

TABLE = "pauses"
ADAPTIVE = "placement=adaptive+split=adaptive+dispatch=adaptive"
SIMPLE = {
    "full": "placement=least_load+split=full+power_of_two",
    "balanced": "placement=least_load+balanced+power_of_two",
    "none": "placement=least_load+split=none+power_of_two",
}
POLICIES = {"adaptive": ADAPTIVE, **SIMPLE}
SEEDS = (1, 2, 3, 4, 5)
# Aim for the p90 of longest gaps: at most so long, or so many times that of the best simple policy.
ALLOWED_S, ALLOWED_FACTOR = 0.25, 1.5
SLACK = 0.01  # of attainment, for scenarios in which all or nearly all requests meet their targets
MAX_TOKENS = 1024  # max_tokens of requests, where lengths are predicted
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

    judged: the class whose streams count; empty: all. predicted: with a length predictor. slowdown: a live run and its
    targets take so many times as long, so that this machine can stream all tokens.
    """

    name: str
    instances: tuple[dict[str, Any], ...]
    make: Make
    judged: str = ""
    max_model_len: int = 2048
    predicted: bool = False
    slowdown: float = 1.0

    def cluster_into(self, folder: Path, model: str = "demo", slowdown: float = 1.0) -> Path:
        """Write the cluster file, of a suite `slowdown` times as slow, into `folder`."""
        classes = {"default": TARGETS.slower(slowdown).targets, "batch": _BATCH_SAID | _BATCH.slower(slowdown).targets}
        return emulated_file(
            folder,
            self.name,
            self.instances,
            model=model,
            max_model_len=self.max_model_len,
            gateway={"slo": classes},
            instance_defaults={"emulated_link_gbps": 100.0, "max_seqs": 256, "emulated_slowdown": slowdown},
        )

    def workload(self, seed: int) -> Workload:
        return self.make(np.random.default_rng(seed))

    def first_requests(self, seed: int) -> Workload:
        """Those that a live run sends."""
        workload = self.workload(seed)
        return workload.head(int(np.searchsorted(workload.arrival_s, LASTS_S)))

    def run(self, policy: str, seed: int, folder: Path) -> Row:
        return self.simulated(load_deployment(self.cluster_into(folder)), self.workload(seed), policy, seed)

    def simulated(
        self, deployment: Deployment, workload: Workload, policy: str, seed: int, slowdown: float = 1.0
    ) -> Row:
        """A run of these requests on a deployment that is so many times as slow."""
        run = with_words(replace(deployment.run, seed=seed), policy)
        if self.predicted:
            prediction = Prediction(width_tokens=200, buckets=10, accuracy=0.75)
            run = replace(run, prediction=prediction, max_tokens=MAX_TOKENS)
        return self.row(simulate(slower(workload, slowdown), deployment.instances, run), workload, slowdown)

    def row(self, result: SimResult, workload: Workload, slowdown: float) -> Row:
        """A run that was so many times as slow, in the accelerators' own time."""
        mix = workload.mix
        if self.judged and mix is not None:
            names = np.array([slo.name for slo in mix.classes])
            result = replace(result, outcomes=_only(result.outcomes, names[mix.class_of] == self.judged))
        return faster(of_result({}, result, TARGETS.slower(slowdown)), slowdown)


def pause_scenarios() -> Iterator[PauseScenario]:
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


def pauses_side_by_side() -> tuple[list[Row], Result]:
    """Rows (medians over the seeds), and aims and figures."""
    found: dict[str, dict[str, Row]] = {}
    with TemporaryDirectory(prefix="polyphase-pauses-") as name:
        for scenario in pause_scenarios():
            found[scenario.name] = {
                policy: median_of([scenario.run(words, seed, Path(name)) for seed in SEEDS])
                for policy, words in POLICIES.items()
            }
    rows = [{"scenario": name, "policy": policy, **row} for name, of in found.items() for policy, row in of.items()]
    return rows, beside_simple(found, "pauses")


def beside_simple(found: Mapping[str, Mapping[str, Row]], prefix: str) -> Result:
    """Aims and figures of rows by scenario and policy: where `adaptive` is most behind the best simple policy."""
    gap, behind = (0.0, ""), (0.0, "")
    for name, of in found.items():
        simple = [of[policy] for policy in SIMPLE]
        allowed_s = max(ALLOWED_S, ALLOWED_FACTOR * min(row["longest_gap_p90_s"] for row in simple))
        gap = max(gap, (of["adaptive"]["longest_gap_p90_s"] / allowed_s, name))
        behind = max(behind, (max(row["attainment"] for row in simple) - of["adaptive"]["attainment"], name))
    over, less = f"{prefix}_longest_gap_p90_over_allowed", f"{prefix}_attainment_behind_best_simple"
    aims = {
        over: aim("<= 1", f"{gap[0]:.3f} ({gap[1]})", gap[0] <= 1.0),
        less: aim(f"<= {SLACK}", f"{behind[0]:.4f} ({behind[1]})", behind[0] <= SLACK),
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


LIVE_TABLE = "pauses, live and simulated"
USUAL = ("burst_unlike", "prompts_unlike", "overload_unlike_classes", "overload_unlike_one_class", "kv_1.15_unlike")
LASTS_S = 45.0  # of arrivals of a live run
AIM_PERCENT = 20.0
MAX_LATE_S = 0.03  # timers of the clients
COMPARED = ("longest_gap_p90_s", "longest_gap_max_s")  # live and simulated
ARMS = tuple(Arm(label, words) for label, words in POLICIES.items())


def pause_scenarios_live() -> dict[str, PauseScenario]:
    return {one.name: one for one in pause_scenarios() if not one.predicted}


def run_pauses_live(scenarios: Sequence[PauseScenario], runs: int) -> Result:
    """Medians over so many runs of each scenario and policy, each with another seed."""
    rows: list[Row] = []
    parts: list[Result] = []
    live: dict[str, dict[str, Row]] = {}
    for scenario in scenarios:
        with TemporaryDirectory(prefix="polyphase-pauses-") as name:
            folder = Path(name)
            model_with_context(folder / "model", max(4096, scenario.max_model_len))
            file = scenario.cluster_into(folder, str(folder / "model"), scenario.slowdown)
            seeds = range(1, runs + 1)
            experiment = Experiment(
                scenario.name, file, scenario.first_requests, ARMS, TARGETS, scenario.slowdown, seeds, MAX_LATE_S
            )
            pairs, noise = asyncio.run(measured(file, partial(_compared, scenario, experiment)))
        live[scenario.name] = {policy: pair[0] for policy, pair in pairs.items()}
        for policy, pair in pairs.items():
            for run, row in zip(("live", "simulated"), pair, strict=True):
                rows.append({"scenario": scenario.name, "policy": policy, "run": run, **row})
        parts += [{"figures": noise}, compared_of(scenario, *pairs["adaptive"])]
    return merged(*parts, beside_simple(live, "pauses_live"), {"tables": {LIVE_TABLE: rows}})


def compared_of(scenario: PauseScenario, live: Row, simulated: Row) -> Result:
    """By how many percent the simulator is off.

    Where steps take a fixed time, a gap may differ by one of them: a stream joins between two steps, and live the
    phases of two instances' steps differ by chance.
    """
    step_s = max(one.get("emulated_step_s", 0.0) for one in scenario.instances)
    parts: Result = {"figures": {}, "aims": {}}
    for column in COMPARED:
        name = f"{scenario.name}_adaptive_{column.removesuffix('_s')}_off_percent"
        off_s = simulated[column] - live[column]
        parts["figures"][name] = round(100.0 * off_s / live[column], 1)
        parts["aims"][name] = aim(
            f"within {AIM_PERCENT:g}" + (f", or {step_s:g} s" if step_s else ""),
            f"{parts['figures'][name]:g} ({off_s:.3f} s)",
            abs(off_s) <= max(AIM_PERCENT / 100.0 * live[column], step_s),
        )
    return parts


async def _compared(
    scenario: PauseScenario, experiment: Experiment, on: Session
) -> tuple[dict[str, tuple[Row, Row]], dict[str, float]]:
    """By policy the medians, live and simulated; and figures of what disturbed the live runs."""
    gc.collect()
    gc.freeze()  # a walk of all that is loaded would stop the clients for as long as a pause lasts
    live: dict[str, list[Row]] = {}
    simulated: dict[str, list[Row]] = {}
    sent = []
    async for pair in experiment.pairs(on):
        judged = [one for one in pair.live.samples if one.shot.slo == scenario.judged or not scenario.judged]
        row = faster(of_samples({}, judged, experiment.slow_slo), scenario.slowdown)
        live.setdefault(pair.arm.label, []).append(row)
        row = scenario.row(pair.simulated, scenario.first_requests(pair.seed), scenario.slowdown)
        simulated.setdefault(pair.arm.label, []).append(row)
        sent.append(pair.live)
    noise = {
        f"{scenario.name}_timers_late_max_s": round(max(one.late_s for one in sent), 3),
        f"{scenario.name}_foreign_cores": round(fmean(one.foreign_cores for one in sent), 3),
    }
    return {label: (median_of(live[label]), median_of(simulated[label])) for label in live}, noise
