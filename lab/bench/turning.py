"""Workloads that turn from conversation to code and back, and what each phase of them came to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.simulate.workloads import WorkloadOptions, at_rate, make_workload
from shared.domain.job import Slo
from shared.sim.outcomes import Outcomes
from shared.sim.workload import Workload

TRACES = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
MADE = {"conversation": "azure-conv", "code": "azure-code"}  # of the same means, where a trace is missing
SPARE = 1.5  # requests that are made for each that is wanted: some are too long


@dataclass(frozen=True, slots=True)
class Phase:
    """So many seconds of one kind of requests. arrivals: a name of `shared.sim.workload.ARRIVALS`."""

    kind: str
    rate: float
    seconds: float
    arrivals: str = "poisson"


def turning(phases: Sequence[Phase], longest_tokens: int, seed: int, data: Path | None = None) -> Workload:
    """One phase after the other. Lengths are those of Azure's traces in `data`, from another place for each seed, where
    they are there; prompt and answer are `longest_tokens` together at most.
    """
    parts, start_s = [], 0.0
    for number, phase in enumerate(phases):
        part = _part(phase, longest_tokens, seed + 100 * number, data)
        parts.append(part.with_arrivals(start_s + part.arrival_s - part.arrival_s[0]))
        start_s += phase.seconds
    return Workload(
        "turning",
        np.concatenate([part.arrival_s for part in parts]),
        np.concatenate([part.prompt_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
    )


def _part(phase: Phase, longest_tokens: int, seed: int, data: Path | None) -> Workload:
    wanted = max(2, round(phase.rate * phase.seconds))
    found = lengths(phase.kind, round(SPARE * wanted) + 50, longest_tokens, seed, data)
    options = WorkloadOptions(phase.kind, seed=seed, arrivals=phase.arrivals)
    timed = at_rate(found.head(wanted).at_once(), options, phase.rate)
    return timed.head(int(np.searchsorted(timed.arrival_s - timed.arrival_s[0], phase.seconds)))


def trace_of(kind: str, data: Path | None) -> Path | None:
    """The trace of that kind below `data`, where it is there."""
    trace = data / "traces" / "azure2023" / TRACES[kind] if data is not None else None
    return trace if trace is not None and trace.exists() else None


def lengths(kind: str, count: int, longest_tokens: int, seed: int, data: Path | None) -> Workload:
    """So many requests of that kind less those that are too long, all at once: of Azure's trace, else made."""
    if (trace := trace_of(kind, data)) is not None:
        whole = make_workload(WorkloadOptions(str(trace)))
        rows = (seed * 997 + np.arange(count)) % len(whole)  # as they follow each other there
    else:
        whole = make_workload(WorkloadOptions(MADE[kind], requests=count, seed=seed))
        rows = np.arange(count)
    rows = rows[(whole.prompt_tokens + whole.output_tokens)[rows] <= longest_tokens]
    times = np.zeros(len(rows))
    return replace(
        whole, arrival_s=times, prompt_tokens=whole.prompt_tokens[rows], output_tokens=whole.output_tokens[rows]
    )


def attained(outcomes: Outcomes, slo: Slo, phases: Sequence[Phase], settle_s: float = 0.0) -> list[float]:
    """By phase the share of its requests within the SLO, those of its first `settle_s` left out."""
    return shares(outcomes.arrival_s - outcomes.arrival_s[0], outcomes.met(slo), phases, settle_s)


def shares(
    at_s: NDArray[np.float64], met: NDArray[np.bool_], phases: Sequence[Phase], settle_s: float = 0.0
) -> list[float]:
    """The same of any rows: when each arrived, shape [n], and whether it met its targets, shape [n]."""
    found, start_s = [], 0.0
    for phase in phases:
        inside = (at_s >= start_s + settle_s) & (at_s < start_s + phase.seconds)
        found.append(float(met[inside].mean()) if inside.any() else float("nan"))
        start_s += phase.seconds
    return found
