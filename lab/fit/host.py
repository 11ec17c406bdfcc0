"""Calibration of instances that share a host: step times, and what their neighbours cost them, fitted together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from lab.fit.least_squares import mape
from lab.fit.steps import LiveFit, TimedStep, fit_live
from shared.cost.kinds import NEAR, Curve, Floats, slowdown_at, slowdown_curve
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest

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
