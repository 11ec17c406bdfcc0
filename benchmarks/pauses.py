"""Pauses of streams in `polyphase bench policies`: the longest gaps between tokens that a reader sees.

Bursts of streams that fill the KV of idle instances, bursts of prompts, a flood beside interactive requests, and steady
load near the limit of KV memory; on equal and on unlike instances, with and without a length predictor. Scenarios with
a predictor are only simulated: live, they would need a trained checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.cluster_files import emulated, model_with_context, write_cluster
from benchmarks.experiment import Arm, Experiment, Row, median_of, part_of, row_of, side_by_side, table_of
from benchmarks.results import Result, aim, merged, result
from benchmarks.scenarios import MAX_TOKENS, PREDICTION
from shared.domain.job import Slo, WhenFull
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import with_words
from shared.sim.workload import Mix, Workload
from tools.simulate.deployment import load_deployment

PAUSES = "pauses"  # the word for all scenarios, and their table
ADAPTIVE = Arm("adaptive", "adaptive")
BALANCED = Arm("balanced", "least_load+balanced+power_of_two")
SIMPLE = (
    Arm("full", "placement=least_load+split=full+power_of_two"),
    BALANCED,
    Arm("none", "placement=least_load+split=none+power_of_two"),
)
ARMS = (ADAPTIVE, *SIMPLE)
SEEDS = (1, 2, 3, 4, 5)
# Aim for the p90 of longest gaps: at most so long, or so many times that of the best simple policy.
ALLOWED_S, ALLOWED_FACTOR = 0.25, 1.5
SLACK = 0.01  # of attainment, for scenarios in which all or nearly all requests meet their targets
USUAL = ("burst_unlike", "prompts_unlike", "overload_unlike_classes", "overload_unlike_one_class", "kv_1.15_unlike")
SENT_S = 45.0  # of arrivals of a live run
MAX_OFF_PERCENT = 20.0
MAX_LATE_S = 0.03  # timers of the clients
COMPARED = ("longest_gap_p90_s", "longest_gap_max_s")  # live and simulated
TARGETS, BATCH = Slo(), Slo("batch", 600.0, 1.0, weight=0.1, when_full=WhenFull.DELAY)
_FAST = "A100-SXM-80"
_STEP_S = 0.05  # of instances whose steps take a fixed time


@dataclass(frozen=True, slots=True)
class PauseScenario:
    """Instances, and the requests that a generator draws.

    judged: the class whose streams count; empty: all. predicted: with a length predictor. slowdown: a live run and its
    targets take so many times as long, so that this machine can stream all tokens.
    """

    name: str
    instances: tuple[dict[str, Any], ...]
    make: Callable[[np.random.Generator], Workload]
    judged: str = ""
    max_model_len: int = 2048
    predicted: bool = False
    slowdown: float = 1.0

    def cluster_into(self, folder: Path, model: str = "demo", slowdown: float = 1.0) -> Path:
        """Write the cluster file, of a suite `slowdown` times as slow, into `folder`."""
        batch = {**BATCH.slower(slowdown).targets, "weight": BATCH.weight, "when_full": BATCH.when_full.value}
        cluster = emulated(
            self.name,
            self.instances,
            {"emulated_link_gbps": 100.0, "max_seqs": 256, "emulated_slowdown": slowdown},
            model=model,
            max_model_len=self.max_model_len,
            gateway={"slo": {"default": TARGETS.slower(slowdown).targets, "batch": batch}},
        )
        return write_cluster(folder, cluster)

    def workload(self, seed: int) -> Workload:
        return self.make(np.random.default_rng(seed))

    def first_requests(self, seed: int) -> Workload:
        """Those that a live run sends."""
        workload = self.workload(seed)
        return workload.head(int(np.searchsorted(workload.arrival_s, SENT_S)))

    def simulated(self, arm: Arm, seed: int, folder: Path) -> Row:
        deployment, workload = load_deployment(self.cluster_into(folder)), self.workload(seed)
        run = with_words(replace(deployment.run, seed=seed, migration=False), arm.words)
        if self.predicted:
            run = replace(run, prediction=PREDICTION, max_tokens=MAX_TOKENS)
        return self.row(simulate(workload, deployment.instances, run), workload)

    def row(self, seen: SimResult, workload: Workload, slowdown: float = 1.0) -> Row:
        """Figures of the judged requests of a run that was `slowdown` times as slow, in the accelerators' own time."""
        mix = workload.mix
        if self.judged and mix is not None:
            seen = part_of(seen, np.array([slo.name for slo in mix.classes])[mix.class_of] == self.judged)
        return row_of(seen, TARGETS, slowdown)


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
        for kind, whose in (("classes", "default"), ("one_class", "")):
            make = partial(_flood, bool(whose))
            yield PauseScenario(f"overload_{name}_{kind}", sized, make, whose, max_model_len=8192, slowdown=2.0)
    for name, kv_tokens in (("equal", (8192, 8192, 8192)), ("unlike", (12_288, 8192, 4096))):
        decodes = tuple(_fixed(f"d{at}", "decode", size) for at, size in enumerate(kv_tokens))
        prefills = (_fixed("p0", "prefill", 8192), _fixed("p1", "prefill", 8192))
        for share in (0.85, 1.0, 1.15):
            make = partial(_steady, share * sum(kv_tokens))
            for predicted in (False, True):
                word = "_predicted" if predicted else ""
                yield PauseScenario(f"kv_{share:g}_{name}{word}", (*prefills, *decodes), make, predicted=predicted)


