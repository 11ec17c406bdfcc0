"""`polyphase calibrate live`: a short controlled load on a running suite, and what its steps and timelines say."""

import asyncio
import datetime
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.calibrate.control import control_plane
from lab.calibrate.host_watch import HostWatch
from lab.calibrate.kinds import fit_kinds
from lab.calibrate.phases import run_phases
from lab.calibrate.step_reader import StepReader
from lab.calibrate.target import Target
from lab.calibrate.traffic import Traffic
from shared.cost.library import Library
from shared.cost.rates_file import Calibration, ControlPlane
from shared.sim.measured import LiveInstance

_MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, and of which instances.

    lost_steps: forgotten before they could be read. foreign_cores: what others used of this machine meanwhile.
    """

    calibration: Calibration
    instances: tuple[LiveInstance, ...]
    lost_steps: int
    foreign_cores: float


async def calibrate(target: Target, seed: int = 0, library: Library | None = None) -> Calibrated:
    """Measure and fit. Raises Unavailable, NotFound, InvalidRequest or DeadlineExceeded with the cause.

    Takes a minute or so. The cluster should be idle otherwise; its split is changed meanwhile, and put back.
    """
    library = library or Library.built_in()
    instances = await target.instances()
    traffic = await Traffic.to(target, seed)
    reader = StepReader(instances)
    async with HostWatch(target.launcher_pid) as watch:
        observed = await run_phases(target, traffic, instances, reader, _cores(instances), seed)
    samples = (*observed.alone, *observed.moderate)
    timelines = await target.timelines({sample.request_id for sample in samples})
    control = control_plane(observed.alone, observed.moderate, timelines, reader.steps)
    kinds = await asyncio.to_thread(fit_kinds, instances, reader.steps, library)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Calibrated(Calibration(date, _words(instances), control, kinds), instances, reader.lost, watch.mean_cores)


def run_live(target: Target, out: Path, seed: int = 0) -> dict[str, Any]:
    """Calibrate, write the file, and say what was found, as a measuring command does."""
    found = asyncio.run(calibrate(target, seed))
    out.write_text(found.calibration.to_yaml(), encoding="utf-8")
    return result_of(found)


def result_of(found: Calibrated) -> dict[str, Any]:
    """Figures of a calibration; the aim is to beat the roofline on steps that nothing was fitted to."""
    figures: dict[str, float] = {f"{name}_ms": 1e3 * value for name, value in _latencies(found.calibration.control)}
    figures["foreign_cores"] = found.foreign_cores
    figures["link_mb_per_s"] = found.calibration.control.link_bytes_s / 1e6
    aims: dict[str, dict[str, Any]] = {}
    notes = [f"{found.lost_steps} steps were forgotten before they were read"] if found.lost_steps else []
    for number, one in enumerate(found.calibration.kinds):
        name = f"kind{number}"
        notes.append(f"{name}: {one.kind}: {', '.join(one.instances)}; {one.samples} steps")
        figures |= {
            f"{name}_mape_percent": one.mape_percent,
            f"{name}_naive_mape_percent": one.naive_mape_percent,
            f"{name}_bias_percent": one.bias_percent,
            f"{name}_saturation_tokens": one.saturation_tokens,
        }
        for part in ("prefill", "chunked", "batch"):
            figures |= {f"{name}_{key}_s": value for key, value in _coefficients(getattr(one.rates, part))}
        figures |= {f"{name}_slowdown_{k}_others": value for k, value in enumerate(one.slowdown)}
        if one.kind.engine != "emulated":  # whose times are the catalogue's
            better = one.mape_percent < one.naive_mape_percent
            want = f"< {one.naive_mape_percent:.3g} (the catalogue's roofline)"
            aims[f"{name}_held_out_mape_percent"] = {"want": want, "got": round(one.mape_percent, 2), "met": better}
    return {"figures": figures, "aims": aims, "notes": notes}


def _latencies(control: ControlPlane) -> list[tuple[str, float]]:
    names = ("gateway", "hop", "token", "link_latency")
    return [(name, getattr(control, f"{name}_s")) for name in names]


def _coefficients(cost: Any) -> list[tuple[str, float]]:
    return [(name, getattr(cost, name)) for name in cost.__struct_fields__]


def _cores(instances: tuple[LiveInstance, ...]) -> int:
    """Cores that the instances share, where they compute on them."""
    on_cores = any(one.kind.engine == "vllm" and one.kind.accelerator == "cpu" for one in instances)
    return (os.cpu_count() or 1) if on_cores else _MANY


def _words(instances: tuple[LiveInstance, ...]) -> str:
    counts = Counter(f"{one.role.value} ({one.kind})" for one in instances)
    return "; ".join(f"{count} × {name}" for name, count in counts.items())
