"""Calibration from timed steps of running instances.

`fit_live` fits the speeds of one instance, `fit_on_host` those of instances that share a host, together with the
slowdown that they cause each other.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from shared.cost.catalogue import Accelerator
from shared.cost.efficiency import Efficiencies
from shared.cost.geometry import ModelGeometry
from shared.cost.kinds import NEAR, Curve, Floats, slowdown_at, slowdown_curve
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest
from tools.fit.least_squares import mape

_MIN_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class TimedStep:
    """An engine step, as measured."""

    batch: Batch
    seconds: float


@dataclass(frozen=True, slots=True)
class LiveFit:
    """The accelerator at the fitted speeds, the cost of a step besides its kernels, and held-out errors.

    naive_mape: the error with the catalogue's accelerator. Both errors are shares.
    """

    accelerator: Accelerator
    efficiencies: Efficiencies
    samples: int
    mape: float
    naive_mape: float

    def step_model(
        self, geometry: ModelGeometry, tensor_parallel: int = 1, dtype: str | None = None, pipeline_parallel: int = 1
    ) -> StepModel:
        return StepModel(self.accelerator, geometry, tensor_parallel, pipeline_parallel, dtype, self.efficiencies)


def fit_live(model: StepModel, steps: Sequence[TimedStep], seed: int = 0) -> LiveFit:
    """Fit compute rate, bandwidth, and the costs of a step and of a sequence to a random half of the steps.

    Raises InvalidRequest for too few steps.
    """
    usable = [step for step in steps if step.batch.tokens > 0]
    if len(usable) < _MIN_SAMPLES:
        raise InvalidRequest(f"{len(usable)} timed steps are too few to calibrate, {_MIN_SAMPLES} are needed")
    for index, step in enumerate(usable):
        if not (np.isfinite(step.seconds) and step.seconds > 0):
            raise InvalidRequest(f"timed step {index} took {step.seconds} s; times must be positive and finite")
    order = np.random.default_rng(seed).permutation(len(usable))
    half = (len(usable) + 1) // 2
    seen, held_out = [usable[i] for i in order[:half]], [usable[i] for i in order[half:]]

    def residuals(point: NDArray[np.float64]) -> NDArray[np.float64]:
        fitted = _at(model, point)
        return np.array([np.log(fitted.step_time_s(s.batch) / s.seconds) for s in seen])

    shortest = min(step.seconds for step in seen)
    start = np.log([1.0, 1.0, max(1e-6, 0.3 * shortest), max(1e-8, 0.01 * shortest)])
    low = np.log([1e-4, 1e-4, 1e-7, 1e-9])
    high = np.log([4.0, 4.0, 10.0, 1.0])
    solved = least_squares(
        residuals, np.clip(start, low, high), bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3
    )
    best = _at(model, solved.x)
    measured = np.array([step.seconds for step in held_out])
    return LiveFit(
        accelerator=best.accelerator,
        efficiencies=best.efficiencies,
        samples=len(usable),
        mape=mape(np.array([best.step_time_s(step.batch) for step in held_out]), measured),
        naive_mape=mape(np.array([model.step_time_s(step.batch) for step in held_out]), measured),
    )


def _at(model: StepModel, point: NDArray[np.float64]) -> StepModel:
    """`model` with log-scaled compute, bandwidth, step cost and sequence cost."""
    compute, bandwidth, step_s, sequence_s = (float(x) for x in np.exp(point))
    accelerator = replace(
        model.accelerator,
        bandwidth_bytes_s=model.accelerator.bandwidth_bytes_s * bandwidth,
        matrix_flops={name: rate * compute for name, rate in model.accelerator.matrix_flops.items()},
    )
    efficiencies = replace(model.efficiencies, step_s=step_s, sequence_s=sequence_s)
    return StepModel(
        accelerator,
        model.geometry,
        model.tensor_parallel,
        model.pipeline_parallel,
        model.dtype,
        efficiencies,
        model.kv_dtype,
    )


_ROUNDS = 4
_MAX_ALIKE = 40  # fitted steps that are alike: rare ones must count, too
_MIN_ON_HOST = 32  # steps in all
_MIN_KERNEL_SHARE = 0.2  # of a step


@dataclass(frozen=True, slots=True)
class HostFit:
    """Step times = (scale × the fitted model + chunk_s × prefill chunks) × slowdown at the number of busy neighbours.

    scale: corrects the fit, which follows typical steps, to their mean. chunk_s: the cost of a prefill chunk besides
    its tokens (accepting the request, staging its KV). mape, naive_mape: shares, on held-out steps; naive is the
    catalogue's accelerator. bias: predicted over measured total of these steps, minus 1.
    """

    live: LiveFit
    scale: float
    chunk_s: float
    slowdown: Curve
    samples: int
    mape: float
    naive_mape: float
    bias: float


def fit_on_host(model: StepModel, steps: Sequence[TimedStep], others: Floats, seed: int = 0) -> HostFit:
    """Fit to a random half of the steps, and measure the errors on the other half.

    others: for each step the number of other busy instances of its host. Raises InvalidRequest for too few steps.
    """
    if len(steps) < _MIN_ON_HOST:
        raise InvalidRequest(f"{len(steps)} timed steps are too few to calibrate, {_MIN_ON_HOST} are needed")
    order = np.random.default_rng(seed).permutation(len(steps))
    half = (len(steps) + 1) // 2
    fitted, rest = order[:half], order[half:]
    live, scale, chunk_s, slowdown = _fit([steps[at] for at in fitted], others[fitted], model, seed)
    held_out = [steps[at] for at in rest]
    measured = np.array([step.seconds for step in held_out])
    alone = scale * _times(_fitted(live, model), held_out) + chunk_s * _chunks(held_out)
    predicted = alone * slowdown_at(slowdown, others[rest])
    return HostFit(
        live,
        scale,
        chunk_s,
        slowdown,
        len(steps),
        mape(predicted, measured),
        mape(_times(model, held_out), measured),
        float(predicted.sum() / measured.sum()) - 1.0,
    )


def _fit(
    steps: Sequence[TimedStep], others: Floats, model: StepModel, seed: int
) -> tuple[LiveFit, float, float, Curve]:
    """Alternate: fit the model to times without the parts of neighbours and chunks, then these parts to the model."""
    seconds, chunks, chosen = np.array([step.seconds for step in steps]), _chunks(steps), _balanced(steps, seed)
    quiet = others <= NEAR
    if not quiet.any():
        quiet = np.ones(len(steps), dtype=np.bool_)
    curve: Curve = (1.0,)
    for _ in range(_ROUNDS):
        alone = seconds / slowdown_at(curve, others)
        chunk_s = _chunk_cost([steps[at].batch for at in chosen], alone[chosen])
        kernels = np.maximum(alone - chunk_s * chunks, _MIN_KERNEL_SHARE * alone)
        live = fit_live(model, [replace(steps[at], seconds=float(kernels[at])) for at in chosen], seed)
        times = _times(_fitted(live, model), steps)
        scale = float((alone - chunk_s * chunks)[quiet].sum() / times[quiet].sum())
        curve = slowdown_curve(others, seconds, scale * times + chunk_s * chunks)
    return live, scale, chunk_s, curve


def _chunk_cost(batches: Sequence[Batch], alone: Floats) -> float:
    """Seconds per chunk, as one term of a sum over a step's counts; non-negative least squares of relative errors."""
    table = np.array([_counts(batch) for batch in batches])
    parts, _ = nnls(table / alone[:, None], np.ones(len(alone)))
    return float(parts[0])


