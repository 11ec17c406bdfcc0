"""SLO attainment of the cluster: outcomes in, windows out."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from random import Random
from typing import Any

from shared.policy.served import Ended, How
from shared.policy.slo import SloOutcome, SloReport, SloWindows
from shared.store.tables import slo_windows
from shared.store.write_behind import WriteBehind

SEEN = 50_000  # jobs remembered, so that none is counted twice


class SloService:
    """Outcomes that schedulers hand in, by class and window. `on_ended` is told of each that is new, whatever it is."""

    def __init__(
        self, windows_s: tuple[float, ...], store: WriteBehind, on_ended: Callable[[Ended], None] = lambda _: None
    ) -> None:
        self._on_ended = on_ended
        self._windows = SloWindows(windows_s, Random())
        self._store = store
        self._seen: OrderedDict[str, None] = OrderedDict()

    def take(self, outcomes: Iterable[tuple[str, Ended]]) -> int:
        """Count outcomes by job id, at the moment they are heard of; gives back how many were new.

        A job comes twice when the answer to its delivery was lost, or when two schedulers heard of its end.
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

    def describe(self) -> list[dict[str, Any]]:
        """The reports as JSON."""
        return [asdict(report) for report in self.reports()]

    def sample(self) -> None:
        """Put the present windows into the database's queue."""
        now = time.time()
        for report in self._windows.reports(now):
            if report.requests:
                self._store.put(slo_windows, _row(report, now))


def _judged(ended: Ended) -> SloOutcome | None:
    """Cancelled ones say nothing, nor do those that were refused before they were jobs."""
    if ended.how is How.CANCELLED or not ended.ttft_target_s:
        return None
    failed = ended.how is not How.COMPLETED
    return SloOutcome(
        ended.slo,
        ended.ended_s,
        ended.ttft_s,
        ended.tpot_s,
        ended.ttft_target_s,
        ended.tpot_target_s,
        failed,
        ended.itl_target_s,
        ended.longest_gap_s,
        ended.gaps,
        ended.gaps_over,
    )


def _row(report: SloReport, now: float) -> dict[str, Any]:
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
