"""Step times and neighbours' part in them, found together."""

from dataclasses import replace

import numpy as np
import pytest

from lab.fit.steps import TimedStep, fit_on_host
from shared.cost.kinds import slowdown_at
from shared.cost.library import Library
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest

CURVE = (1.0, 1.25, 1.8)
CHUNK_S = 0.2


def batches(rng: np.random.Generator, count: int) -> list[Batch]:
    found = []
    for _ in range(count):
        decodes = int(rng.integers(0, 9))
        chunk = ((int(rng.integers(8, 513)), 0),) if rng.random() < 0.3 or not decodes else ()
        found.append(Batch(chunk, decodes, decodes * int(rng.integers(50, 800))))
    return found


def test_speed_and_neighbours_are_told_apart(library: Library) -> None:
    model = library.step_model("cpu", "Llama-3-8B", dtype="float32")
    slower = replace(
        model.accelerator, matrix_flops={name: 0.2 * rate for name, rate in model.accelerator.matrix_flops.items()}
    )
    truth = StepModel(slower, model.geometry, 1, 1, "float32", replace(model.efficiencies, step_s=5e-3))
    rng = np.random.default_rng(5)
    steps = batches(rng, 900)
    others = rng.choice([0.0, 1.0, 2.0], len(steps), p=[0.5, 0.3, 0.2])
    noise = np.exp(rng.normal(0.0, 0.05, len(steps)))
    alone = np.array([truth.step_time_s(batch) + CHUNK_S * len(batch.prefill) for batch in steps])
    seconds = alone * slowdown_at(CURVE, others) * noise
    found = fit_on_host(model, [TimedStep(b, s) for b, s in zip(steps, seconds, strict=True)], others)
    assert found.slowdown == pytest.approx(CURVE, rel=0.06)
    assert found.mape < 0.1 < found.naive_mape
    assert abs(found.bias) < 0.05
    alone = found.live.step_model(model.geometry, 1, "float32")
    for batch in (Batch((), 4, 1200), Batch(((256, 0),), 0, 0), Batch(((128, 0),), 4, 800)):
        chunks = len(batch.prefill)
        want_s = truth.step_time_s(batch) + CHUNK_S * chunks
        assert found.scale * alone.step_time_s(batch) + found.chunk_s * chunks == pytest.approx(want_s, rel=0.1)


def test_too_few_steps(library: Library) -> None:
    model = library.step_model("cpu", "Llama-3-8B")
    with pytest.raises(InvalidRequest, match="5 timed steps are too few"):
        fit_on_host(model, [TimedStep(Batch((), 1, 10), 0.1)] * 5, np.zeros(5))
