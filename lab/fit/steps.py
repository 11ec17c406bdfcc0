"""Calibration from a running instance: timed steps in, the same model with this machine's speeds out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from lab.fit.least_squares import mape
from shared.cost.catalogue import Accelerator
from shared.cost.efficiency import Efficiencies
from shared.cost.geometry import ModelGeometry
from shared.cost.kinds import NEAR, Curve, Floats, slowdown_at, slowdown_curve
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest

_MIN_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One engine step as it ran."""

    batch: Batch
    seconds: float


@dataclass(frozen=True, slots=True)
class LiveFit:
    """The accelerator at the speeds that were seen, what a step costs besides its kernels, and errors held out.

    `naive_mape` is the error of the accelerator as the catalogue has it. Both are shares.
    """

    accelerator: Accelerator
    efficiencies: Efficiencies
    samples: int
    mape: float
    naive_mape: float

    def step_model(
        self, geometry: ModelGeometry, tensor_parallel: int = 1, dtype: str | None = None, pipeline_parallel: int = 1
    ) -> StepModel:
        """A step model at the fitted speeds."""
        return StepModel(self.accelerator, geometry, tensor_parallel, pipeline_parallel, dtype, self.efficiencies)


def fit_live(model: StepModel, steps: Sequence[TimedStep], seed: int = 0) -> LiveFit:
    """Fit compute rate, bandwidth, and the costs of a step and of a sequence to a random half of the steps.

    The operators' forms stay those of `model`; only what this machine makes of them changes.
    """
    usable = [step for step in steps if step.batch.tokens > 0]
    if len(usable) < _MIN_SAMPLES:
        raise InvalidRequest(f"{len(usable)} timed steps are too few to calibrate, {_MIN_SAMPLES} are needed")
    for index, step in enumerate(usable):
        if not (np.isfinite(step.seconds) and step.seconds > 0):
            raise InvalidRequest(f"timed step {index} took {step.seconds} s; times must be positive and finite")
    order = np.random.default_rng(seed).permutation(len(usable))
    seen = [usable[i] for i in order[: (len(usable) + 1) // 2]]
    unseen = [usable[i] for i in order[(len(usable) + 1) // 2 :]]

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
    measured = np.array([step.seconds for step in unseen])
    return LiveFit(
        accelerator=best.accelerator,
        efficiencies=best.efficiencies,
        samples=len(usable),
        mape=mape(np.array([best.step_time_s(step.batch) for step in unseen]), measured),
        naive_mape=mape(np.array([model.step_time_s(step.batch) for step in unseen]), measured),
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


# MERGED host.py
# Calibration of instances that share a host: step times, and what their neighbours cost them, fitted together.


_ROUNDS = 4
_OF_A_SORT = 40  # steps of one sort that are fitted: the rare ones must count, too
_LEAST = 32  # steps in all
_KERNEL_SHARE = 0.2  # of a step, at least


@dataclass(frozen=True, slots=True)
class HostFit:
    """Step times = (scale × the fitted model + chunk_s × prefill chunks) × slowdown at the number of busy neighbours.

    scale: the fit keeps to typical steps, this to their mean. chunk_s: what a prefill chunk costs besides its tokens
    (taking the request in, staging its KV). mape, naive_mape: shares, on steps that nothing was fitted to; naive is the
    accelerator as the catalogue has it. bias: their predicted over their measured total − 1.
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
    """Fit to a random half of the steps and judge on the other.

    others: for each step how many other instances of its host were busy. Raises InvalidRequest for too few steps.
    """
    if len(steps) < _LEAST:
        raise InvalidRequest(f"{len(steps)} timed steps are too few to calibrate, {_LEAST} are needed")
    order = np.random.default_rng(seed).permutation(len(steps))
    seen, unseen = order[: (len(steps) + 1) // 2], order[(len(steps) + 1) // 2 :]
    live, scale, chunk_s, slowdown = _fit([steps[at] for at in seen], others[seen], model, seed)
    judged = [steps[at] for at in unseen]
    measured = np.array([step.seconds for step in judged])
    alone = scale * _times(_fitted(live, model), judged) + chunk_s * _chunks(judged)
    predicted = alone * slowdown_at(slowdown, others[unseen])
    return HostFit(
        live,
        scale,
        chunk_s,
        slowdown,
        len(steps),
        mape(predicted, measured),
        mape(_times(model, judged), measured),
        float(predicted.sum() / measured.sum()) - 1.0,
    )


def _fit(
    steps: Sequence[TimedStep], others: Floats, model: StepModel, seed: int
) -> tuple[LiveFit, float, float, Curve]:
    """In turn: the model from times without the parts of neighbours and chunks, then those parts from the model."""
    seconds, chunks, chosen = np.array([step.seconds for step in steps]), _chunks(steps), _balanced(steps, seed)
    quiet = others <= NEAR
    if not quiet.any():
        quiet = np.ones(len(steps), dtype=np.bool_)
    curve: Curve = (1.0,)
    for _ in range(_ROUNDS):
        alone = seconds / slowdown_at(curve, others)
        chunk_s = _chunk_cost([steps[at].batch for at in chosen], alone[chosen])
        kernels = np.maximum(alone - chunk_s * chunks, _KERNEL_SHARE * alone)
        live = fit_live(model, [replace(steps[at], seconds=float(kernels[at])) for at in chosen], seed)
        times = _times(_fitted(live, model), steps)
        scale = float((alone - chunk_s * chunks)[quiet].sum() / times[quiet].sum())
        curve = slowdown_curve(others, seconds, scale * times + chunk_s * chunks)
    return live, scale, chunk_s, curve


def _chunk_cost(batches: Sequence[Batch], alone: Floats) -> float:
    """Seconds a chunk, in a sum of parts that grow with a step's counts; least squares of relative errors, none < 0."""
    table = np.array([_counts(batch) for batch in batches])
    parts, _ = nnls(table / alone[:, None], np.ones(len(alone)))
    return float(parts[0])


def _counts(batch: Batch) -> tuple[float, ...]:
    """Chunks first; a step itself, tokens and pairs of attention of its prefills, its decodes and their context."""
    tokens = sum(new for new, _ in batch.prefill)
    pairs = sum(new * (before + new / 2.0) for new, before in batch.prefill)
    return len(batch.prefill), 1.0, tokens, pairs, batch.decode_count, batch.decode_context_tokens


def _balanced(steps: Sequence[TimedStep], seed: int) -> list[int]:
    """Positions of steps, a bounded number of each sort."""
    sorts: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in np.random.default_rng(seed).permutation(len(steps)):
        sorts[_sort(steps[at].batch)].append(int(at))
    return sorted(at for found in sorts.values() for at in found[:_OF_A_SORT])


def _sort(batch: Batch) -> tuple[int, ...]:
    """What makes steps alike: orders of magnitude of their parts."""
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
