"""What each SLO class has asked for of late, how long its jobs stay, and how far estimates can be trusted for it.

Owned by a scheduler's ledger, so it is learned from what that scheduler is asked, places and hears of.
"""

from dataclasses import dataclass
from math import exp, sqrt
from typing import NamedTuple

from shared.domain.job import JobView, Slo, WhenFull

FADE_S = 30.0  # arrivals older than this hardly count
SILENT_S = 60.0  # a class that has not asked for so long is not waited for
STAYS = 64  # jobs that a mean rests on
SPREADS = 1.0  # of the fluctuation of a class, kept free beside its mean
GAIN = 0.05  # of one outcome on what is learned from it


class Learned(NamedTuple):
    """A share of a target that predicted times may take, learned so that `misses` of all outcomes miss it."""

    misses: float
    least: float
    most: float

    def after(self, share: float, met: bool) -> float:
        """Robbins-Monro: stands still where that share of the outcomes misses."""
        step = GAIN * self.misses if met else -GAIN * (1.0 - self.misses)
        return min(self.most, max(self.least, share * exp(step)))


LETS_IN = Learned(0.08, 0.5, 0.95)  # those that were let in miss; refusing more would cost those who would not
YIELDS = Learned(0.04, 0.1, 0.8)  # all that ask miss, refused or not; else lighter classes get less


@dataclass(slots=True)
class _Class:
    slo: Slo
    began_s: float
    asked_s: float
    count: float = 0.0  # arrivals, fading
    stay_s: float = 0.0
    stays: int = 0
    prompt_tokens: float = 0.0
    open: int = 0
    lets_in: float = LETS_IN.most
    yields: float = YIELDS.most

    def rate(self, now: float) -> float:
        """Arrivals a second, over the time that there was."""
        seen_s = FADE_S * (1.0 - exp(-max(1.0, now - self.began_s) / FADE_S))
        return self.count * exp(-max(0.0, now - self.asked_s) / FADE_S) / seen_s


class ClassNeeds:
    """Counts of one scheduler, by class. Times are unix seconds."""

    def __init__(self) -> None:
        self._classes: dict[str, _Class] = {}
        self._open: dict[str, tuple[str, float]] = {}  # job id -> its class, and when it was placed
        self.placements = 0  # of all classes

    def asked(self, job: JobView, now: float) -> None:
        """A job has asked for the first time. Those that are delayed count when they are placed: others wait unseen."""
        slo = job.slo
        one = self._classes.get(slo.name)
        if one is None or now - one.asked_s > SILENT_S:
            one = self._classes[slo.name] = _Class(slo, now, now, open=one.open if one is not None else 0)
        one.count = one.count * exp(-max(0.0, now - one.asked_s) / FADE_S) + 1.0
        one.slo, one.asked_s = slo, now
        one.prompt_tokens += (job.prompt_tokens - one.prompt_tokens) / min(one.count, STAYS)

    def placed(self, job: JobView, now: float) -> None:
        """A job has its place; again, perhaps."""
        if job.job_id in self._open:
            return
        if job.slo.name not in self._classes or (job.slo.when_full is WhenFull.DELAY and not job.begun):
            self.asked(job, now)
        self.placements += 1
        self._open[job.job_id] = job.slo.name, now
        self._classes[job.slo.name].open += 1

    def ended(self, job_id: str, met: bool | None, now: float) -> None:
        """A job that was placed is over; met: whether it kept its targets, None where that says nothing."""
        name, placed_s = self._open.pop(job_id, ("", 0.0))
        one = self._classes.get(name)
        if one is None:
            return
        one.open -= 1
        if met is None:
            return
        one.stays += 1
        one.stay_s += (now - placed_s - one.stay_s) / min(one.stays, STAYS)
        one.lets_in = LETS_IN.after(one.lets_in, met)
        one.yields = YIELDS.after(one.yields, met)

    def refused(self, slo: Slo) -> None:
        """A job that asked was not let in."""
        one = self._classes.get(slo.name)
        if one is not None:
            one.yields = YIELDS.after(one.yields, False)

    def margin(self, slo: Slo) -> float:
        """The share of its targets that a predicted time of this class may take."""
        one = self._classes.get(slo.name)
        return one.lets_in if one is not None else LETS_IN.most

    def others(self, slo: Slo, now: float) -> Slo:
        """By which harm to others is judged: the tightest targets of the heavier classes of late; its own without any.

        Of the targets for later tokens, what lighter classes may take of them.
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
        """How many jobs of heavier classes are to be expected beside those that are open: what they need of late.

        Little's law for the mean, and `SPREADS` standard deviations of a Poisson process; never less than 0.
        """
        total = 0.0
        for one in self._heavier(slo, now):
            mean = one.rate(now) * one.stay_s
            total += max(0.0, mean + SPREADS * sqrt(mean) - one.open)
        return total

    def spread(self, slo: Slo, now: float) -> float:
        """By how much the open jobs of this class fluctuate."""
        one = self._classes.get(slo.name)
        return SPREADS * sqrt(one.rate(now) * one.stay_s) if one is not None else 0.0

    def prompt_tokens(self, slo: Slo, now: float) -> float:
        """Of a job of the heavier classes, or of this one without any, on average."""
        found = self._heavier(slo, now) or [one for one in (self._classes.get(slo.name),) if one is not None]
        return max((one.prompt_tokens for one in found), default=0.0)

    def _heavier(self, slo: Slo, now: float) -> list[_Class]:
        return [one for one in self._classes.values() if one.slo.weight > slo.weight and now - one.asked_s <= SILENT_S]