def _four(second: str, gib: int, second_gib: int) -> tuple[dict[str, Any], ...]:
    """In each role a fast accelerator and another one, with so much KV."""
    return tuple(
        {"id": f"{role[0]}{at}", "role": role, "accelerator": each, "kv_cache_bytes": size << 30}
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
    mix = Mix((TARGETS, BATCH), class_of, ("",), np.zeros(few + many, np.int64))
    return Workload("flood", arrivals[order], prompts, answers, mix=mix)


def _steady(held_tokens: float, rng: np.random.Generator) -> Workload:
    """Prompts of 50 to 400 and answers of 200 to 900 tokens, which hold so many tokens of KV on average, for 90 s."""
    rate = held_tokens / ((225 + 550 / 2) * 550 * _STEP_S)
    count = round(90.0 * rate)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    return Workload("steady", arrivals, rng.integers(50, 401, count), rng.integers(200, 901, count))


def run_pauses() -> Result:
    """Medians over the seeds, simulated."""
    found: dict[str, dict[str, Row]] = {}
    with TemporaryDirectory(prefix="polyphase-pauses-") as folder:
        for one in pause_scenarios():
            found[one.name] = {
                arm.label: median_of([one.simulated(arm, seed, Path(folder)) for seed in SEEDS]) for arm in ARMS
            }
    rows = [{"scenario": name, "policy": policy, **row} for name, of in found.items() for policy, row in of.items()]
    return merged(beside_simple(found, "pauses"), {"tables": {PAUSES: rows}})


def live_scenarios() -> dict[str, PauseScenario]:
    return {one.name: one for one in pause_scenarios() if not one.predicted}


def run_pauses_live(scenarios: Sequence[PauseScenario], runs: int) -> list[Result]:
    """Each scenario under each policy, live and simulated: medians over so many runs, each with another seed."""
    parts: list[Result] = []
    live: dict[str, dict[str, Row]] = {}
    for one in scenarios:
        arms, part = _measured_live(one, range(1, runs + 1))
        live[one.name] = {label: sides["live"] for label, sides in arms.items()}
        parts += [part, off_of(one, **arms[ADAPTIVE.label])]
    return [*parts, beside_simple(live, "pauses_live")] if live else []


def _measured_live(one: PauseScenario, seeds: Sequence[int]) -> tuple[dict[str, dict[str, Row]], Result]:
    """Medians by arm and side; and their table, with what disturbed the runs."""
    with TemporaryDirectory(prefix="polyphase-pauses-") as folder:
        model = model_with_context(Path(folder) / "model", max(4096, one.max_model_len))
        file = one.cluster_into(Path(folder), str(model), one.slowdown)
        rounds = Experiment(one.name, file, one.first_requests, ARMS, TARGETS, one.slowdown, seeds, MAX_LATE_S).run()
    work = [one.first_requests(seed) for seed in seeds]
    arms = side_by_side(rounds, lambda seen, number: one.row(seen, work[number], one.slowdown))
    sent = [pair.live for by_arm in rounds for pair in by_arm.values()]
    late_s, foreign = max(run.late_s for run in sent), fmean(run.foreign_cores for run in sent)
    noise = {f"{one.name}_timers_late_max_s": round(late_s, 3), f"{one.name}_foreign_cores": round(foreign, 3)}
    return arms, merged(result(noise), {"tables": {f"{PAUSES}, live and simulated": table_of(one.name, arms)}})


def beside_simple(found: Mapping[str, Mapping[str, Row]], prefix: str) -> Result:
    """Aims and figures of rows by scenario and policy: where `adaptive` is most behind the best simple policy."""
    gap, behind = (0.0, ""), (0.0, "")
    for name, of in found.items():
        ours, simple = of[ADAPTIVE.label], [of[arm.label] for arm in SIMPLE]
        allowed_s = max(ALLOWED_S, ALLOWED_FACTOR * min(row["longest_gap_p90_s"] for row in simple))
        gap = max(gap, (ours["longest_gap_p90_s"] / allowed_s, name))
        behind = max(behind, (max(row["attainment"] for row in simple) - ours["attainment"], name))
    over, less = f"{prefix}_longest_gap_p90_over_allowed", f"{prefix}_attainment_behind_best_simple"
    aims = {
        over: aim("<= 1", f"{gap[0]:.3f} ({gap[1]})", gap[0] <= 1.0),
        less: aim(f"<= {SLACK}", f"{behind[0]:.4f} ({behind[1]})", behind[0] <= SLACK),
    }
    return {"aims": aims, "figures": {over: round(gap[0], 4), less: round(behind[0], 4)}}


def off_of(scenario: PauseScenario, live: Row, simulated: Row) -> Result:
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
        want = f"within {MAX_OFF_PERCENT:g}" + (f", or {step_s:g} s" if step_s else "")
        met = abs(off_s) <= max(MAX_OFF_PERCENT / 100.0 * live[column], step_s)
        parts["aims"][name] = aim(want, f"{parts['figures'][name]:g} ({off_s:.3f} s)", met)
    return parts
