"""Calibration from a running instance: timed steps in, the same model with this machine's speeds out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lab.fit.least_squares import mape
from shared.cost.catalogue import Accelerator
from shared.cost.efficiency import Efficiencies
from shared.cost.geometry import ModelGeometry
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
