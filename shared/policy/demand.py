"""Demand: what clients request, of each SLO class as a scheduler learns it, and of all together as the monitor sums it.

`DemandCounter` is a scheduler's, `DemandBook` the monitor's; `find_shift` detects that the demand has changed beyond
its noise. Times are unix seconds live and virtual ones in the simulator. Source: ThunderServe 4 and appendix E (a
profiler of prompt and output lengths, whose shifts reschedule the deployment); arrivals and the detection of shifts are
ours.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, floor, log, sqrt
from typing import NamedTuple

import msgspec

from shared.domain.demand import SUMS, Demand, DemandSecond, Shift
from shared.domain.job import JobView, Slo, WhenFull
from shared.policy.split import Freedom

# Standard errors by which the seconds before and after a shift differ: many windows are compared, and requests are not
# independent. Answers that end together are even less independent: which ones end depends on their lengths.
DEVIATIONS, ANSWERS_DEVIATIONS = 6.0, 7.0
RECENT_S = (2, 15)  # the shortest and the longest recent stretch that is compared with the seconds before it
ANSWERS_RECENT_S = 25  # the longest for answers, which end later
BEFORE_S = 8  # the fewest seconds before it, for lengths
BEFORE_ARRIVALS_S = 20  # and for the rate, which varies more
BEFORE_REQUESTS, RECENT_REQUESTS = 30, 20
# Of answers that began together, the short ones end first: their lengths are compared only where arrivals varied by at
# most this (variance over mean), before and since.
STEADY = 4.0
BLOCK_S = 5  # arrivals in blocks of this length count together, as bursts do
# Standard errors are at least this, in logarithms: a change by less than 28 % (lengths) or 65 % (arrivals) is no shift,
# however certain; roles do not depend on it, or the profile follows by itself.
LENGTH_FLOOR, ARRIVAL_FLOOR = 0.05, 0.1


_Scored = tuple[str, float, float, float]  # what, by how many standard errors, before, after


_SUMMED = ("requests", "prompt_logs", "prompt_log_squares", "ended", "ended_logs", "ended_log_squares")


class _Lengths(NamedTuple):
    """Number of lengths, and sums of their logarithms and of the squares of these."""

    number: float
    logs: float
    squares: float


class _Sum(NamedTuple):
    """Sums over some seconds; of prompts and outputs those of their logarithms."""

    seconds: float
    requests: float
    prompts: float
    prompt_squares: float
    ended: float
    outputs: float
    output_squares: float

    @property
    def prompts_only(self) -> _Lengths:
        return _Lengths(self.requests, self.prompts, self.prompt_squares)

    @property
    def outputs_only(self) -> _Lengths:
        return _Lengths(self.ended, self.outputs, self.output_squares)


def find_shift(seconds: Sequence[DemandSecond]) -> tuple[Shift, int] | None:
    """The clearest change, and the number of seconds since then; None without a change.

    seconds: all since the last shift, oldest first. Source: ours; a likelihood scan for one change point, with
    variances of the lengths' logarithms from within both sides, and of the arrivals from blocks of seconds. Fewer
    arrivals are no shift: a lull does no harm, and the profile of the time between lulls is worth keeping.
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
        prompts = "prompts", *_lengths(before.prompts_only, recent.prompts_only)
        scored: list[tuple[float, _Scored]] = [(DEVIATIONS, prompts)] if count <= RECENT_S[1] else []
        if before.seconds >= BEFORE_ARRIVALS_S and before.requests >= BEFORE_REQUESTS:
            dispersion = _dispersion(rows[:-count])
            if count <= RECENT_S[1]:
                scored.append((DEVIATIONS, _arrivals(before, recent, dispersion)))
            if dispersion <= STEADY and _dispersion(rows[-count:] if count >= 2 * BLOCK_S else rows) <= STEADY:
                outputs = "outputs", *_lengths(before.outputs_only, recent.outputs_only)
                scored.append((ANSWERS_DEVIATIONS, outputs))
        for least, (what, deviations, was, now) in scored:
            if deviations >= least and (found is None or deviations > found[0].deviations):
                found = Shift(what, was, now, float(count), deviations), count
    return found


def _lengths(before: _Lengths, recent: _Lengths) -> tuple[float, float, float]:
    """Standard errors by which the lengths differ, and both geometric means."""
    if before.number < BEFORE_REQUESTS or recent.number < RECENT_REQUESTS:
        return 0.0, 0.0, 0.0
    was, now = before.logs / before.number, recent.logs / recent.number
    within = before.squares - before.number * was * was + recent.squares - recent.number * now * now
    variance = max(0.0, within) / (before.number + recent.number - 2.0)
    error = sqrt(variance / before.number + variance / recent.number + LENGTH_FLOOR**2)
    return abs(now - was) / error, exp(was), exp(now)


