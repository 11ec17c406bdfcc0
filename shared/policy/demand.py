"""The profile of what clients ask for: counted by schedulers, added up by the monitor, forgotten when it shifts.

Times are unix seconds in the live services and virtual ones in the simulator. Source: ThunderServe 4 and appendix E (a
profiler of prompt and output lengths, whose shifts have the deployment rescheduled); that arrivals count, and how a
shift is told, is ours.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import exp, floor, log, sqrt
from typing import NamedTuple

import msgspec

from shared.domain.demand import SUMS, Demand, DemandSecond, Shift
from shared.domain.job import JobView
from shared.policy.split import Freedom

# MERGED shift.py
# Whether what clients ask for has changed, beyond its noise: the last seconds against those before them.


# Standard errors by which both must differ: many windows are looked at, and requests are not independent. Answers that
# end together are less so: which ones end is a matter of their lengths.
DEVIATIONS, ANSWERS_DEVIATIONS = 6.0, 7.0
RECENT_S = (2, 15)  # the shortest and the longest stretch that is compared with what was before it
ANSWERS_RECENT_S = 25  # the longest for answers: they end later
BEFORE_S = 8  # seconds before it, for lengths
BEFORE_ARRIVALS_S = 20  # and for the rate, which varies more
BEFORE_REQUESTS, RECENT_REQUESTS = 30, 20
# Of answers that began together the short ones end first: their lengths are compared where arrivals varied by no more
# than this (variance over mean), before and since.
STEADY = 4.0
BLOCK_S = 5  # arrivals of one burst count together
# Standard errors are no less than this, in logarithms: what differs by less than 28 % (lengths) or 65 % (arrivals) is
# no shift, however sure; roles do not depend on it, or the profile follows by itself.
LENGTH_FLOOR, ARRIVAL_FLOOR = 0.05, 0.1


_Scored = tuple[str, float, float, float]  # what, by how many standard errors, before, after


class _Sum(NamedTuple):
    seconds: float
    requests: float
    prompts: float
    prompt_squares: float
    ended: float
    outputs: float
    output_squares: float


def find_shift(seconds: Sequence[DemandSecond]) -> tuple[Shift, int] | None:
    """The clearest change, and how many of the newest seconds came after it; None when there is none.

    seconds: oldest first, all since the last shift. Source: ours; a likelihood scan for one change point, with
    variances of the lengths' logarithms from within both sides, and of the arrivals from blocks of seconds. Fewer
    arrivals are no shift: nobody is hurt by a lull, which is no reason to forget what is asked for between lulls.
    """
    rows = list(seconds)
    if len(rows) < BEFORE_S + RECENT_S[0]:
        return None
    whole, recent, found = _sum(rows), _sum(()), None
    for count in range(1, min(ANSWERS_RECENT_S, len(rows) - BEFORE_S) + 1):
        recent = _plus(recent, _sum(rows[-count : len(rows) - count + 1]), 1)
        if count < RECENT_S[0]:
            continue
        before = _plus(whole, recent, -1)
        scored = [(DEVIATIONS, _prompts(before, recent))] if count <= RECENT_S[1] else []
        if before.seconds >= BEFORE_ARRIVALS_S and before.requests >= BEFORE_REQUESTS:
            dispersion = _dispersion(rows[:-count])
            if count <= RECENT_S[1]:
                scored.append((DEVIATIONS, _arrivals(before, recent, dispersion)))
            if dispersion <= STEADY and _dispersion(rows[-count:] if count >= 2 * BLOCK_S else rows) <= STEADY:
                scored.append((ANSWERS_DEVIATIONS, _outputs(before, recent)))
        for least, (what, deviations, was, now) in scored:
            if deviations >= least and (found is None or deviations > found[0].deviations):
                found = Shift(what, was, now, float(count), deviations), count
    return found


def _prompts(before: _Sum, recent: _Sum) -> _Scored:
    was, now = before.requests, recent.requests
    squares = before.prompt_squares, recent.prompt_squares
    return "prompts", *_lengths((was, now), (before.prompts, recent.prompts), squares)


def _outputs(before: _Sum, recent: _Sum) -> _Scored:
    was, now = before.ended, recent.ended
    squares = before.output_squares, recent.output_squares
    return "outputs", *_lengths((was, now), (before.outputs, recent.outputs), squares)


def _lengths(
    counts: tuple[float, float], logs: tuple[float, float], squares: tuple[float, float]
) -> tuple[float, float, float]:
    """Deviations, and both geometric means, from counts and sums before and after."""
    if counts[0] < BEFORE_REQUESTS or counts[1] < RECENT_REQUESTS:
        return 0.0, 0.0, 0.0
    was, now = logs[0] / counts[0], logs[1] / counts[1]
    within = squares[0] - counts[0] * was * was + squares[1] - counts[1] * now * now
    variance = max(0.0, within) / (sum(counts) - 2.0)
    error = sqrt(variance / counts[0] + variance / counts[1] + LENGTH_FLOOR**2)
    return abs(now - was) / error, exp(was), exp(now)


def _arrivals(before: _Sum, recent: _Sum, dispersion: float) -> _Scored:
    was, now = before.requests / before.seconds, recent.requests / recent.seconds
    expected = was * recent.seconds
    # Of a count whose mean is `expected`, its variance `dispersion` times that: what was before says what is usual.
    error = sqrt(dispersion / before.requests + dispersion / expected + ARRIVAL_FLOOR**2)
    return "arrivals", log((recent.requests + 0.5) / (expected + 0.5)) / error, was, now


def _dispersion(rows: Sequence[DemandSecond]) -> float:
    """Variance over mean of the arrivals in blocks of some seconds; 1 for Poisson arrivals, and no less."""
    blocks = [sum(one.requests for one in rows[at : at + BLOCK_S]) for at in range(0, len(rows) - BLOCK_S + 1, BLOCK_S)]
    mean = sum(blocks) / len(blocks)
    return max(1.0, sum((block - mean) ** 2 for block in blocks) / (len(blocks) - 1) / mean) if mean > 0 else 1.0


def _sum(rows: Sequence[DemandSecond]) -> _Sum:
    return _Sum(
        len(rows),
        sum(one.requests for one in rows),
        sum(one.prompt_logs for one in rows),
        sum(one.prompt_log_squares for one in rows),
        sum(one.ended for one in rows),
        sum(one.ended_logs for one in rows),
        sum(one.ended_log_squares for one in rows),
    )


def _plus(one: _Sum, other: _Sum, sign: int) -> _Sum:
    return _Sum(*(a + sign * b for a, b in zip(one, other, strict=True)))


PAUSE_S = 3.0  # a scheduler that counted nothing for so long stood still, and its clients' requests waited
WINDOW_S = 60  # of a profile
LEAST_S, LEAST_REQUESTS = 5, 50  # before that a profile says nothing
SILENT_S = 5.0  # a scheduler that told nothing for so long is away
LATE_S = 60.0  # what is told later counts no more
AHEAD_S = 5.0  # by which clocks of hosts may differ
CORRECTED = 8.0  # most by which an expected length is corrected, either way
KEPT = 120  # seconds that wait to be told


class DemandCounter:
    """One scheduler's requests by whole seconds, the first partial one left out.

    A gap of more than `pause_s` between two calls was a standstill of this process; nothing is said of it.
    """

    def __init__(self, source: str, now: float, pause_s: float = PAUSE_S) -> None:
        self._source = source
        self._pause_s = pause_s
        self._second = floor(now) + 1
        self._heard_s = now
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._expected: dict[str, float] = {}  # of jobs under way
        self._told: deque[DemandSecond] = deque(maxlen=KEPT)

    def add(self, job: JobView, held_tokens: int, output_tokens: float, split: Freedom, now: float) -> None:
        """A request was placed for the first time, where `held_tokens` of its prompt are in a prefix cache."""
        self._turn(now)
        if floor(now) < self._second:
            return
        prompt, prompt_log = float(job.prompt_tokens), log(max(1, job.prompt_tokens))
        self._expected[job.job_id] = output_tokens
        self._count(
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

    def ended(self, job_id: str, output_tokens: int, now: float) -> None:
        """A job is over here; `output_tokens` of a whole answer, else 0."""
        expected = self._expected.pop(job_id, None)
        if expected is None or output_tokens < 1:
            return
        self._turn(now)
        if floor(now) >= self._second:
            output_log = log(output_tokens)
            self._count(
                ended=1.0,
                ended_tokens=float(output_tokens),
                ended_expected=expected,
                ended_logs=output_log,
                ended_log_squares=output_log * output_log,
            )

    def take(self, now: float) -> list[DemandSecond]:
        """The seconds that are over and were not taken yet."""
        self._turn(now)
        told = list(self._told)
        self._told.clear()
        return told

    def _count(self, **values: float) -> None:
        for name, value in values.items():
            self._sums[name] += value

    def _turn(self, now: float) -> None:
        paused, self._heard_s = now - self._heard_s > self._pause_s, now
        if paused or now < self._second - 2 * AHEAD_S:  # or the clock was put back
            self._second = floor(now) + 1
            self._sums = dict.fromkeys(SUMS, 0.0)
        while self._second < floor(now):
            self._told.append(_as_told(self._source, self._second, self._sums))
            self._sums = dict.fromkeys(SUMS, 0.0)
            self._second += 1


class _Source:
    """What one scheduler has told and was not added up yet."""

    def __init__(self, first: int, now: float) -> None:
        self.first, self.last = first, first - 1
        self.heard_s = now
        self.waiting: dict[int, DemandSecond] = {}


class DemandBook:
    """Adds up what schedulers tell, second by second, once all of them have told.

    A second that a scheduler left out is ignored: it is not a lull. When a scheduler falls silent, nothing is known
    until those that are left have told enough for a profile of their own. Deliveries may come late or twice.
    """

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self._next = 0
        self._seconds: deque[DemandSecond] = deque(maxlen=WINDOW_S)
        self._since = 0  # the second from which on it is like this
        self._shift: Shift | None = None
        self.ignored = 0  # seconds that came too late, or from a clock that is wrong

    @property
    def seconds(self) -> Sequence[DemandSecond]:
        """Those that the profile is made of, oldest first."""
        return self._seconds

    def take(self, seconds: Iterable[DemandSecond], now: float) -> None:
        """What schedulers tell."""
        for one in seconds:
            if not now - LATE_S < one.second + 1 <= now + AHEAD_S:
                self.ignored += 1
                continue
            source = self._sources.get(one.source)
            if source is None:
                source = self._sources[one.source] = _Source(one.second, now)
            source.heard_s = now
            if one.second >= self._next:
                source.waiting[one.second] = one
                source.last = max(source.last, one.second)

    def advance(self, now: float) -> list[Shift]:
        """Add up what is complete; gives back the shifts that were noticed."""
        silent = [name for name, source in self._sources.items() if now - source.heard_s > SILENT_S]
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
            told = [source.waiting.pop(self._next, None) for source in begun]
            self._next += 1
            present = [one for one in told if one is not None]
            if present and len(present) == len(told):
                if not self._seconds:
                    self._since = present[0].second
                self._seconds.append(_added(present))
                if (shift := self._look()) is not None:
                    shifts.append(shift)
        return shifts

    def demand(self, now: float, least_s: int = LEAST_S, least_requests: int = LEAST_REQUESTS) -> Demand | None:
        """The profile; None before there is so much of it, and while a scheduler is silent."""
        if any(now - source.heard_s > SILENT_S for source in self._sources.values()):
            return None
        requests = sum(one.requests for one in self._seconds)
        if len(self._seconds) < max(2, least_s) or requests < least_requests or now - self._next > 2 * SILENT_S:
            return None
        return _profile(self._seconds, requests, now - self._since, self._shift)

    def _look(self) -> Shift | None:
        if self._seconds[-1].quiet:
            return None  # it says nothing that was not known before it
        found = find_shift(self._seconds)
        if found is None:
            return None
        self._shift, recent = found
        self._seconds = deque(list(self._seconds)[-recent:], maxlen=WINDOW_S)
        self._since = self._seconds[0].second
        return self._shift


def _added(present: list[DemandSecond]) -> DemandSecond:
    if len(present) == 1:
        return present[0]
    sums = {name: sum(getattr(one, name) for one in present) for name in SUMS}
    return _as_told("", present[0].second, sums)


def _as_told(source: str, second: int, sums: Mapping[str, float]) -> DemandSecond:
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
        output_tokens=max(1.0, mean["output_tokens"] * _turned_out(rows)),
        ttft_s=1.0 / mean["per_ttft"],
        tpot_s=1.0 / mean["per_tpot"],
        split_least=mean["split_least"],
        split_most=mean["split_most"],
        requests=requests,
        age_s=age_s,
        prompt_spread=_spread(requests, mean["prompt_logs"], mean["prompt_log_squares"]),
        output_spread=_answers_spread(rows),
        shift=shift,
    )


def _spread(count: float, mean_log: float, mean_square: float) -> float:
    return sqrt(max(0.0, mean_square - mean_log * mean_log)) if count > 1 else 0.0


def _answers_spread(rows: Sequence[DemandSecond]) -> float:
    ended = sum(one.ended for one in rows)
    logs, squares = sum(one.ended_logs for one in rows), sum(one.ended_log_squares for one in rows)
    return _spread(ended, logs / ended, squares / ended) if ended else 0.0


def _turned_out(rows: Sequence[DemandSecond]) -> float:
    """By how much answers that ended were longer than expected; predictions lag behind a shift."""
    ended = sum(one.ended for one in rows)
    expected = sum(one.ended_expected for one in rows)
    if ended < LEAST_REQUESTS or expected <= 0.0:
        return 1.0
    return min(CORRECTED, max(1.0 / CORRECTED, sum(one.ended_tokens for one in rows) / expected))
