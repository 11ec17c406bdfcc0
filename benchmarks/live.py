"""`polyphase bench live`: the simulator beside a live cluster that it was calibrated on.

Two clusters: the demo's, with real engines, and one of emulated accelerators. Each is calibrated, then serves the same
requests under several policies, live and simulated. Aims: every mean within 15 %, and of two policies that clearly
differ the same one is better in both.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from benchmarks.cluster_files import emulated
from benchmarks.experiment import Arm, LiveRun, Means, Session, judged, measured, quietest
from benchmarks.results import Result, in_turns, merged, result
from benchmarks.suite import BARE, CPU_ENGINE
from shared.cost.library import Library
from shared.domain.instance import Role
from shared.sim.measured import simulate_on_hosts, specs_of, with_control
from shared.sim.spec import RunSpec, with_words
from shared.sim.workload import Workload, poisson, synthetic
from tools.calibrate.live import Calibrated, calibrate

QUIET_CORES = 0.15  # measurements are repeated while others use more cores of this machine
SEED = 7
REQUESTS = 100
LENGTHS_CV = 0.7
LONGEST_SHARE = 0.6  # of the model's context
CORES_SHARE = 0.3  # how busy the cores that engines compute on shall be about


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster, mean lengths of the requests, and policies, of which the first is compared with the others.

    share: how busy the busiest role shall be about. streaming: KV leaves chunk by chunk, as with our connector and not
    with emulated instances. drifts: the machine may change its speed, so that each replay stands between two
    calibrations. rounds: medians over them decide which policy is better.
    """

    name: str
    title: str
    cluster: dict[str, object]
    arms: tuple[Arm, ...]
    prompt_tokens: float
    output_tokens: float
    share: float
    streaming: bool
    drifts: bool = False
    rounds: int = 1


# As clusters/demo.yaml, without predictor and dashboard: on two cores they would be part of what is measured.
REAL = Setting(
    name="demo",
    title="demo cluster, vLLM on the CPU, 2 prefill + 2 decode",
    cluster={
        **BARE,
        "name": "bench live",
        "gateway": {"dtype": "float32"},
        "instance_defaults": CPU_ENGINE,
        "instances": [
            {"id": f"{role}-{at}", "role": role, "block_size": size}
            for role, sizes in (("prefill", (32, 128)), ("decode", (128, 32)))
            for at, size in enumerate(sizes)
        ],
    },
    arms=tuple(Arm(name, f"least_load+split={name}+power_of_two") for name in ("full", "none", "fraction")),
    prompt_tokens=300.0,
    output_tokens=32.0,
    share=0.45,
    streaming=True,
    drifts=True,
    rounds=3,
)
EMULATED = Setting(
    name="emulated",
    title="emulated accelerators of two kinds, Llama-3-8B, links of 10 Gb/s",
    cluster=emulated(
        "live (emulated)",
        [
            {"id": f"{role}-{name}", "role": role, "accelerator": accelerator, "kv_cache_bytes": gib << 30}
            for role in ("prefill", "decode")
            for name, accelerator, gib in (("a100", "A100-SXM-80", 56), ("a10", "A10", 6))
        ],
        {"emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 64},
    ),
    arms=(
        Arm("least_load", "placement=least_load+split=full+power_of_two"),
        Arm("round_robin", "placement=round_robin+split=full+power_of_two"),
        Arm("none", "placement=least_load+split=none+power_of_two"),
    ),
    prompt_tokens=700.0,
    output_tokens=40.0,
    share=1.0,
    streaming=False,
)


def run_live_bench(settings: Sequence[Setting] = (EMULATED, REAL)) -> Result:
    return merged(*(asyncio.run(measured(one.cluster, partial(compare, one), seed=SEED)) for one in settings))


async def compare(one: Setting, on: Session) -> Result:
    """Calibrate, replay and simulate on a running cluster."""
    latest = await _calibrated(on)
    workload = workload_of(one, latest, on.traffic.max_model_len)
    figures = {f"{one.name}_rate_per_s": workload.rate}

    async def replay(number: int, arm: Arm) -> tuple[Means, Means]:
        nonlocal latest
        before, run = latest, await quietest(partial(on.send, workload, arm), _foreign_cores, QUIET_CORES)
        latest = await _calibrated(on) if one.drifts else latest
        predicted = [await asyncio.to_thread(simulated, one, known, workload, arm) for known in (before, latest)]
        figures[f"{one.name}_round{number}_{arm.label}_foreign_cores"] = run.foreign_cores
        return Means.from_result(run.result), Means(*map(fmean, zip(*predicted, strict=True)))

    rounds = await in_turns(one.arms, one.rounds, replay)
    note = f"{one.name}: {one.title}; {len(workload)} requests, {one.rounds} rounds"
    return merged(judged(one.name, rounds), result(figures, notes=[note]))


def workload_of(one: Setting, known: Calibrated, max_model_len: int) -> Workload:
    """Log-normal lengths and Poisson arrivals, at a rate that keeps the cluster moderately busy."""
    longest, cv = int(LONGEST_SHARE * max_model_len), LENGTHS_CV
    means = one.prompt_tokens, one.output_tokens
    lengths = synthetic(REQUESTS, *means, prompt_cv=cv, output_cv=cv, longest_tokens=longest, seed=SEED)
    return poisson(lengths, _rate(one, known, lengths), SEED + 1)


def simulated(one: Setting, known: Calibrated, workload: Workload, arm: Arm) -> Means:
    """A replay in virtual time, at the calibrated speeds and latencies."""
    specs, neighbours = specs_of(known.instances, known.calibration, Library.built_in())
    run = with_words(RunSpec(step_budget=True, streaming=one.streaming), arm.words)
    return Means.from_result(
        simulate_on_hosts(workload, specs, neighbours, with_control(run, known.calibration.control))
    )


def _rate(one: Setting, known: Calibrated, lengths: Workload) -> float:
    """Requests a second at which neither role, nor the host's cores, are busier than the setting allows."""
    library = Library.built_in()
    prompt, output = float(lengths.prompt_tokens.mean()), float(lengths.output_tokens.mean())
    speed = dict.fromkeys(Role, 0.0)  # requests a second at full use
    on_cores_s = 0.0
    for instance in known.instances:
        kind = known.calibration.for_kind(instance.kind)
        times = kind.step_times(library)
        prefill_s = times.prefill_time_s(round(prompt))
        decode_s = output * times.decode_time_s(1, round(prompt))
        speed[instance.role] += 1.0 / (prefill_s if instance.role is Role.PREFILL else decode_s)
        if instance.kind.engine == "vllm" and instance.kind.accelerator == "cpu":
            on_cores_s = max(on_cores_s, prefill_s + decode_s)
    rate = one.share * min(speed.values())
    return min(rate, CORES_SHARE * (os.cpu_count() or 1) / on_cores_s) if on_cores_s else rate


async def _calibrated(on: Session) -> Calibrated:
    found = await quietest(partial(calibrate, on.target, SEED), _foreign_cores, QUIET_CORES)
    await on.suite.wait_idle()
    return found


def _foreign_cores(measurement: LiveRun | Calibrated) -> float:
    return measurement.foreign_cores