def _arrivals(before: _Sum, recent: _Sum, dispersion: float) -> _Scored:
    was, now = before.requests / before.seconds, recent.requests / recent.seconds
    expected = was * recent.seconds
    # The variance of a count with mean `expected` is `dispersion` times that, by the seconds before.
    error = sqrt(dispersion / before.requests + dispersion / expected + ARRIVAL_FLOOR**2)
    return "arrivals", log((recent.requests + 0.5) / (expected + 0.5)) / error, was, now


def _dispersion(rows: Sequence[DemandSecond]) -> float:
    """Variance over mean of the arrivals in blocks of `BLOCK_S` seconds, at least 1; 1 for Poisson arrivals."""
    blocks = [sum(one.requests for one in rows[at : at + BLOCK_S]) for at in range(0, len(rows) - BLOCK_S + 1, BLOCK_S)]
    mean = sum(blocks) / len(blocks)
    return max(1.0, sum((block - mean) ** 2 for block in blocks) / (len(blocks) - 1) / mean) if mean > 0 else 1.0


def _sum(rows: Sequence[DemandSecond]) -> _Sum:
    return _Sum(len(rows), *(sum(getattr(one, name) for one in rows) for name in _SUMMED))


def _plus(one: _Sum, other: _Sum, sign: int) -> _Sum:
    return _Sum(*(a + sign * b for a, b in zip(one, other, strict=True)))


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

    def add(self, job: JobView, held_tokens: int, output_tokens: float, split: Freedom, now: float) -> None:
        """Count a request that was placed for the first time; `held_tokens` of its prompt are in a prefix cache
        there.
        """
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
        """Count a job that has ended; `output_tokens` of a whole answer, else 0."""
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
        """The finished seconds that were not taken yet."""
        self._turn(now)
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def _count(self, **values: float) -> None:
        for name, value in values.items():
            self._sums[name] += value

    def _turn(self, now: float) -> None:
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

    def take(self, seconds: Iterable[DemandSecond], now: float) -> None:
        """Add reports of schedulers."""
        for one in seconds:
            if not now - LATE_S < one.second + 1 <= now + AHEAD_S:
                self.ignored += 1
                continue
            source = self._sources.get(one.source)
            if source is None:
                source = self._sources[one.source] = _Source(one.second, now)
            source.reported_s = now
            if one.second >= self._next:
                source.waiting[one.second] = one
                source.last = max(source.last, one.second)

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
            present = [one for one in reports if one is not None]
            if present and len(present) == len(reports):
                if not self._seconds:
                    self._since = present[0].second
                self._seconds.append(_added(present))
                if (shift := self._look()) is not None:
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

    def _look(self) -> Shift | None:
        if self._seconds[-1].quiet:
            return None  # it changes no comparison
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
    """The factor by which ended answers were longer than expected; predictions lag behind a shift."""
    ended = sum(one.ended for one in rows)
    expected = sum(one.ended_expected for one in rows)
    if ended < LEAST_REQUESTS or expected <= 0.0:
        return 1.0
    return min(CORRECTED, max(1.0 / CORRECTED, sum(one.ended_tokens for one in rows) / expected))


# The demand of each class: its arrivals of late, how long its jobs stay, and how far estimates can be trusted for it.
# A scheduler's ledger learns it from the requests to place jobs, the placements, and the reports of ended jobs.

FADE_S = 30.0  # arrivals older than this hardly count
NO_ARRIVALS_S = 60.0  # nothing is kept free for a class without arrivals for this long
STAYS = 64  # jobs that a running mean rests on
SPREADS = 1.0  # standard deviations of a class's open jobs that are kept free beside their mean
GAIN = 0.05  # of one outcome on a learned share


class _Learned(NamedTuple):
    """A share of a target that predicted times may take, learned so that `misses` of all outcomes miss the target."""

    misses: float
    least: float
    most: float

    def after(self, share: float, met: bool) -> float:
        """The share after one more outcome (Robbins-Monro): it settles where `misses` of the outcomes miss."""
        step = GAIN * self.misses if met else -GAIN * (1.0 - self.misses)
        return min(self.most, max(self.least, share * exp(step)))


ADMITTED = _Learned(0.08, 0.5, 0.95)  # of the admitted jobs; to refuse more would refuse jobs that meet their targets
YIELDS = _Learned(0.04, 0.1, 0.8)  # of all jobs that ask, refused or not; with more misses, lighter classes get less