def _counts(batch: Batch) -> tuple[float, ...]:
    """Chunks, the step itself, tokens and attention pairs of its prefills, its decodes, and their context."""
    tokens = sum(new for new, _ in batch.prefill)
    pairs = sum(new * (before + new / 2.0) for new, before in batch.prefill)
    return len(batch.prefill), 1.0, tokens, pairs, batch.decode_count, batch.decode_context_tokens


def _balanced(steps: Sequence[TimedStep], seed: int) -> list[int]:
    """Positions of steps, a bounded number of those that are alike."""
    alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in np.random.default_rng(seed).permutation(len(steps)):
        alike[_magnitudes(steps[at].batch)].append(int(at))
    return sorted(at for found in alike.values() for at in found[:_MAX_ALIKE])


def _magnitudes(batch: Batch) -> tuple[int, ...]:
    """Orders of magnitude of a step's parts: steps with the same ones are alike."""
    prefill = batch.tokens - batch.decode_count
    mean = batch.decode_context_tokens // max(1, batch.decode_count)
    parts = (prefill, len(batch.prefill), sum(before for _, before in batch.prefill), batch.decode_count, mean // 64)
    return tuple(part.bit_length() for part in parts)


def _fitted(live: LiveFit, model: StepModel) -> StepModel:
    return live.step_model(model.geometry, model.tensor_parallel, model.dtype, model.pipeline_parallel)


def _chunks(steps: Sequence[TimedStep]) -> Floats:
    return np.array([float(len(step.batch.prefill)) for step in steps])


def _times(model: StepModel, steps: Sequence[TimedStep]) -> Floats:
    return np.array([model.step_time_s(step.batch) for step in steps])
