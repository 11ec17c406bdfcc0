"""Step times and neighbours' part in them, found together."""

import numpy as np
import pytest

from shared.cost.library import Library
from shared.cost.slowdown import slowdown_at
from shared.cost.step import Batch, Speed
from shared.cost.step_variants import ScaledSteps
from shared.errors import InvalidRequest
from tools.fit.steps import TimedStep, fit_on_host, fit_speed


def _batches() -> list[Batch]:
    rng = np.random.default_rng(1)
    decodes = [Batch((), n, n * c) for n in (1, 4, 16, 64) for c in (64, 512, 2048)]
    mixed = [Batch(((int(rng.integers(16, 1024)), int(rng.integers(0, 2000))),), n, n * 300) for n in (0, 1, 8, 32) * 4]
    return decodes + mixed


def test_a_slower_machine_is_found_out(library: Library) -> None:
    model = library.step_model("A10", "Llama-3-8B")
    truth = model.at_speed(Speed(0.3, 0.5, 4e-3, 1e-4))
    rng = np.random.default_rng(2)
    steps = [TimedStep(b, truth.step_time_s(b) * float(rng.normal(1.0, 0.02))) for b in _batches()]
    found = fit_speed(model, steps)
    assert found.bandwidth == pytest.approx(0.5, rel=0.1)
    assert model.at_speed(found).decode_time_s(8, 8000) == pytest.approx(truth.decode_time_s(8, 8000), rel=0.05)


def test_too_few_or_impossible_steps(library: Library) -> None:
    model = library.step_model("A10", "Llama-3-8B")
    step = TimedStep(Batch((), 1, 10), 0.1)
    with pytest.raises(InvalidRequest, match="2 timed steps are too few"):
        fit_speed(model, [step] * 2)
    with pytest.raises(InvalidRequest, match=r"timed step 3 took -1\.0 s"):
        fit_speed(model, [TimedStep(step.batch, -1.0 if i == 3 else 0.1) for i in range(10)])
    with pytest.raises(InvalidRequest, match="5 timed steps are too few"):
        fit_on_host(model, [step] * 5, np.zeros(5))


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
    truth = model.at_speed(Speed(0.2, 1.0, 5e-3, model.efficiencies.sequence_s))
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
    times = ScaledSteps(model.at_speed(found.speed), found.scale, found.chunk_s)
    for batch in (Batch((), 4, 1200), Batch(((256, 0),), 0, 0), Batch(((128, 0),), 4, 800)):
        want_s = truth.step_time_s(batch) + CHUNK_S * len(batch.prefill)
        assert times.step_time_s(batch) == pytest.approx(want_s, rel=0.1)
