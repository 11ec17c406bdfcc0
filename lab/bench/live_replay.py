"""One workload through a running cluster and through the simulator, with the same policies."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from lab.bench.live_clusters import Scenario, Variant
from lab.calibrate.host_watch import HostWatch
from lab.calibrate.running import Calibrated
from lab.calibrate.target import Target
from lab.calibrate.traffic import Sample, Shot, Traffic
from shared.cost.library import Library
from shared.domain.instance import Role
from shared.sim.measured import simulate_on_hosts, specs_of, with_control
from shared.sim.metrics import summary
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload, poisson, synthetic

_CV = 0.7  # spread of the lengths
_LONGEST_SHARE = 0.6  # of the model's context


@dataclass(frozen=True, slots=True)
class Means:
    """Means over all requests, seconds."""

    ttft: float
    tpot: float
    jct: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Means":
        """Of what clients saw."""
        gaps = [gap for sample in samples if (gap := sample.tpot_s) is not None]
        return cls(fmean(s.ttft_s for s in samples), fmean(gaps), fmean(s.jct_s for s in samples))

    @classmethod
    def of_summary(cls, figures: Mapping[str, float]) -> "Means":
        """Of a simulated run, see `shared.sim.metrics.summary`."""
        return cls(*(figures[f"{name}_mean_s"] for name in METRICS))

    @classmethod
    def average(cls, several: Sequence["Means"]) -> "Means":
        """Of several runs of the same requests."""
        return cls(*(fmean(getattr(one, name) for one in several) for name in METRICS))


METRICS = tuple(field.name for field in fields(Means))


@dataclass(frozen=True, slots=True)
class Replay:
    """One run on the live cluster. foreign_cores: what processes that are not ours used meanwhile."""

    means: Means
    foreign_cores: float


def workload_of(scenario: Scenario, found: Calibrated, longest_tokens: int, seed: int) -> Workload:
    """Log-normal lengths and Poisson arrivals, at a rate that keeps the cluster moderately busy."""
    lengths = synthetic(
        scenario.requests,
        scenario.prompt_tokens,
        scenario.output_tokens,
        prompt_cv=_CV,
        output_cv=_CV,
        longest_tokens=int(_LONGEST_SHARE * longest_tokens),
        seed=seed,
    )
    return poisson(lengths, _rate(scenario, found, lengths), seed + 1)


def _rate(scenario: Scenario, found: Calibrated, lengths: Workload) -> float:
    """Requests a second at which neither role, nor the host's cores, are busier than the scenario says."""
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
    if on_cores_s:
        rate = min(rate, scenario.cores_share * (os.cpu_count() or 1) / on_cores_s)
    return rate


async def replay_live(target: Target, traffic: Traffic, workload: Workload, variant: Variant) -> Replay:
    """What clients saw on average, see `send`."""
    samples, foreign_cores = await send(target, traffic, workload, variant)
    return Replay(Means.of(samples), foreign_cores)


def shots_of(workload: Workload) -> list[Shot]:
    """Its requests."""
    mix = workload.mix
    classes = [""] * len(workload) if mix is None else [mix.classes[at].name for at in mix.class_of]
    rows = zip(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, classes, strict=True)
    return [Shot(int(prompt), int(output), float(at), slo) for prompt, output, at, slo in rows]


async def send(target: Target, traffic: Traffic, workload: Workload, variant: Variant) -> tuple[list[Sample], float]:
    """The workload through the gateway, streamed, under the variant's policies; and what cores others used."""
    shots = shots_of(workload)
    async with target.policies(**variant.names), HostWatch(target.launcher_pid) as watch:
        samples = await traffic.timed(shots)
    return samples, watch.mean_cores


def replay_simulated(scenario: Scenario, found: Calibrated, workload: Workload, variant: Variant) -> Means:
    """The same in virtual time, at the calibrated speeds and latencies."""
    specs, neighbours = specs_of(found.instances, found.calibration, Library.built_in())
    run = RunSpec(label=variant.label, policies=variant.policies(), step_budget=True, streaming=scenario.streaming)
    result = simulate_on_hosts(workload, specs, neighbours, with_control(run, found.calibration.control))
    return Means.of_summary(summary(result, run.slo))
