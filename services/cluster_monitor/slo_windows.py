"""SLO attainment: the share of requests that met their targets, over sliding windows."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from shared.domain.job import itl_met
from shared.domain.slo import SloReport
from shared.errors import InvalidRequest

SLOT_S = 1.0
SAMPLES = 64  # latencies kept a slot and class, for percentiles
MAX_CLASSES = 64  # with outcomes of their own; further classes count together
OTHER = "other"  # the name of the further ones


@dataclass(frozen=True, slots=True)
class SloOutcome:
    """How one request of a class ended. Latencies in seconds, None when there is none to measure.

    gaps: between the deliveries of its tokens; gaps_over of them exceeded the target, and the longest took
    longest_gap_s. A failed request misses all targets; cancelled requests are not counted.
    """

    slo: str
    ended_s: float  # unix seconds
    ttft_s: float | None
    tpot_s: float | None
    ttft_target_s: float
    tpot_target_s: float
    failed: bool = False
    itl_target_s: float = 0.0
    longest_gap_s: float | None = None
    gaps: int = 0
    gaps_over: int = 0

    @property
    def ttft_met(self) -> bool:
        """Whether the first token was in time."""
        return not self.failed and self.ttft_s is not None and self.ttft_s <= self.ttft_target_s

    @property
    def tpot_met(self) -> bool:
        """Whether later tokens were in time; a request with fewer than two tokens cannot miss."""
        return not self.failed and (self.tpot_s is None or self.tpot_s <= self.tpot_target_s)

    @property
    def itl_met(self) -> bool:
        """Whether at most one gap in a hundred exceeded its target (`shared.domain.job.itl_met`)."""
        return not self.failed and itl_met(self.gaps, self.gaps_over)

    @property
    def met(self) -> bool:
        """Whether all three targets were met."""
        return self.ttft_met and self.tpot_met and self.itl_met


def attainment(outcomes: Iterable[SloOutcome]) -> float | None:
    """Share of the outcomes that met all targets; None without any."""
    counted = [outcome.met for outcome in outcomes]
    return sum(counted) / len(counted) if counted else None


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of ascending values; None without any."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


@dataclass(slots=True)
class _Slot:
    """One second of one class: exact counts and a uniform sample of latencies."""

    start_s: float
    counts: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    longest_gap_s: float | None = None
    targets: tuple[float, float, float] | None = None  # of the last one

    def add(self, outcome: SloOutcome, rng: Random) -> None:
        self.counts.update(
            requests=1,
            ttft=int(outcome.ttft_met),
            tpot=int(outcome.tpot_met),
            itl=int(outcome.itl_met),
            all=int(outcome.met),
        )
        self.targets = outcome.ttft_target_s, outcome.tpot_target_s, outcome.itl_target_s
        gap_s = outcome.longest_gap_s
        if gap_s is not None:
            self.longest_gap_s = max(gap_s, self.longest_gap_s or 0.0)
        for samples, value in ((self.ttft, outcome.ttft_s), (self.tpot, outcome.tpot_s), (self.gap, gap_s)):
            if value is None:
                continue
            if len(samples) < SAMPLES:
                samples.append(value)
            elif (at := rng.randrange(self.counts["requests"])) < SAMPLES:
                samples[at] = value


class SloWindows:
    """Recent outcomes by class, in slots of a second: memory does not grow with the request rate. Clients choose the
    names of classes, so that only the first `MAX_CLASSES` have outcomes of their own.

    Attainment is exact; percentiles rest on up to `SAMPLES` latencies a second and class.
    """

    def __init__(self, windows_s: Sequence[float], rng: Random) -> None:
        if not windows_s or min(windows_s) < SLOT_S:
            raise InvalidRequest(f"SLO windows must be at least {SLOT_S} s each: {list(windows_s)}")
        self.windows_s = tuple(sorted(windows_s))
        self._rng = rng
        self._slots: dict[str, deque[_Slot]] = {}

    def add(self, outcome: SloOutcome, now: float) -> None:
        """Count an outcome in the slot of the time `now` (unix seconds) of its report."""
        known = outcome.slo in self._slots or len(self._slots) < MAX_CLASSES
        slots = self._slots.setdefault(outcome.slo if known else OTHER, deque())
        start_s = now // SLOT_S * SLOT_S
        if not slots or slots[-1].start_s < start_s:
            slots.append(_Slot(start_s))
        slots[-1].add(outcome, self._rng)

    def reports(self, now: float) -> list[SloReport]:
        """A report of each class and window that ends at `now`. Slots older than the longest window are forgotten."""
        oldest_s = now - self.windows_s[-1]
        for slots in self._slots.values():
            while slots and slots[0].start_s <= oldest_s - SLOT_S:
                slots.popleft()
        return [
            _report(slo, window_s, [s for s in slots if s.start_s > now - window_s - SLOT_S])
            for slo, slots in sorted(self._slots.items())
            for window_s in self.windows_s
        ]


def _report(slo: str, window_s: float, slots: Sequence[_Slot]) -> SloReport:
    counts: Counter[str] = Counter()
    for slot in slots:
        counts.update(slot.counts)
    requests = counts["requests"]
    ttft_target_s, tpot_target_s, itl_target_s = (slots[-1].targets if slots else None) or (None, None, None)
    worst_s = max((slot.longest_gap_s for slot in slots if slot.longest_gap_s is not None), default=None)
    return SloReport(
        slo=slo,
        window_s=window_s,
        requests=requests,
        ttft_attainment=counts["ttft"] / requests if requests else None,
        tpot_attainment=counts["tpot"] / requests if requests else None,
        attainment=counts["all"] / requests if requests else None,
        ttft_s=_percentiles(sorted(value for slot in slots for value in slot.ttft)),
        tpot_s=_percentiles(sorted(value for slot in slots for value in slot.tpot)),
        ttft_target_s=ttft_target_s,
        tpot_target_s=tpot_target_s,
        itl_attainment=counts["itl"] / requests if requests else None,
        longest_gap_s={**_percentiles(sorted(value for slot in slots for value in slot.gap)), "max": worst_s},
        itl_target_s=itl_target_s or None,
    )


def _percentiles(ordered: Sequence[float]) -> dict[str, float | None]:
    return {f"p{share}": percentile(ordered, share / 100) for share in (50, 90, 99)}
