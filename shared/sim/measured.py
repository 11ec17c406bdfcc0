"""A calibrated cluster in the simulator: its instances as specs, and how instances of one host slow each other down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shared.cost.library import Library
from shared.cost.network import Link
from shared.cost.rates_file import Calibration, ControlPlane, Kind
from shared.cost.slowdown import Curve, slowdown_at
from shared.cost.step_variants import ScaledSteps
from shared.domain.instance import InstanceInfo, Role
from shared.sim.cluster import simulate
from shared.sim.outcomes import LoadTimeline, SimResult
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.workload import Workload

_UNMEASURED_BYTES_S = 1e12  # of a link too fast to be measured
_ROUNDS = 4
_SAMPLES = 4000  # of which instances are busy, over the arrivals


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """An instance as the monitor and its worker describe it. `host`: the machine whose cores it uses."""

    info: InstanceInfo
    role: Role
    host: str
    threads: int = 1
    max_seqs: int = 256

    @property
    def kind(self) -> Kind:
        return Kind.from_info(self.info, self.threads)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The host of an instance, and how much longer its steps take while other instances of that host are busy."""

    host: str
    slowdown: Curve


def specs_of(
    instances: Sequence[LiveInstance], calibration: Calibration, library: Library
) -> tuple[tuple[InstanceSpec, ...], dict[str, Neighbours]]:
    """Specs of running instances, each as if alone on its host, and their neighbours by instance id.

    Raises NotFound for a kind of instance that is not calibrated.
    """
    models: dict[Kind, ScaledSteps] = {}
    control = calibration.control
    link = Link(control.link_bytes_s or _UNMEASURED_BYTES_S, control.link_latency_s, 1.0)
    specs, neighbours = [], {}
    for one in instances:
        found = calibration.for_kind(one.kind)
        info = one.info
        neighbours[info.instance_id] = Neighbours(one.host, found.slowdown)
        specs.append(
            InstanceSpec(
                instance_id=info.instance_id,
                model=models.setdefault(one.kind, found.step_times(library)),
                role=one.role,
                kv_tokens=info.total_blocks * info.block_size,
                kv_bytes_per_token=info.kv_bytes_per_token,
                limits=EngineLimits(
                    batched_tokens=info.chunk_size,
                    sequences=min(one.max_seqs, info.chunk_size),
                    block_tokens=info.block_size,
                    max_model_len=info.max_model_len,
                ),
                link=link,
                accelerator=info.accelerator,
                accelerators=info.tensor_parallel * info.pipeline_parallel,
                lanes=info.pipeline_parallel,
                price_per_hour=info.rates.price_per_hour,
                rates=info.rates,
            )
        )
    return tuple(specs), neighbours


def with_control(run: RunSpec, control: ControlPlane) -> RunSpec:
    return replace(run, gateway_s=control.gateway_s, hop_s=control.hop_s, token_s=control.token_s)


def simulate_on_hosts(
    workload: Workload, instances: Sequence[InstanceSpec], neighbours: Mapping[str, Neighbours], run: RunSpec
) -> SimResult:
    """A run in which instances of one host slow each other down, by how busy the run finds them to be.

    Repeats: simulate, and lengthen each instance's steps by the mean of its slowdown over the samples at which it
    computes. That includes which neighbours compute at the same time, but not which of its steps they lengthen.
    """
    span_s = float(workload.arrival_s[-1] - workload.arrival_s[0])
    run = replace(run, sample_s=run.sample_s or max(span_s, 1.0) / _SAMPLES)
    factors = dict.fromkeys(neighbours, 1.0)
    result = simulate(workload, instances, run)
    for _ in range(_ROUNDS):
        wanted = _slowdowns([spec.instance_id for spec in instances], neighbours, result.timeline)
        if all(abs(wanted[name] / factors[name] - 1.0) < 1e-3 for name in wanted):
            break
        factors = wanted
        result = simulate(workload, [_slower(spec, factors) for spec in instances], run)
    return result


def _slowdowns(
    names: Sequence[str], neighbours: Mapping[str, Neighbours], timeline: LoadTimeline | None
) -> dict[str, float]:
    """The mean slowdown of each instance over the samples at which it is busy, which is when it has work."""
    assert timeline is not None
    busy = (timeline.decoding > 0) | (timeline.queued_prefill_tokens > 0)
    found = {}
    for at, name in enumerate(names):
        host = neighbours[name].host
        beside = [other for other, them in enumerate(names) if other != at and neighbours[them].host == host]
        others = busy[busy[:, at]][:, beside].sum(axis=1).astype(np.float64)
        found[name] = float(slowdown_at(neighbours[name].slowdown, others).mean()) if len(others) else 1.0
    return found


def _slower(spec: InstanceSpec, factors: Mapping[str, float]) -> InstanceSpec:
    factor = factors.get(spec.instance_id, 1.0)
    if factor == 1.0:
        return spec
    steps = spec.model.times(factor) if isinstance(spec.model, ScaledSteps) else spec.model
    return replace(spec, model=steps)
