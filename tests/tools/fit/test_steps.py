"""Step times and neighbours' part in them, found together."""

from dataclasses import replace

import numpy as np
import pytest

from shared.cost.kinds import slowdown_at
from shared.cost.library import Library
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest
from tools.fit.steps import TimedStep, fit_live, fit_on_host


def _batches() -> list[Batch]:
    rng = np.random.default_rng(1)
    decodes = [Batch((), n, n * c) for n in (1, 4, 16, 64) for c in (64, 512, 2048)]
    mixed = [Batch(((int(rng.integers(16, 1024)), int(rng.integers(0, 2000))),), n, n * 300) for n in (0, 1, 8, 32) * 4]
    return decodes + mixed


def test_a_slower_machine_is_found_out(library: Library) -> None:
    model = library.step_model("A10", "Llama-3-8B")
    slower = replace(
        model.accelerator,
        bandwidth_bytes_s=0.5 * model.accelerator.bandwidth_bytes_s,
        matrix_flops={k: 0.3 * v for k, v in model.accelerator.matrix_flops.items()},
    )
    truth = StepModel(slower, model.geometry, efficiencies=replace(model.efficiencies, step_s=4e-3, sequence_s=1e-4))
    rng = np.random.default_rng(2)
    steps = [TimedStep(b, truth.step_time_s(b) * float(rng.normal(1.0, 0.02))) for b in _batches()]
    found = fit_live(model, steps)
    assert found.mape < 0.05 < 0.3 < found.naive_mape
    assert found.accelerator.bandwidth_bytes_s == pytest.approx(slower.bandwidth_bytes_s, rel=0.1)
    again = found.step_model(model.geometry)
    assert again.decode_time_s(8, 8000) == pytest.approx(truth.decode_time_s(8, 8000), rel=0.05)


def test_too_few_or_impossible_steps(library: Library) -> None:
    model = library.step_model("A10", "Llama-3-8B")
    with pytest.raises(InvalidRequest, match="2 timed steps are too few"):
        fit_live(model, [TimedStep(Batch((), 1, 10), 0.1)] * 2)
    with pytest.raises(InvalidRequest, match=r"timed step 3 took -1\.0 s"):
        fit_live(model, [TimedStep(Batch((), 1, 10), -1.0 if i == 3 else 0.1) for i in range(10)])


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
