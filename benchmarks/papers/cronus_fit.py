"""Fits the coefficients to Cronus' twelve stage capacities and prints them: how `coefficients.yaml` was made.

python -m benchmarks.papers.cronus_fit ../shared/data
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from scipy.optimize import least_squares

from benchmarks.papers.cronus import CAPACITIES, HIGH, LOWS, Capacity, capacities, modelled, requests
from benchmarks.papers.testbed import Coefficients, EngineCost, Shares, Testbed
from shared.sim.workload import Workload

_GPUS = (HIGH, *LOWS)
_START = (*(0.8, 0.8) * len(_GPUS), 3e-3, 5e-5)
_LOW = (*(0.3, 0.3) * len(_GPUS), 1e-3, 1e-6)
_HIGH = (*(1.2, 1.2) * len(_GPUS), 1e-2, 5e-4)


def fitted(known: Coefficients, workload: Workload) -> Coefficients:
    """`known` fitted to the capacities: least squares of the logarithms of the errors."""
    seen: dict[tuple[Capacity, Shares, EngineCost], float] = {}  # a GPU's shares do not change the others' capacities

    def error(capacity: Capacity, tried: Coefficients) -> float:
        key = (capacity, tried.devices[capacity.accelerator], tried.engine)
        if key not in seen:
            seen[key] = modelled(Testbed(tried), workload, capacity)
        return float(np.log(seen[key] / capacity.measured))

    def errors(logs: Sequence[float]) -> list[float]:
        tried = with_values(known, np.exp(logs).tolist())
        return [error(capacity, tried) for capacity in CAPACITIES]

    solution = least_squares(errors, np.log(_START), bounds=(np.log(_LOW), np.log(_HIGH)), diff_step=0.01, max_nfev=12)
    return with_values(known, np.exp(solution.x).tolist())


def with_values(known: Coefficients, values: Sequence[float]) -> Coefficients:
    """compute and bandwidth of each GPU, then the engine's two; GPUs of the same chip share the A100's."""
    shares = [Shares(*values[2 * at : 2 * at + 2]) for at in range(len(_GPUS))]
    devices = dict.fromkeys(known.devices, shares[0]) | dict(zip(_GPUS, shares, strict=True))
    mean = Shares(*(float(np.exp(np.mean(np.log(values[at : 2 * len(_GPUS) : 2])))) for at in (0, 1)))
    engine = EngineCost(*values[2 * len(_GPUS) :])
    return msgspec.structs.replace(known, engine=engine, default=mean, devices=devices)


def main() -> None:
    workload = requests(Path(sys.argv[1]))
    found = fitted(Coefficients.from_file(), workload)
    print(found.engine, found.default, *found.devices.items(), sep="\n")
    for capacity, ours in capacities(Testbed(found), workload).items():
        off = 100.0 * (ours / capacity.measured - 1.0)
        print(f"{capacity.accelerator:12} {capacity.model:11} {capacity.role:8} {capacity.measured:6.2f} {off:+6.1f} %")


if __name__ == "__main__":
    main()
