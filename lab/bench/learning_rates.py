"""Rates that were learned beside those of a calibration: predicted times of steps as an instance meets them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from types import MappingProxyType

import numpy as np

from lab.bench.mixed_sim import FormSteps
from lab.calibrate.kinds import timed_step
from shared.cost.kinds import others_busy, slowdown_at
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, ScaledSteps
from shared.cost.step import Batch
from shared.domain.rates import StepRates
from shared.sim.measured import LiveInstance
from shared.wire.messages import StepRecord

FEWEST = 10  # steps of a kind, in the traffic and in the calibration, else there is nothing to compare
_CONTEXTS = (128, 384)  # tokens of a decode's context
# Prefill chunks at a prompt's beginning and further on; decodes at several counts and contexts; both together.
BATCHES: Mapping[str, tuple[Batch, ...]] = MappingProxyType(
    {
        "prefill": tuple(Batch(((new, before),)) for new in (64, 128, 256) for before in (0, 256)),
        "decode": tuple(Batch((), count, count * context) for count in (1, 2, 4, 8) for context in _CONTEXTS),
        "mixed": tuple(
            Batch(((new, before),), count, count * 256)
            for new, before in ((64, 0), (192, 0), (192, 256))
            for count in (1, 2, 4)
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One kind of an instance's steps. off: learned over calibrated times − 1, of each of the `BATCHES`.

    measured_off: the same of the calibration's steps, learned over measured.
    """

    instance_id: str
    kind: str
    steps: int  # that were learned from
    off: tuple[float, ...]
    measured_off: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Of the magnitudes; a share."""
        return fmean(abs(one) for one in self.off)


def apart(instances: Sequence[LiveInstance]) -> tuple[LiveInstance, ...]:
    """The same as kinds of their own: alike by name, they differ in their cores, which no kind knows."""
    return tuple(replace(one, threads=1000 + number) for number, one in enumerate(instances))


def busy_others(steps: Mapping[str, Sequence[StepRecord]]) -> dict[str, float]:
    """By instance, how many of the others computed on average while it did; 0 for one that did nothing."""
    intervals = {}
    for name, records in steps.items():
        ended_s = np.array([one.ended_s for one in records])
        intervals[name] = (ended_s - np.array([one.seconds for one in records]), ended_s)
    found = others_busy(intervals)
    return {name: float(others.mean()) if len(others) else 0.0 for name, others in found.items()}


def beside(calibrated: CalibratedKind, others: float) -> ScaledSteps:
    """Its step times while so many others of the host compute: they share more than their quotas say."""
    slowdown = float(slowdown_at(calibrated.slowdown, np.array([others]))[0])
    return calibrated.step_times(Library.built_in()).times(slowdown)


def compare(
    instance_id: str, learned: StepRates, calibrated: ScaledSteps, steps: Sequence[StepRecord]
) -> list[Compared]:
    """The kinds that the instance has served and that its calibration, of these `steps`, has seen enough of."""
    by_kind: dict[str, list[StepRecord]] = {kind: [] for kind in BATCHES}
    for step in steps:
        by_kind[kind_of(timed_step(step).batch)].append(step)
    told, found = FormSteps(learned), []
    for kind, batches in BATCHES.items():
        known = getattr(learned, kind).steps
        if min(known, len(by_kind[kind])) >= FEWEST:
            off = tuple(told.step_time_s(batch) / calibrated.step_time_s(batch) - 1.0 for batch in batches)
            timed = [timed_step(step) for step in by_kind[kind]]
            measured = tuple(told.step_time_s(one.batch) / one.seconds - 1.0 for one in timed)
            found.append(Compared(instance_id, kind, known, off, measured))
    return found


def kind_of(batch: Batch) -> str:
    """As rates have it."""
    return "decode" if not batch.prefill else "mixed" if batch.decode_count else "prefill"


def median_error(compared: Sequence[Compared]) -> float:
    """Of all batches of all kinds and instances; a share."""
    return median(abs(one) for each in compared for one in each.off)
