"""Statistics of the requests that ended: sums and latency histograms by class, in steps of time that add up."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import ceil, log

import msgspec

from shared.domain.job import itl_met

STEPS_S = (10, 60)
KEPT_S = 600.0  # an end that is reported later counts in the oldest step
CLASSES = 64  # names come from clients' keys; further classes are counted as one
OTHER = "other"
LEAST_S, GROWTH, MOST = 1e-4, 1.1, 200  # the last bucket begins at some 19,000 s
_LOG = log(GROWTH)

Histogram = dict[int, int]  # count by bucket; bucket n lies around LEAST_S * GROWTH ** n: percentiles within 5 %


class How(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class Ended(msgspec.Struct, frozen=True):
    """One request that ended, or `count` requests that were refused alike. Unix seconds, seconds, tokens.

    code: a finish reason, or an error's code. seconds: by kind of span (`shared.timeline.Span`); before_first: the part
    of them before its first token. longest_gap_s, gaps, gaps_over: between the deliveries of its tokens, and the number
    that exceeded the target. whole_s: arrival to end. predicted: the source of the predicted length of its answer
    (`shared.domain.verdict.Situation.predictions`).
    """

    slo: str
    how: How
    ended_s: float
    code: str = ""
    count: int = 1
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_target_s: float = 0.0
    tpot_target_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    predicted: str = ""
    seconds: dict[str, float] = {}
    before_first: dict[str, float] = {}
    whole_s: float = 0.0
    transfers: int = 0
    transfers_failed: int = 0
    transfer_bytes: int = 0
    transfer_faults: dict[str, int] = {}
    itl_target_s: float = 0.0
    longest_gap_s: float | None = None
    gaps: int = 0
    gaps_over: int = 0


class Served(msgspec.Struct, omit_defaults=True):
    """Sums over requests that ended. ttft_met, tpot_met, itl_met, met (all three): of completed and failed ones.
    longest_gap: of each request. stages: durations of each kind of span.
    """

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    met: int = 0
    ttft_target_s: float = 0.0
    tpot_target_s: float = 0.0
    ttft: Histogram = {}
    tpot: Histogram = {}
    seconds: dict[str, float] = {}
    before_first: dict[str, float] = {}
    whole_s: float = 0.0
    timed: int = 0  # requests that have `seconds`
    stages: dict[str, Histogram] = {}
    failures: dict[str, int] = {}
    refusals: dict[str, int] = {}
    predicted: dict[str, int] = {}
    transfers: int = 0
    transfers_failed: int = 0
    transfer_bytes: int = 0
    transfer_faults: dict[str, int] = {}
    itl_met: int = 0
    itl_target_s: float = 0.0  # 0 where all were counted before there was a target
    longest_gap: Histogram = {}

    @property
    def judged(self) -> int:
        """Requests that can meet or miss a target: those neither cancelled nor refused."""
        return self.completed + self.failed

    def add(self, ended: Ended) -> None:
        """Count a request."""
        match ended.how:
            case How.COMPLETED:
                self.completed += ended.count
                self._judge(ended)
            case How.FAILED:
                self.failed += ended.count
                _count(self.failures, ended.code, ended.count)
            case How.CANCELLED:
                self.cancelled += ended.count
            case How.REFUSED:
                self.refused += ended.count
                _count(self.refusals, ended.code, ended.count)
        self.prompt_tokens += ended.prompt_tokens
        self.output_tokens += ended.output_tokens
        if ended.ttft_target_s:
            self.ttft_target_s, self.tpot_target_s = ended.ttft_target_s, ended.tpot_target_s
            self.itl_target_s = ended.itl_target_s
        self._time(ended)
        if ended.predicted:
            _count(self.predicted, ended.predicted, 1)
        self.transfers += ended.transfers
        self.transfers_failed += ended.transfers_failed
        self.transfer_bytes += ended.transfer_bytes
        for fault, number in ended.transfer_faults.items():
            _count(self.transfer_faults, fault, number)

    def _judge(self, ended: Ended) -> None:
        in_time = ended.ttft_s is not None and ended.ttft_s <= ended.ttft_target_s
        steady = ended.tpot_s is None or ended.tpot_s <= ended.tpot_target_s
        self.ttft_met += in_time
        without_pause = itl_met(ended.gaps, ended.gaps_over)
        self.tpot_met += steady
        self.itl_met += without_pause
        self.met += in_time and steady and without_pause

    def _time(self, ended: Ended) -> None:
        if ended.ttft_s is not None:
            observe(self.ttft, ended.ttft_s)
        if ended.tpot_s is not None:
            observe(self.tpot, ended.tpot_s)
        if ended.longest_gap_s is not None:
            observe(self.longest_gap, ended.longest_gap_s)
        if not ended.seconds:
            return
        self.timed += 1
        self.whole_s += ended.whole_s
        for stage, seconds in ended.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            observe(self.stages.setdefault(stage, {}), seconds)
        for stage, seconds in ended.before_first.items():
            self.before_first[stage] = self.before_first.get(stage, 0.0) + seconds


_SUMS = (
    "completed",
    "failed",
    "cancelled",
    "refused",
    "prompt_tokens",
    "output_tokens",
    "ttft_met",
    "tpot_met",
    "itl_met",
    "met",
    "whole_s",
    "timed",
    "transfers",
    "transfers_failed",
    "transfer_bytes",
)
_BY_NAME = ("seconds", "before_first", "failures", "refusals", "predicted", "transfer_faults")


def total(parts: Iterable[Served]) -> Served:
    """The sum of all parts, with the targets of the last one."""
    some = list(parts)
    found = Served(**{name: sum(getattr(one, name) for one in some) for name in _SUMS})
    for one in some:
        if one.ttft_target_s:
            found.ttft_target_s, found.tpot_target_s = one.ttft_target_s, one.tpot_target_s
            found.itl_target_s = one.itl_target_s
        for name in _BY_NAME:
            sums = getattr(found, name)
            for key, value in getattr(one, name).items():
                sums[key] = sums.get(key, 0) + value
    found.ttft, found.tpot = merged(one.ttft for one in some), merged(one.tpot for one in some)
    found.longest_gap = merged(one.longest_gap for one in some)
    for stage in {stage for one in some for stage in one.stages}:
        found.stages[stage] = merged(one.stages.get(stage, {}) for one in some)
    return found


Slot = tuple[int, int, str]  # a step's length and beginning, in unix seconds, and the class


class ServedBook:
    """Requests in steps of each length. `now` is unix seconds.

    kept_s: how late a request may be reported to count in the step in which it ended; steps are kept for as long.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._slots: dict[Slot, Served] = {}
        self._changed: set[Slot] = set()
        self._classes: set[str] = set()

    def add(self, ended: Ended, now: float) -> None:
        """Count a request in the steps in which it ended."""
        if ended.slo not in self._classes and len(self._classes) < CLASSES:
            self._classes.add(ended.slo)
        slo = ended.slo if ended.slo in self._classes else OTHER
        at_s = min(max(ended.ended_s, now - self._kept_s), now)
        for step_s in STEPS_S:
            slot = step_s, int(at_s // step_s) * step_s, slo
            self._slots.setdefault(slot, Served()).add(ended)
            self._changed.add(slot)

    def changed(self, now: float) -> list[tuple[Slot, Served]]:
        """The steps that have changed since the last call. Old steps are forgotten."""
        found = [(slot, self._slots[slot]) for slot in sorted(self._changed)]
        self._changed.clear()
        old = [slot for slot in self._slots if slot[1] + 2 * slot[0] < now - self._kept_s]
        for slot in old:
            del self._slots[slot]
        return found

    def window(self, window_s: float, now: float) -> Mapping[str, Served]:
        """The sums of the requests that ended since `window_begins`, by class."""
        step_s, since = STEPS_S[0], window_begins(window_s, now)
        found: dict[str, list[Served]] = {}
        for (length, start, slo), served in self._slots.items():
            if length == step_s and start >= since:
                found.setdefault(slo, []).append(served)
        return {slo: total(parts) for slo, parts in found.items()}


def window_begins(window_s: float, now: float) -> float:
    """The beginning of a window of whole steps and the current one, in unix seconds."""
    step_s = STEPS_S[0]
    return (now - window_s) // step_s * step_s


def _count(counts: dict[str, int], name: str, number: int) -> None:
    counts[name] = counts.get(name, 0) + number


def observe(histogram: Histogram, seconds: float, times: int = 1) -> None:
    at = bucket_of(seconds)
    histogram[at] = histogram.get(at, 0) + times


def bucket_of(seconds: float) -> int:
    """The bucket of a duration; durations outside the range go to its ends."""
    return 0 if seconds <= LEAST_S else min(MOST, round(log(seconds / LEAST_S) / _LOG))


def merged(histograms: Iterable[Mapping[int, int]]) -> Histogram:
    found: Histogram = {}
    for one in histograms:
        for at, times in one.items():
            found[at] = found.get(at, 0) + times
    return found


def quantile(histogram: Mapping[int, int], share: float) -> float | None:
    """The nearest-rank percentile in seconds, within 5 %; None without any. `share` in (0, 1]."""
    total = sum(histogram.values())
    if not total:
        return None
    left = max(1, ceil(share * total))
    for at in sorted(histogram):
        left -= histogram[at]
        if left <= 0:
            return LEAST_S * GROWTH**at
    raise AssertionError("counts are positive")
