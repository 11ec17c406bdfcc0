"""Calibration from timed steps of running instances.

`fit_speed` fits the speed of one instance, `fit_on_host` that of instances that share a host, together with the
slowdown that they cause each other.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares, nnls

from shared.cost.slowdown import NEAR, Curve, Floats, slowdown_at, slowdown_curve
from shared.cost.step import Batch, Speed, StepModel
from shared.cost.step_rates import terms_of
from shared.errors import InvalidRequest
from tools.fit.least_squares import mape

_MIN_SAMPLES = 8
_MIN_ON_HOST = 32  # steps in all
_ROUNDS = 4
_MAX_ALIKE = 40  # fitted steps that are alike: rare ones must count, too
_MIN_KERNEL_SHARE = 0.2  # of a step


@dataclass(frozen=True, slots=True)
class TimedStep:
    """An engine step, as measured."""

    batch: Batch
    seconds: float


@dataclass(frozen=True, slots=True)
class HostFit:
    """Step times = (scale × the model at `speed` + chunk_s × prefill chunks) × slowdown by busy neighbours.

    scale: corrects the fit, which follows typical steps, to their mean. chunk_s: the cost of a prefill chunk besides
    its tokens (accepting the request, staging its KV). mape, naive_mape: shares, on held-out steps; naive is the
    catalogue's accelerator. bias: predicted over measured total of these steps, minus 1.
    """

    speed: Speed
    scale: float
    chunk_s: float
    slowdown: Curve
    samples: int
    mape: float
    naive_mape: float
    bias: float


def fit_speed(model: StepModel, steps: Sequence[TimedStep], seed: int = 0) -> Speed:
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
    fitted = [usable[i] for i in order[: (len(usable) + 1) // 2]]
    measured = np.array([step.seconds for step in fitted])

    def residuals(point: Floats) -> Floats:
        return np.asarray(np.log(_times(model.at_speed(Speed(*np.exp(point).tolist())), fitted) / measured))

    shortest = float(measured.min())
    start = np.log([1.0, 1.0, max(1e-6, 0.3 * shortest), max(1e-8, 0.01 * shortest)])
    low, high = np.log([1e-4, 1e-4, 1e-7, 1e-9]), np.log([4.0, 4.0, 10.0, 1.0])
    solved = least_squares(
        residuals, np.clip(start, low, high), bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3
    )
    return Speed(*np.exp(solved.x).tolist())


def fit_on_host(model: StepModel, steps: Sequence[TimedStep], others: Floats, seed: int = 0) -> HostFit:
    """Fit to a random half of the steps, and measure the errors on the other half.

    others: for each step the number of other busy instances of its host. Raises InvalidRequest for too few steps.
    """
    if len(steps) < _MIN_ON_HOST:
        raise InvalidRequest(f"{len(steps)} timed steps are too few to calibrate, {_MIN_ON_HOST} are needed")
    order = np.random.default_rng(seed).permutation(len(steps))
    half = (len(steps) + 1) // 2
    fitted, rest = order[:half], order[half:]
    speed, scale, chunk_s, slowdown = _fit([steps[at] for at in fitted], others[fitted], model, seed)
    held_out = [steps[at] for at in rest]
    measured = np.array([step.seconds for step in held_out])
    alone = scale * _times(model.at_speed(speed), held_out) + chunk_s * _chunks(held_out)
    predicted = alone * slowdown_at(slowdown, others[rest])
    return HostFit(
        speed,
        scale,
        chunk_s,
        slowdown,
        len(steps),
        mape(predicted, measured),
        mape(_times(model, held_out), measured),
        float(predicted.sum() / measured.sum()) - 1.0,
    )


def _fit(steps: Sequence[TimedStep], others: Floats, model: StepModel, seed: int) -> tuple[Speed, float, float, Curve]:
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
        speed = fit_speed(model, [replace(steps[at], seconds=float(kernels[at])) for at in chosen], seed)
        times = _times(model.at_speed(speed), steps)
        scale = float((alone - chunk_s * chunks)[quiet].sum() / times[quiet].sum())
        curve = slowdown_curve(others, seconds, scale * times + chunk_s * chunks)
    return speed, scale, chunk_s, curve


def _chunk_cost(batches: Sequence[Batch], alone: Floats) -> float:
    """Seconds per chunk, as one term of a sum over a step's counts; non-negative least squares of relative errors."""
    table = np.array([(len(batch.prefill), *terms_of(batch)) for batch in batches])
    parts, _ = nnls(table / alone[:, None], np.ones(len(alone)))
    return float(parts[0])


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


def _chunks(steps: Sequence[TimedStep]) -> Floats:
    return np.array([float(len(step.batch.prefill)) for step in steps])


def _times(model: StepModel, steps: Sequence[TimedStep]) -> Floats:
    return np.array([model.step_time_s(step.batch) for step in steps])
