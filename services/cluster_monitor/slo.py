"""What schedulers report: outcomes of requests, which become SLO attainment, and the demand of clients."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from random import Random

import msgspec
from prometheus_client import CollectorRegistry, Counter

from services.cluster_monitor.events import Events
from services.cluster_monitor.request_stats import Ended, How
from services.cluster_monitor.slo_windows import SloOutcome, SloWindows
from shared.domain.demand import AskedSecond, Demand, DemandSecond, RolesWanted, Shift
from shared.domain.slo import SloReport
from shared.policy.demand import DemandBook
from shared.runtime.logs import get_log
from shared.store.tables import slo_windows
from shared.store.write_behind import Row, WriteBehind
from shared.wire.api import EventKind, NoticedShift
from shared.wire.api.monitor import DemandAnswer

log = get_log(__name__)
SEEN = 50_000  # jobs remembered, so that none is counted twice
KEPT_S = 300  # seconds of demand that `GET /demand` shows


class SloService:
    """Outcomes by class and window. `on_ended` is called with each new outcome."""

    def __init__(
        self, windows_s: tuple[float, ...], store: WriteBehind, on_ended: Callable[[Ended], None] = lambda _: None
    ) -> None:
        self._on_ended = on_ended
        self._windows = SloWindows(windows_s, Random())
        self._store = store
        self._seen: OrderedDict[str, None] = OrderedDict()

    def take(self, outcomes: Iterable[tuple[str, Ended]]) -> int:
        """Count outcomes by job id, at the time of their arrival; returns how many were new.

        A job comes twice when the answer to its delivery was lost, or when two schedulers learned of its end.
        """
        now, counted = time.time(), 0
        for job_id, ended in outcomes:
            if job_id in self._seen:
                continue
            if job_id:
                self._seen[job_id] = None
                if len(self._seen) > SEEN:
                    self._seen.popitem(last=False)
            self._on_ended(ended)
            if (outcome := _judged(ended)) is not None:
                self._windows.add(outcome, now)
            counted += 1
        return counted

    def reports(self) -> list[SloReport]:
        """Every class and window up to now."""
        return self._windows.reports(time.time())

    def sample(self) -> None:
        """Queue the present windows for the database."""
        now = time.time()
        for report in self._windows.reports(now):
            if report.requests:
                self._store.put(slo_windows, _row(report, now))


def _judged(ended: Ended) -> SloOutcome | None:
    """None for cancelled requests, and for those that were refused before they were jobs: they have no targets."""
    if ended.how is How.CANCELLED or not ended.ttft_target_s:
        return None
    names = (name for name in SloOutcome.__dataclass_fields__ if name != "failed")
    return SloOutcome(**{name: getattr(ended, name) for name in names}, failed=ended.how is not How.COMPLETED)


def _row(report: SloReport, now: float) -> Row:
    return {
        "slo": report.slo,
        "window_s": report.window_s,
        "time_s": now,
        "requests": report.requests,
        "ttft_attainment": report.ttft_attainment,
        "tpot_attainment": report.tpot_attainment,
        "attainment": report.attainment,
        "ttft_p50_s": report.ttft_s["p50"],
        "ttft_p99_s": report.ttft_s["p99"],
        "tpot_p50_s": report.tpot_s["p50"],
        "tpot_p99_s": report.tpot_s["p99"],
        "itl_attainment": report.itl_attainment,
        "gap_p50_s": report.longest_gap_s["p50"],
        "gap_p90_s": report.longest_gap_s["p90"],
        "gap_p99_s": report.longest_gap_s["p99"],
    }


class DemandService:
    """Demand over all schedulers, on which role flips rest. A shift becomes an event, a metric and a log line."""

    def __init__(self, events: Events, metrics: CollectorRegistry) -> None:
        self._book = DemandBook()
        self._seconds: deque[AskedSecond] = deque(maxlen=KEPT_S)
        self._noticed: deque[NoticedShift] = deque(maxlen=KEPT_S)
        self._events = events
        self._shifts = Counter(
            "polyphase_demand_shifts", "Shifts of demand, by what shifted", ["what"], registry=metrics
        )
        self._ignored = Counter(
            "polyphase_demand_ignored",
            "Seconds of demand that schedulers reported too late or too early",
            registry=metrics,
        )

    def take(self, seconds: Iterable[DemandSecond]) -> int:
        """Add what a scheduler reports; returns how many seconds were of use."""
        before, reported = self._book.ignored, list(seconds)
        self._book.add(reported, time.time())
        ignored = self._book.ignored - before
        self._ignored.inc(ignored)
        return len(reported) - ignored

    def step(self) -> None:
        """Add the seconds up, and look for shifts."""
        now = time.time()
        shifts = self._book.advance(now)
        last = self._seconds[-1].second if self._seconds else 0
        self._seconds.extend(AskedSecond.of(one) for one in self._book.seconds if one.second > last)
        for shift in shifts:
            self._noticed.append(NoticedShift(**msgspec.structs.asdict(shift), at_s=now))
            self._shifts.labels(shift.what).inc()
            self._events.note(EventKind.DEMAND_SHIFT, in_words(shift))
            log.info("demand has shifted", **msgspec.to_builtins(shift))

    def demand(self) -> Demand | None:
        """The profile; None while too little is known."""
        return self._book.demand(time.time())

    def profile(self, least_requests: int) -> Demand | None:
        """The profile as soon as it rests on so many requests; None before."""
        return self._book.demand(time.time(), least_s=2, least_requests=least_requests)

    def placed(self, window_s: float) -> int:
        """Requests that got their first placement in the last `window_s`, as far as schedulers have reported them."""
        since_s = time.time() - window_s
        return sum(one.requests for one in self._seconds if one.second >= since_s)

    @property
    def last_shift(self) -> NoticedShift | None:
        return self._noticed[-1] if self._noticed else None

    def describe(self, roles: RolesWanted | None) -> DemandAnswer:
        """`GET /demand`. roles: those that would serve the demand best."""
        since_s = time.time() - KEPT_S
        return DemandAnswer(
            demand=self.demand(),
            seconds=[each for each in self._seconds if each.second >= since_s],
            shifts=[shift for shift in self._noticed if shift.at_s >= since_s],
            roles=roles,
        )


def in_words(shift: Shift) -> str:
    """A shift as the text of an event."""
    unit = "requests/s" if shift.what == "arrivals" else "tokens (geometric mean)"
    return f"{shift.what}: {shift.before:.3g} → {shift.after:.3g} {unit}, noticed after {shift.noticed_s:g} s"
