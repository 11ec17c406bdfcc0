"""SLO attainment of the cluster: outcomes in, windows out."""

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict
from random import Random
from typing import Any

from shared.policy.slo import SloOutcome, SloReport, SloWindows
from shared.store.tables import slo_windows
from shared.store.write_behind import WriteBehind

SEEN = 50_000  # jobs remembered, so that none is counted twice


class SloService:
    """Outcomes that schedulers hand in, by class and window."""

    def __init__(self, windows_s: tuple[float, ...], store: WriteBehind) -> None:
        self._windows = SloWindows(windows_s, Random())
        self._store = store
        self._seen: OrderedDict[str, None] = OrderedDict()

    def take(self, outcomes: Iterable[tuple[str, SloOutcome]]) -> int:
        """Count outcomes by job id, at the moment they are heard of; gives back how many were new.

        A job comes twice when the answer to its delivery was lost, or when two schedulers heard of its end.
        """
        now, counted = time.time(), 0
        for job_id, outcome in outcomes:
            if job_id in self._seen:
                continue
            if job_id:
                self._seen[job_id] = None
                if len(self._seen) > SEEN:
                    self._seen.popitem(last=False)
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
    }
