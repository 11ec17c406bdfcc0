"""Calibrations of kinds of instances, for tests."""

from typing import Any

from shared.cost.rates_file import CalibratedKind, Kind
from shared.domain.rates import Rates, StepForm, StepRates, StepSource

FIT = StepRates(StepForm(0.02, 1e-4), StepForm(0.01), StepForm(0.03, 1e-4), StepSource.FIT)
KIND = Kind("vllm", "cpu", "demo", "float32", 1, 1)


def calibrated(**more: Any) -> CalibratedKind:
    """A kind that is as fast as the catalogue says."""
    values: dict[str, Any] = {
        "kind": KIND,
        "geometry": "Llama-3-8B",
        "instances": ("p0", "d0"),
        "samples": 100,
        "mape_percent": 12.5,
        "naive_mape_percent": 90.0,
        "bias_percent": -0.5,
        "compute_factor": 1.0,
        "bandwidth_factor": 1.0,
        "step_s": 0.0,
        "sequence_s": 0.0,
        "scale": 1.0,
        "chunk_s": 0.0,
        "slowdown": (1.0,),
        "saturation_tokens": 256,
        "rates": Rates(FIT),
        **more,
    }
    return CalibratedKind(**values)
