"""The demand of each SLO class at one scheduler: arrivals, how long jobs stay, how far estimates can be trusted.

A scheduler's ledger learns it from the requests to place jobs, the placements, and the reports of ended jobs. Times are
unix seconds.
"""

from dataclasses import dataclass
from math import exp, sqrt
from typing import NamedTuple

from shared.domain.job import JobView, Slo, WhenFull

FADE_S = 30.0  # arrivals older than this hardly count
NO_ARRIVALS_S = 60.0  # nothing is kept free for a class without arrivals for this long
MEAN_OVER = 64  # jobs of a running mean
SPREADS = 1.0  # standard deviations of a class's open jobs that are kept free beside their mean
GAIN = 0.05  # of one outcome on a learned share


class _LearnedShare(NamedTuple):
    """A share of a target that predicted times may take, learned so that `misses` of all outcomes miss the target."""

    misses: float
    least: float
    most: float

    def after(self, share: float, met: bool) -> float:
        """The share after one more outcome (Robbins-Monro): it settles where `misses` of the outcomes miss."""
        step = GAIN * self.misses if met else -GAIN * (1.0 - self.misses)
        return min(self.most, max(self.least, share * exp(step)))


MARGIN = _LearnedShare(
    0.08, 0.5, 0.95
)  # of the admitted jobs; a smaller share would refuse jobs that meet their targets
YIELD = _LearnedShare(0.04, 0.1, 0.8)  # of all jobs, refused ones included; with more misses, lighter classes get less


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
    margin: float = MARGIN.most
    yield_share: float = YIELD.most

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
        """Report a job's first request for a placement. Delayed jobs count when they are placed: the others of their
        class wait in the gateways.
        """
        slo = job.slo
        one = self._classes.get(slo.name)
        if one is None or now - one.arrived_s > NO_ARRIVALS_S:
            one = self._classes[slo.name] = _Class(slo, now, now, open=one.open if one is not None else 0)
        one.count = one.count * exp(-max(0.0, now - one.arrived_s) / FADE_S) + 1.0
        one.slo, one.arrived_s = slo, now
        one.prompt_tokens += (job.prompt_tokens - one.prompt_tokens) / min(one.count, MEAN_OVER)

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
        stay_s = max(0.0, now - placed_s)  # a host's clock may have been set back
        one.stay_s += (stay_s - one.stay_s) / min(one.stays, MEAN_OVER)
        one.margin = MARGIN.after(one.margin, met)
        one.yield_share = YIELD.after(one.yield_share, met)

    def refused(self, slo: Slo) -> None:
        one = self._classes.get(slo.name)
        if one is not None:
            one.yield_share = YIELD.after(one.yield_share, False)

    def margin(self, slo: Slo) -> float:
        """The share of its targets that a predicted time of this class may take."""
        one = self._classes.get(slo.name)
        return one.margin if one is not None else MARGIN.most

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
                one.slo.tpot_s * one.yield_share if first else min(found.tpot_s, one.slo.tpot_s * one.yield_share),
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
