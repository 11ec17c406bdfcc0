"""What clients ask for, over all schedulers: the profile that role flips rest on, and its shifts."""

import time
from collections.abc import Iterable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter

from services.cluster_monitor.events import EventKind, Events
from shared.domain.demand import Demand, DemandSecond, Shift
from shared.policy.demand import DemandBook
from shared.runtime.logs import get_log

log = get_log(__name__)


class DemandService:
    """Takes what schedulers tell; a shift becomes an event, a metric and a log line."""

    def __init__(self, events: Events, registry: CollectorRegistry) -> None:
        self._book = DemandBook()
        self._events = events
        self._shifts = Counter(
            "polyphase_demand_shifts", "Shifts of what clients ask for, by what shifted", ["what"], registry=registry
        )
        ignored = Counter(
            "polyphase_demand_ignored", "Seconds that schedulers told too late or too early", registry=registry
        )
        self._ignored = ignored

    def take(self, seconds: Iterable[DemandSecond]) -> int:
        """What schedulers tell; gives back how many seconds were of use."""
        before, told = self._book.ignored, list(seconds)
        self._book.take(told, time.time())
        ignored = self._book.ignored - before
        self._ignored.inc(ignored)
        return len(told) - ignored

    def step(self) -> None:
        """Add up, and tell of shifts."""
        for shift in self._book.advance(time.time()):
            self._shifts.labels(shift.what).inc()
            self._events.note(EventKind.DEMAND_SHIFT, in_words(shift), "")
            log.info("what clients ask for has shifted", **msgspec.to_builtins(shift))

    def demand(self) -> Demand | None:
        """The profile; None while nobody knows."""
        return self._book.demand(time.time())

    def describe(self) -> dict[str, Any]:
        """The profile as JSON."""
        return {"demand": msgspec.to_builtins(self.demand())}


def in_words(shift: Shift) -> str:
    """For an event."""
    unit = "requests/s" if shift.what == "arrivals" else "tokens (geometric mean)"
    return f"{shift.what}: {shift.before:.3g} → {shift.after:.3g} {unit}, noticed after {shift.noticed_s:g} s"
