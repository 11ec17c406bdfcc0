"""The clusters of `polyphase bench live`, and the policies that are compared on them."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.calibrate.host_watch import HostWatch
from lab.calibrate.live import Calibrated
from lab.calibrate.target import Sample, Shot, Target, Traffic
from services.launcher.model_source import PROJECT
from shared.cost.library import Library
from shared.domain.instance import Role
from shared.policy import registry
from shared.policy.placement import Policies
from shared.sim.measured import simulate_on_hosts, specs_of, with_control
from shared.sim.metrics import summary
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload, poisson, synthetic

MODEL = PROJECT / "models" / "demo"
_MIB = 1 << 20
_GIB = 1 << 30


def model_with_context(folder: Path, tokens: int) -> None:
    """The demo model in `folder`, whose configuration promises so much context: emulated engines never compute it."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))


PLAIN = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}


@dataclass(frozen=True, slots=True)
class Variant:
    """Policies by kind and name."""

    label: str
    names: Mapping[str, str]

    def policies(self) -> Policies:
        """For the simulator: the functions that the live schedulers run."""
        names = self.names
        return Policies(
            registry.placement(names["placement"]), registry.split(names["split"]), registry.dispatch(names["dispatch"])
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, a workload of mean lengths, and variants, of which the others are compared with the first.

    share, cores_share: how busy the busiest role, and the cores that engines compute on, shall be about.
    drifts: whether the machine may change its speed, so that each replay stands between two calibrations.
    streaming: KV leaves chunk by chunk, as our connector does and emulated instances do not.
    """

    name: str
    title: str
    cluster: dict[str, Any]
    variants: tuple[Variant, ...]
    prompt_tokens: float
    output_tokens: float
    share: float
    requests: int
    streaming: bool
    drifts: bool = False
    rounds: int = 1
    cores_share: float = 0.3


SERVICES: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "demo",
    "max_model_len": 2048,
    "predictor": {"enabled": False},
    "planner": {"enabled": False},
    "dashboard": {"enabled": False},
}

# As clusters/demo.yaml, without predictor and dashboard: on two cores they would be part of what is measured.
REAL = Scenario(
    name="demo",
    title="demo cluster, vLLM on the CPU, 2 prefill + 2 decode",
    cluster={
        **SERVICES,
        "name": "bench live",
        "gateway": {"dtype": "float32"},
        "instance_defaults": {
            "engine": "vllm",
            "accelerator": "cpu",
            "dtype": "float32",
            "kv_cache_bytes": 192 * _MIB,
            "staging_bytes": 128 * _MIB,
            "inbox_bytes": 128 * _MIB,
            "threads": 1,
        },
        "instances": [
            {"id": "prefill-0", "role": "prefill", "block_size": 32},
            {"id": "prefill-1", "role": "prefill", "block_size": 128},
            {"id": "decode-0", "role": "decode", "block_size": 128},
            {"id": "decode-1", "role": "decode", "block_size": 32},
        ],
    },
    variants=(
        Variant("full", {**PLAIN, "split": "full"}),
        Variant("none", {**PLAIN, "split": "none"}),
        Variant("fraction", {**PLAIN, "split": "fraction"}),
    ),
    prompt_tokens=300.0,
    output_tokens=32.0,
    share=0.45,
    requests=100,
    streaming=True,
    drifts=True,
    rounds=3,  # real engines share their cores with whatever else runs: which policy wins is the medians' to say
)

EMULATED = Scenario(
    name="emulated",
    title="emulated accelerators of two kinds, Llama-3-8B, links of 10 Gb/s",
    cluster={
        **SERVICES,
        "name": "bench live (emulated)",
        "instance_defaults": {"engine": "emulated", "emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 64},
        "instances": [
            {"id": "prefill-a100", "role": "prefill", "accelerator": "A100-SXM-80", "kv_cache_bytes": 56 * _GIB},
            {"id": "prefill-a10", "role": "prefill", "accelerator": "A10", "kv_cache_bytes": 6 * _GIB},
            {"id": "decode-a100", "role": "decode", "accelerator": "A100-SXM-80", "kv_cache_bytes": 56 * _GIB},
            {"id": "decode-a10", "role": "decode", "accelerator": "A10", "kv_cache_bytes": 6 * _GIB},
        ],
    },
    variants=(
        Variant("least_load", {**PLAIN, "placement": "least_load"}),
        Variant("round_robin", {**PLAIN, "placement": "round_robin"}),
        Variant("none", {**PLAIN, "split": "none"}),
    ),
    prompt_tokens=700.0,
    output_tokens=40.0,
    share=1.0,
    requests=100,
    streaming=False,
)

# MERGED live_replay.py
# One workload through a running cluster and through the simulator, with the same policies.


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
