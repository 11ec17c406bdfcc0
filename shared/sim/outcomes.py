"""What happened in a run: a row for each request, a record for each instance, gaps between tokens, load over time."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from shared.domain.demand import Shift
from shared.domain.job import ITL_SPARED, Slo
from shared.domain.route import Reason
from shared.sim.workload import Lengths, Times, Workload

_BINS_PER_E = 200.0  # a bin of `Gaps` is half a per cent wide


class Status(IntEnum):
    COMPLETED = 0
    REFUSED = 1  # too many requests waited before it, or no instance could take it within its patience
    IMPOSSIBLE = 2  # too long for every instance
    UNFINISHED = 3  # it waits, and no event is left
    TIMED_OUT = 4  # stopped because it took longer than a job may


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One row for each request, in the order of the workload; shape [n] each. Times in seconds from the run's start.

    A time that never came is NaN. Instances are positions in `SimResult.instances`, -1 where there was none.
    split_tokens: prompt tokens that the prefill instance computed. transfer_s: from the prefill's end until all KV was
    at the decode instance. attempts: 1, plus one for each resume after a lost instance. longest_gap_s: between two
    tokens of the request, NaN with fewer than two. gaps_over: gaps longer than the target (`Slo.itl_s`) that the
    request's class had in the run. predicted_ttft_s, predicted_tpot_s: by the estimate of its first placement, NaN
    without one.
    """

    arrival_s: Times
    first_token_s: Times
    last_token_s: Times
    prompt_tokens: Lengths
    output_tokens: Lengths
    status: NDArray[np.int8]
    prefill_instance: NDArray[np.int32]
    decode_instance: NDArray[np.int32]
    split_tokens: Lengths
    transfer_s: Times
    attempts: NDArray[np.int16]
    preemptions: NDArray[np.int16]
    longest_gap_s: Times
    gaps_over: Lengths
    predicted_ttft_s: Times
    predicted_tpot_s: Times

    @classmethod
    def empty(cls, workload: Workload) -> "Outcomes":
        n = len(workload)
        return cls(
            arrival_s=workload.arrival_s.copy(),
            first_token_s=np.full(n, np.nan),
            last_token_s=np.full(n, np.nan),
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            status=np.full(n, int(Status.UNFINISHED), dtype=np.int8),
            prefill_instance=np.full(n, -1, dtype=np.int32),
            decode_instance=np.full(n, -1, dtype=np.int32),
            split_tokens=np.zeros(n, dtype=np.int64),
            transfer_s=np.zeros(n),
            attempts=np.ones(n, dtype=np.int16),
            preemptions=np.zeros(n, dtype=np.int16),
            longest_gap_s=np.full(n, np.nan),
            gaps_over=np.zeros(n, dtype=np.int64),
            predicted_ttft_s=np.full(n, np.nan),
            predicted_tpot_s=np.full(n, np.nan),
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def completed(self) -> NDArray[np.bool_]:
        done: NDArray[np.bool_] = self.status == int(Status.COMPLETED)
        return done

    @property
    def ttft_s(self) -> Times:
        return self.first_token_s - self.arrival_s

    @property
    def jct_s(self) -> Times:
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Times:
        """Mean gap after the first token; NaN with fewer than two tokens."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        tpot: Times = (self.last_token_s - self.first_token_s) / gaps
        return tpot

    def ttft_met(self, slo: Slo) -> NDArray[np.bool_]:
        """Requests that completed with their first token in time."""
        met: NDArray[np.bool_] = self.completed & (self.ttft_s <= slo.ttft_s)
        return met

    def tpot_met(self, slo: Slo) -> NDArray[np.bool_]:
        """Requests that completed within the TPOT target; with fewer than two tokens there is no TPOT to miss."""
        met: NDArray[np.bool_] = self.completed & ((self.tpot_s <= slo.tpot_s) | (self.output_tokens < 2))
        return met

    def itl_met(self, slo: Slo) -> NDArray[np.bool_]:
        """Requests that completed with at most one gap in a hundred over the target that they had in the run.

        A request whose longest gap is within the target of `slo` meets the target in any case.
        """
        few = self.gaps_over * ITL_SPARED <= np.maximum(self.output_tokens - 1, 0)
        met: NDArray[np.bool_] = self.completed & (few | (self.longest_gap_s <= slo.itl_s))
        return met

    def met(self, slo: Slo) -> NDArray[np.bool_]:
        return self.ttft_met(slo) & self.tpot_met(slo) & self.itl_met(slo)


@dataclass(slots=True)
class Gaps:
    """All gaps between tokens (ITL), in bins half a per cent wide: memory does not grow with the tokens."""

    bins: dict[int, float] = field(default_factory=dict)
    count: float = 0.0
    total_s: float = 0.0

    def add(self, gap_s: float, times: float = 1.0) -> None:
        """Count a gap of `gap_s` seconds `times` times."""
        at = round(log(gap_s) * _BINS_PER_E) if gap_s > 1e-9 else -100_000
        self.bins[at] = self.bins.get(at, 0.0) + times
        self.count += times
        self.total_s += gap_s * times

    def merge(self, others: Iterable["Gaps"]) -> "Gaps":
        merged = Gaps(dict(self.bins), self.count, self.total_s)
        for other in others:
            for at, times in other.bins.items():
                merged.bins[at] = merged.bins.get(at, 0.0) + times
            merged.count += other.count
            merged.total_s += other.total_s
        return merged

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else float("nan")

    def percentile_s(self, share: float) -> float:
        """The gap that `share` (0..1) of all gaps do not exceed; NaN without any."""
        left = share * self.count
        for at in sorted(self.bins):
            left -= self.bins[at]
            if left <= 1e-9:
                return exp(at / _BINS_PER_E)
        return float("nan")


@dataclass(frozen=True, slots=True)
class InstanceUse:
    """What one instance did. `role_s`: seconds in each role; `busy_s`: seconds with a step under way."""

    instance_id: str
    accelerator: str
    accelerators: int
    price_per_hour: float  # USD for the whole instance
    busy_s: float
    role_s: dict[str, float]
    prefill_tokens: int  # computed, recomputation included
    decode_tokens: int
    steps: int
    preemptions: int
    peak_kv_share: float
    flips: int


@dataclass(frozen=True, slots=True)
class RoleFlipped:
    """A flip that a policy decided at `time_s`, and why."""

    time_s: float
    instance_id: str
    to: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class LoadTimeline:
    """Samples of the load: `time_s` has shape [t], the others [t, instances]. role: 0 prefill, 1 decode, -1 dead."""

    time_s: Times
    role: NDArray[np.int8]
    decoding: NDArray[np.int32]
    queued_prefill_tokens: NDArray[np.int64]
    kv_share: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SimResult:
    """A run. duration_s: from the first arrival to the last token. events: how many were handled.

    role_flips: those that a policy decided. shifts: of the demand, each with the time at which it was noticed.
    """

    workload: str
    label: str
    outcomes: Outcomes
    instances: tuple[InstanceUse, ...]
    gaps: Gaps
    duration_s: float
    events: int
    kv_bytes: float = 0.0  # over all links
    pulls: int = 0  # of prefixes, that brought something
    pulled_tokens: int = 0
    migrations: int = 0  # of decodes that went on elsewhere with their KV
    timeline: LoadTimeline | None = None
    role_flips: tuple[RoleFlipped, ...] = ()
    shifts: tuple[tuple[float, Shift], ...] = ()