@dataclass(slots=True)
class _Class:
    slo: Slo
    began_s: float
    arrived_s: float
    count: float = 0.0  # arrivals, fading
    stay_s: float = 0.0
    stays: int = 0
    prompt_tokens: float = 0.0
    open: int = 0
    admitted: float = ADMITTED.most
    yields: float = YIELDS.most

    def rate(self, now: float) -> float:
        """Arrivals a second, since the class was first seen."""
        seen_s = FADE_S * (1.0 - exp(-max(1.0, now - self.began_s) / FADE_S))
        return self.count * exp(-max(0.0, now - self.arrived_s) / FADE_S) / seen_s


class ClassDemand:
    """The demand at one scheduler, by class. Times are unix seconds."""

    def __init__(self) -> None:
        self._classes: dict[str, _Class] = {}
        self._open: dict[str, tuple[str, float]] = {}  # job id -> its class, and when it was placed
        self.placements = 0  # of all classes

    def arrived(self, job: JobView, now: float) -> None:
        """Report that a job has asked for the first time. Delayed jobs count when they are placed: the others of their
        class wait in the gateways.
        """
        slo = job.slo
        one = self._classes.get(slo.name)
        if one is None or now - one.arrived_s > NO_ARRIVALS_S:
            one = self._classes[slo.name] = _Class(slo, now, now, open=one.open if one is not None else 0)
        one.count = one.count * exp(-max(0.0, now - one.arrived_s) / FADE_S) + 1.0
        one.slo, one.arrived_s = slo, now
        one.prompt_tokens += (job.prompt_tokens - one.prompt_tokens) / min(one.count, STAYS)

    def placed(self, job: JobView, now: float) -> None:
        """Report that a job was placed; perhaps not for the first time."""
        if job.job_id in self._open:
            return
        if job.slo.name not in self._classes or (job.slo.when_full is WhenFull.DELAY and not job.begun):
            self.arrived(job, now)
        self.placements += 1
        self._open[job.job_id] = job.slo.name, now
        self._classes[job.slo.name].open += 1

    def ended(self, job_id: str, met: bool | None, now: float) -> None:
        """Report that a placed job has ended; met: whether it met its targets, None where that is not known."""
        name, placed_s = self._open.pop(job_id, ("", 0.0))
        one = self._classes.get(name)
        if one is None:
            return
        one.open -= 1
        if met is None:
            return
        one.stays += 1
        one.stay_s += (now - placed_s - one.stay_s) / min(one.stays, STAYS)
        one.admitted = ADMITTED.after(one.admitted, met)
        one.yields = YIELDS.after(one.yields, met)

    def refused(self, slo: Slo) -> None:
        one = self._classes.get(slo.name)
        if one is not None:
            one.yields = YIELDS.after(one.yields, False)

    def margin(self, slo: Slo) -> float:
        """The share of its targets that a predicted time of this class may take."""
        one = self._classes.get(slo.name)
        return one.admitted if one is not None else ADMITTED.most

    def others(self, slo: Slo, now: float) -> Slo:
        """The class by which cost to other requests is judged: the tightest targets of the heavier classes of late, the
        class itself without any. TPOT targets are reduced to the share that lighter classes may use.
        """
        found = slo
        for one in self._heavier(slo, now):
            first = found is slo
            found = Slo(
                "heavier",
                one.slo.ttft_s if first else min(found.ttft_s, one.slo.ttft_s),
                one.slo.tpot_s * one.yields if first else min(found.tpot_s, one.slo.tpot_s * one.yields),
                max(found.weight, one.slo.weight),
                itl_s=one.slo.itl_s if first else min(found.itl_s, one.slo.itl_s),
            )
        return found

    def missing(self, slo: Slo, now: float) -> float:
        """How many jobs of heavier classes to expect beside the open ones, at least 0.

        Little's law for the mean, plus `SPREADS` standard deviations of a Poisson process.
        """
        total = 0.0
        for one in self._heavier(slo, now):
            mean = one.rate(now) * one.stay_s
            total += max(0.0, mean + SPREADS * sqrt(mean) - one.open)
        return total

    def spread(self, slo: Slo, now: float) -> float:
        """The fluctuation of the number of open jobs of this class."""
        one = self._classes.get(slo.name)
        return SPREADS * sqrt(one.rate(now) * one.stay_s) if one is not None else 0.0

    def prompt_tokens(self, slo: Slo, now: float) -> float:
        """Mean prompt tokens of a job of the heavier classes, the most of them; of this class without any."""
        found = self._heavier(slo, now) or [one for one in (self._classes.get(slo.name),) if one is not None]
        return max((one.prompt_tokens for one in found), default=0.0)

    def _heavier(self, slo: Slo, now: float) -> list[_Class]:
        recent = (one for one in self._classes.values() if now - one.arrived_s <= NO_ARRIVALS_S)
        return [one for one in recent if one.slo.weight > slo.weight]
