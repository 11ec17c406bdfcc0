"""`polyphase bench live`: the simulator beside a live cluster that it was calibrated on.

Two clusters: the demo's, with real engines, and one of emulated accelerators. Each is calibrated, then serves the same
requests under several policies, live and simulated. Aims: every mean within 15 %, and of two policies that clearly
differ the same one is better in both.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol, TypeVar

from benchmarks.experiment import METRICS, Arm, Means, Session, measured
from benchmarks.results import Aim, Result, aim, merged, result, rotated
from benchmarks.suite import BARE, CPU_ENGINE
from shared.cost.library import Library
from shared.domain.instance import Role
from shared.sim.measured import simulate_on_hosts, specs_of, with_control
from shared.sim.metrics import summary
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload, poisson, synthetic
from tools.calibrate.live import Calibrated, calibrate

AIM_PERCENT = 15.0
CLEAR_DIFFERENCE = 0.15  # live differences between policies of less than this share have no winner
TRIES, QUIET_CORES = 3, 0.15  # measurements are repeated while others use more cores of this machine
SEED = 7
_LENGTHS_CV = 0.7
_LONGEST_SHARE = 0.6  # of the model's context
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, a workload of mean lengths, and policies, of which the first is compared with the others.

    share, cores_share: how busy the busiest role, and the cores that engines compute on, shall be about.
    drifts: the machine may change its speed, so that each replay stands between two calibrations.
    streaming: KV leaves chunk by chunk, as with our connector and not with emulated instances.
    """

    name: str
    title: str
    cluster: dict[str, Any]
    arms: tuple[Arm, ...]
    prompt_tokens: float
    output_tokens: float
    share: float
    requests: int
    streaming: bool
    drifts: bool = False
    rounds: int = 1
    cores_share: float = 0.3


# As clusters/demo.yaml, without predictor and dashboard: on two cores they would be part of what is measured.
REAL = Scenario(
    name="demo",
    title="demo cluster, vLLM on the CPU, 2 prefill + 2 decode",
    cluster={
        **BARE,
        "name": "bench live",
        "gateway": {"dtype": "float32"},
        "instance_defaults": CPU_ENGINE,
        "instances": [
            {"id": "prefill-0", "role": "prefill", "block_size": 32},
            {"id": "prefill-1", "role": "prefill", "block_size": 128},
            {"id": "decode-0", "role": "decode", "block_size": 128},
            {"id": "decode-1", "role": "decode", "block_size": 32},
        ],
    },
    arms=tuple(Arm(name, f"least_load+split={name}+power_of_two") for name in ("full", "none", "fraction")),
    prompt_tokens=300.0,
    output_tokens=32.0,
    share=0.45,
    requests=100,
    streaming=True,
    drifts=True,
    rounds=3,  # real engines share their cores with whatever else runs: medians decide which policy wins
)

