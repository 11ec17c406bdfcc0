"""The profile of what clients request: a scheduler counts it by seconds, the monitor sums the counts of all schedulers.

`DemandCounter` is the scheduler's part, `DemandBook` the monitor's. Times are unix seconds live and virtual ones in the
simulator.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import floor, log, sqrt

import msgspec

from shared.domain.demand import SUMS, Demand, DemandSecond, Shift
from shared.domain.job import JobView
from shared.policy.demand_shift import find_shift
from shared.policy.split import Freedom

PAUSE_S = 3.0  # a scheduler that did not count for this long was frozen, and its clients' requests waited
WINDOW_S = 60  # of a profile
LEAST_S, LEAST_REQUESTS = 5, 50  # of a profile
SILENT_S = 5.0  # a scheduler without reports for this long is gone
LATE_S = 60.0  # older reports are ignored
AHEAD_S = 5.0  # by which clocks of hosts may differ
CORRECTED = 8.0  # largest factor by which an expected length is corrected, either way
KEPT = 120  # seconds that a scheduler keeps until it can report them


class DemandCounter:
    """Counts one scheduler's requests by whole seconds, without the first, partial one.

    A gap of more than `pause_s` between two calls was a standstill of this process, and is left out.
    """

    def __init__(self, source: str, now: float, pause_s: float = PAUSE_S) -> None:
        self._source = source
        self._pause_s = pause_s
        self._second = floor(now) + 1
        self._reported_s = now
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._expected: dict[str, float] = {}  # of jobs under way
        self._finished: deque[DemandSecond] = deque(maxlen=KEPT)

    def count_request(self, job: JobView, held_tokens: int, output_tokens: float, split: Freedom, now: float) -> None:
        """Count a request that was placed for the first time; `held_tokens` of its prompt are in a prefix cache
        there.
        """
        self._advance(now)
        if floor(now) < self._second:
            return
        prompt, prompt_log = float(job.prompt_tokens), log(max(1, job.prompt_tokens))
        self._expected[job.job_id] = output_tokens
        self._add(
            requests=1.0,
            prompt_tokens=prompt,
            fresh_tokens=prompt - held_tokens,
            fresh_squares=prompt * prompt - held_tokens * held_tokens,
            prompt_logs=prompt_log,
            prompt_log_squares=prompt_log * prompt_log,
            output_tokens=output_tokens,
            per_ttft=1.0 / job.slo.ttft_s,
            per_tpot=1.0 / job.slo.tpot_s,
            split_least=split[0],
            split_most=split[1],
        )

    def count_end(self, job_id: str, output_tokens: int, now: float) -> None:
        """Count a job that has ended; `output_tokens` of a whole answer, else 0."""
        expected = self._expected.pop(job_id, None)
        if expected is None or output_tokens < 1:
            return
        self._advance(now)
        if floor(now) >= self._second:
            output_log = log(output_tokens)
            self._add(
                ended=1.0,
                ended_tokens=float(output_tokens),
                ended_expected=expected,
                ended_logs=output_log,
                ended_log_squares=output_log * output_log,
            )

    def pop_finished(self, now: float) -> list[DemandSecond]:
        """The finished seconds since the last call."""
        self._advance(now)
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self._sums[name] += value

    def _advance(self, now: float) -> None:
        paused, self._reported_s = now - self._reported_s > self._pause_s, now
        if paused or now < self._second - 2 * AHEAD_S:  # or the clock was put back
            self._second = floor(now) + 1
            self._sums = dict.fromkeys(SUMS, 0.0)
        while self._second < floor(now):
            self._finished.append(_second(self._source, self._second, self._sums))
            self._sums = dict.fromkeys(SUMS, 0.0)
            self._second += 1


class _Source:
    """The reports of one scheduler that are not summed yet."""

    def __init__(self, first: int, now: float) -> None:
        self.first, self.last = first, first - 1
        self.reported_s = now
        self.waiting: dict[int, DemandSecond] = {}


class DemandBook:
    """Sums the reports of the schedulers, second by second, once all of them have reported.

    A second that a scheduler left out is ignored: it is not a lull. When a scheduler falls silent, there is no profile
    until the others have reported enough for a new one. Reports may come late or twice.
    """

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self._next = 0
        self._seconds: deque[DemandSecond] = deque(maxlen=WINDOW_S)
        self._since = 0  # the first second of the present demand
        self._shift: Shift | None = None
        self.ignored = 0  # reported seconds that came too late, or from a wrong clock

    @property
    def seconds(self) -> Sequence[DemandSecond]:
        """The seconds of the profile, oldest first."""
        return self._seconds

    def add(self, seconds: Iterable[DemandSecond], now: float) -> None:
        """Add reports of schedulers."""
        for report in seconds:
            if not now - LATE_S < report.second + 1 <= now + AHEAD_S:
                self.ignored += 1
                continue
            source = self._sources.get(report.source)
            if source is None:
                source = self._sources[report.source] = _Source(report.second, now)
            source.reported_s = now
            if report.second >= self._next:
                source.waiting[report.second] = report
                source.last = max(source.last, report.second)

    def advance(self, now: float) -> list[Shift]:
        """Sum the complete seconds; returns the detected shifts."""
        silent = [name for name, source in self._sources.items() if now - source.reported_s > SILENT_S]
        for name in silent:
            del self._sources[name]
        if silent:
            self._seconds.clear()
            for source in self._sources.values():
                source.waiting.clear()
        if not self._sources:
            return []
        shifts = []
        first = min((s for source in self._sources.values() for s in source.waiting), default=self._next)
        self._next = max(self._next, first)
        while self._next <= min(source.last for source in self._sources.values()):
            begun = [source for source in self._sources.values() if source.first <= self._next]
            reports = [source.waiting.pop(self._next, None) for source in begun]
            self._next += 1
            present = [report for report in reports if report is not None]
            if present and len(present) == len(reports):
                if not self._seconds:
                    self._since = present[0].second
                self._seconds.append(_total(present))
                if (shift := self._detect_shift()) is not None:
                    shifts.append(shift)
        return shifts

    def demand(self, now: float, least_s: int = LEAST_S, least_requests: int = LEAST_REQUESTS) -> Demand | None:
        """The profile; None before it covers that much, and while a scheduler is silent."""
        if any(now - source.reported_s > SILENT_S for source in self._sources.values()):
            return None
        requests = sum(one.requests for one in self._seconds)
        if len(self._seconds) < max(2, least_s) or requests < least_requests or now - self._next > 2 * SILENT_S:
            return None
        return _profile(self._seconds, requests, now - self._since, self._shift)

    def _detect_shift(self) -> Shift | None:
        if self._seconds[-1].quiet:
            return None  # it changes no comparison
        found = find_shift(self._seconds)
        if found is None:
            return None
        self._shift, recent = found
        self._seconds = deque(list(self._seconds)[-recent:], maxlen=WINDOW_S)
        self._since = self._seconds[0].second
        return self._shift


def _total(present: list[DemandSecond]) -> DemandSecond:
    if len(present) == 1:
        return present[0]
    sums = {name: sum(getattr(one, name) for one in present) for name in SUMS}
    return _second("", present[0].second, sums)


def _second(source: str, second: int, sums: Mapping[str, float]) -> DemandSecond:
    counts = {name: round(sums[name]) for name in ("requests", "ended")}
    return msgspec.convert({"source": source, "second": second, **sums, **counts}, DemandSecond)


def _profile(seconds: Iterable[DemandSecond], requests: int, age_s: float, shift: Shift | None) -> Demand:
    rows = list(seconds)
    mean = {name: sum(getattr(one, name) for one in rows) / requests for name in SUMS}
    per_second = requests / len(rows)
    spread = sum((one.requests - per_second) ** 2 for one in rows) / (len(rows) - 1)
    return Demand(
        rate=per_second,
        burstiness=spread / per_second,
        prompt_tokens=mean["prompt_tokens"],
        fresh_tokens=mean["fresh_tokens"],
        fresh_squares=mean["fresh_squares"],
        output_tokens=max(1.0, mean["output_tokens"] * _length_correction(rows)),
        ttft_s=1.0 / mean["per_ttft"],
        tpot_s=1.0 / mean["per_tpot"],
        split_least=mean["split_least"],
        split_most=mean["split_most"],
        requests=requests,
        age_s=age_s,
        prompt_spread=_spread(requests, mean["prompt_logs"], mean["prompt_log_squares"]),
        output_spread=_output_spread(rows),
        shift=shift,
    )


def _spread(count: float, mean_log: float, mean_square: float) -> float:
    return sqrt(max(0.0, mean_square - mean_log * mean_log)) if count > 1 else 0.0


def _output_spread(rows: Sequence[DemandSecond]) -> float:
    ended = sum(one.ended for one in rows)
    logs, squares = sum(one.ended_logs for one in rows), sum(one.ended_log_squares for one in rows)
    return _spread(ended, logs / ended, squares / ended) if ended else 0.0


def _length_correction(rows: Sequence[DemandSecond]) -> float:
    """The factor by which ended answers were longer than expected; predictions lag behind a shift."""
    ended = sum(one.ended for one in rows)
    expected = sum(one.ended_expected for one in rows)
    if ended < LEAST_REQUESTS or expected <= 0.0:
        return 1.0
    return min(CORRECTED, max(1.0 / CORRECTED, sum(one.ended_tokens for one in rows) / expected))
