from dataclasses import replace

import numpy as np
import pytest

from lab.fit.steps import TimedStep, fit_live
from shared.cost.library import Library
from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest


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
