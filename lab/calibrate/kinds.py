"""From recorded steps to calibrated kinds of instances."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from lab.fit.host import HostFit, fit_on_host
from lab.fit.steps import TimedStep
from shared.cost.kinds import Floats, joined, others_busy
from shared.cost.library import Library
from shared.cost.linear import rates_of, saturation_tokens
from shared.cost.rates_file import CalibratedKind, Kind, ScaledSteps, geometry_name, scaled_rates
from shared.cost.step import Batch, StepModel
from shared.sim.measured import LiveInstance
from shared.wire.messages import StepRecord

Steps = Mapping[str, Sequence[StepRecord]]


def fit_kinds(instances: Sequence[LiveInstance], steps: Steps, library: Library) -> tuple[CalibratedKind, ...]:
    """Each kind of instance from the steps of all of its instances.

    Raises NotFound (model, accelerator) and InvalidRequest (too few steps).
    """
    others = _others(instances, steps)
    groups: defaultdict[Kind, list[LiveInstance]] = defaultdict(list)
    for one in instances:
        groups[one.kind].append(one)
    return tuple(_fit(kind, group, steps, others, library) for kind, group in groups.items())


def _fit(
    kind: Kind, group: Sequence[LiveInstance], steps: Steps, others: Mapping[str, Floats], library: Library
) -> CalibratedKind:
    geometry = geometry_name(group[0].info)
    model = library.step_model(kind.accelerator, geometry, kind.tensor_parallel, kind.pipeline_parallel, kind.dtype)
    names = [one.info.instance_id for one in group]
    timed = [timed_step(step) for name in names for step in steps.get(name, ())]
    beside = joined([others[name] for name in names])
    fit = fit_on_host(model, timed, beside)
    fitted = fit.live.step_model(model.geometry, kind.tensor_parallel, kind.dtype, kind.pipeline_parallel)
    times = ScaledSteps(fitted, fit.scale, fit.chunk_s)
    chunk = min(one.info.chunk_size for one in group)
    return CalibratedKind(
        kind=kind,
        geometry=geometry,
        instances=tuple(names),
        samples=fit.samples,
        mape_percent=100.0 * fit.mape,
        naive_mape_percent=100.0 * fit.naive_mape,
        bias_percent=100.0 * fit.bias,
        **_factors(model, fit),
        step_s=fit.live.efficiencies.step_s,
        sequence_s=fit.live.efficiencies.sequence_s,
        scale=fit.scale,
        chunk_s=fit.chunk_s,
        slowdown=fit.slowdown,
        saturation_tokens=saturation_tokens(times.prefill_time_s, most=max(32, group[0].info.max_model_len)),
        rates=scaled_rates(rates_of(fitted, chunk), fit.scale, fit.chunk_s, chunk),
    )


def timed_step(step: StepRecord) -> TimedStep:
    """A record as the cost model has it."""
    return TimedStep(Batch(step.prefill, step.decode_count, step.decode_context_tokens), step.seconds)


def _factors(model: StepModel, fit: HostFit) -> dict[str, float]:
    before, after = model.accelerator, fit.live.accelerator
    name = next(iter(before.matrix_flops))
    return {
        "compute_factor": after.matrix_flops[name] / before.matrix_flops[name],
        "bandwidth_factor": after.bandwidth_bytes_s / before.bandwidth_bytes_s,
    }


def _others(instances: Sequence[LiveInstance], steps: Steps) -> dict[str, Floats]:
    """For each step of each instance, how many other instances of its host were busy."""
    found: dict[str, Floats] = {}
    for host in {one.host for one in instances}:
        names = [one.info.instance_id for one in instances if one.host == host]
        found |= others_busy({name: _interval(steps.get(name, ())) for name in names})
    return found


def _interval(steps: Sequence[StepRecord]) -> tuple[Floats, Floats]:
    ends = np.array([step.ended_s for step in steps], dtype=np.float64)
    return ends - np.array([step.seconds for step in steps], dtype=np.float64), ends