EMULATED = Scenario(
    name="emulated",
    title="emulated accelerators of two kinds, Llama-3-8B, links of 10 Gb/s",
    cluster={
        **BARE,
        "name": "bench live (emulated)",
        "instance_defaults": {"engine": "emulated", "emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 64},
        "instances": [
            {"id": f"{role}-{name}", "role": role, "accelerator": accelerator, "kv_cache_bytes": gib * _GIB}
            for role in ("prefill", "decode")
            for name, accelerator, gib in (("a100", "A100-SXM-80", 56), ("a10", "A10", 6))
        ],
    },
    arms=(
        Arm("least_load", "placement=least_load+split=full+power_of_two"),
        Arm("round_robin", "placement=round_robin+split=full+power_of_two"),
        Arm("none", "placement=least_load+split=none+power_of_two"),
    ),
    prompt_tokens=700.0,
    output_tokens=40.0,
    share=1.0,
    requests=100,
    streaming=False,
)


class _Measured(Protocol):
    @property
    def foreign_cores(self) -> float: ...


Measured = TypeVar("Measured", bound=_Measured)


@dataclass(frozen=True, slots=True)
class LivePair:
    """Means of a run as clients saw it, and of the same in the simulator."""

    live: Means
    simulated: Means
    foreign_cores: float = 0.0

    def both(self, metric: str) -> tuple[float, float]:
        return float(getattr(self.live, metric)), float(getattr(self.simulated, metric))


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs by policy, and the calibrations before and after the replays."""

    calibrations: tuple[Calibrated, ...]
    pairs: Mapping[str, LivePair]


def run_live_bench(scenarios: Sequence[Scenario] = (EMULATED, REAL)) -> Result:
    return merged(*(asyncio.run(measured(one.cluster, partial(compare, one), seed=SEED)) for one in scenarios))


async def compare(scenario: Scenario, on: Session) -> Result:
    """Calibrate, replay and simulate on a cluster that runs."""
    latest = await _calibrated(on)
    workload = workload_of(scenario, latest, on.traffic.max_model_len, SEED)
    found: list[Round] = []
    for number in range(scenario.rounds):
        calibrations, pairs = [latest], dict[str, LivePair]()
        for arm in rotated(scenario.arms, number):
            live = await _undisturbed(partial(on.send, workload, arm))
            if scenario.drifts:
                latest = await _calibrated(on)
                calibrations.append(latest)
            around = calibrations[-2:]
            predicted = [await asyncio.to_thread(simulated, scenario, one, workload, arm) for one in around]
            pairs[arm.label] = LivePair(Means.from_samples(live.samples), Means.average(predicted), live.foreign_cores)
        found.append(Round(tuple(calibrations), pairs))
    figures = {f"{scenario.name}_rate_per_s": workload.rate, **_conditions(scenario, found)}
    note = f"{scenario.name}: {scenario.title}; {len(workload)} requests, {scenario.rounds} rounds"
    return merged(judged(scenario.name, scenario.arms, found), result(figures, notes=[note]))


def workload_of(scenario: Scenario, found: Calibrated, longest_tokens: int, seed: int) -> Workload:
    """Log-normal lengths and Poisson arrivals, at a rate that keeps the cluster moderately busy."""
    lengths = synthetic(
        scenario.requests,
        scenario.prompt_tokens,
        scenario.output_tokens,
        prompt_cv=_LENGTHS_CV,
        output_cv=_LENGTHS_CV,
        longest_tokens=int(_LONGEST_SHARE * longest_tokens),
        seed=seed,
    )
    return poisson(lengths, _rate(scenario, found, lengths), seed + 1)


def simulated(scenario: Scenario, found: Calibrated, workload: Workload, arm: Arm) -> Means:
    """A replay in virtual time, at the calibrated speeds and latencies."""
    specs, neighbours = specs_of(found.instances, found.calibration, Library.built_in())
    run = arm.under(RunSpec(step_budget=True, streaming=scenario.streaming))
    outcome = simulate_on_hosts(workload, specs, neighbours, with_control(run, found.calibration.control))
    return Means.from_summary(summary(outcome, run.slo))


def judged(name: str, arms: Sequence[Arm], rounds: Sequence[Round]) -> Result:
    """Medians over the rounds of the means and of the simulator's errors, and which policy is better."""
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    for arm in arms:
        for metric in METRICS:
            pairs = [one.pairs[arm.label].both(metric) for one in rounds]
            off = median(100.0 * (predicted / seen - 1.0) for seen, predicted in pairs)
            key = f"{name}_{arm.label}_{metric}"
            figures[f"{key}_live_ms"] = 1e3 * median(seen for seen, _ in pairs)
            figures[f"{key}_simulated_ms"] = 1e3 * median(predicted for _, predicted in pairs)
            figures[f"{key}_off_percent"] = off
            aims[f"{key}_off_percent"] = aim(f"within {AIM_PERCENT:g}", round(off, 2), abs(off) <= AIM_PERCENT)
    winners = _winners(name, [arm.label for arm in arms], rounds, figures)
    differ = aim("in a mean at least", f"in {len(winners)}", bool(winners))
    return result(figures, aims | winners | {f"{name}_the_policies_differ": differ})


def _winners(name: str, labels: Sequence[str], rounds: Sequence[Round], figures: dict[str, float]) -> dict[str, Aim]:
    """An aim for each mean that clearly differs between the first policy and another: the same one is better."""
    first, *others = labels
    aims: dict[str, Aim] = {}
    for other in others:
        for metric in METRICS:
            pairs = [(one.pairs[first].both(metric), one.pairs[other].both(metric)) for one in rounds]
            live, simulated = (median(after[at] / before[at] for before, after in pairs) for at in (0, 1))
            key = f"{name}_{metric}_{other}_over_{first}"
            figures |= {f"{key}_live": live, f"{key}_simulated": simulated}
            if abs(live - 1.0) >= CLEAR_DIFFERENCE:
                want, got = (first if ratio > 1.0 else other for ratio in (live, simulated))
                aims[f"{name}_{first}_or_{other}_by_{metric}"] = aim(want, got, want == got)
    return aims


def _rate(scenario: Scenario, found: Calibrated, lengths: Workload) -> float:
    """Requests a second at which neither role, nor the host's cores, are busier than the scenario allows."""
    library = Library.built_in()
    prompt, output = float(lengths.prompt_tokens.mean()), float(lengths.output_tokens.mean())
    speed = dict.fromkeys(Role, 0.0)  # requests a second at full use
    on_cores_s = 0.0
    for one in found.instances:
        kind = found.calibration.of(one.kind)
        assert kind.rates.prefill is not None
        prefill_s = kind.rates.prefill.time_s(prompt)
        decode_s = output * kind.step_times(library).decode_time_s(1, round(prompt))
        speed[one.role] += 1.0 / (prefill_s if one.role is Role.PREFILL else decode_s)
        if one.kind.engine == "vllm" and one.kind.accelerator == "cpu":
            on_cores_s = max(on_cores_s, prefill_s + decode_s)
    rate = scenario.share * min(speed.values())
    return min(rate, scenario.cores_share * (os.cpu_count() or 1) / on_cores_s) if on_cores_s else rate


async def _calibrated(on: Session) -> Calibrated:
    found = await _undisturbed(partial(calibrate, on.target, SEED))
    await on.suite.wait_idle()
    return found


async def _undisturbed(measure: Callable[[], Awaitable[Measured]]) -> Measured:
    """A measurement while others left this machine alone; after TRIES, the quietest of them."""
    tries: list[Measured] = []
    while len(tries) < TRIES:
        tries.append(await measure())
        if tries[-1].foreign_cores <= QUIET_CORES:
            break
    return min(tries, key=lambda one: one.foreign_cores)


def _conditions(scenario: Scenario, rounds: Sequence[Round]) -> dict[str, float]:
    """What explains a large error: how well steps were fitted, and what else ran on this machine."""
    figures: dict[str, float] = {}
    for number, one in enumerate(rounds):
        round_ = f"{scenario.name}_round{number}"
        for turn, found in enumerate(one.calibrations):
            figures |= _fitted(f"{round_}_calibration{turn}", found)
        for label, pair in one.pairs.items():
            figures[f"{round_}_{label}_foreign_cores"] = pair.foreign_cores
            for metric in METRICS:
                seen, predicted = pair.both(metric)
                figures[f"{round_}_{label}_{metric}_live_ms"] = 1e3 * seen
                figures[f"{round_}_{label}_{metric}_off_percent"] = 100.0 * (predicted / seen - 1.0)
    return figures


def _fitted(name: str, found: Calibrated) -> dict[str, float]:
    control = found.calibration.control
    figures = {f"{name}_foreign_cores": found.foreign_cores, f"{name}_lost_steps": float(found.lost_steps)}
    for part in ("gateway_s", "hop_s", "token_s", "link_latency_s"):
        figures[f"{name}_{part.removesuffix('_s')}_ms"] = 1e3 * getattr(control, part)
    for at, kind in enumerate(found.calibration.kinds):
        figures[f"{name}_kind{at}_step_mape_percent"] = kind.mape_percent
        figures[f"{name}_kind{at}_catalogue_mape_percent"] = kind.naive_mape_percent
        figures |= {f"{name}_kind{at}_slowdown_{k}": value for k, value in enumerate(kind.slowdown)}
    return figures
