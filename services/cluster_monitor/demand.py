"""What clients ask for, over all schedulers: the profile that role flips rest on, and its shifts."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter

from services.cluster_monitor.events import EventKind, Events
from shared.domain.demand import AskedSecond, Demand, DemandSecond, RolesWanted, Shift
from shared.policy.demand import DemandBook
from shared.runtime.logs import get_log

log = get_log(__name__)
KEPT_S = 300  # seconds, and shifts in them, that are shown


class DemandService:
    """Takes what schedulers tell; a shift becomes an event, a metric and a log line."""

    def __init__(self, events: Events, registry: CollectorRegistry) -> None:
        self._book = DemandBook()
        self._asked: deque[AskedSecond] = deque(maxlen=KEPT_S)
        self._noticed: deque[tuple[float, Shift]] = deque(maxlen=KEPT_S)
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
        now = time.time()
        shifts = self._book.advance(now)
        last = self._asked[-1].second if self._asked else 0
        self._asked.extend(AskedSecond.of(one) for one in self._book.seconds if one.second > last)
        self._noticed.extend((now, shift) for shift in shifts)
        for shift in shifts:
            self._shifts.labels(shift.what).inc()
            self._events.note(EventKind.DEMAND_SHIFT, in_words(shift), "")
            log.info("what clients ask for has shifted", **msgspec.to_builtins(shift))

    def demand(self) -> Demand | None:
        """The profile; None while nobody knows."""
        return self._book.demand(time.time())

    def profile(self, least_requests: int) -> Demand | None:
        """The profile as soon as it rests on so many requests; None before."""
        return self._book.demand(time.time(), least_s=2, least_requests=least_requests)

    def placed(self, window_s: float) -> int:
        """Requests that got their first place in the last so many seconds, as far as that was told."""
        since_s = time.time() - window_s
        return sum(one.requests for one in self._asked if one.second >= since_s)

    @property
    def last_shift(self) -> tuple[float, Shift] | None:
        """When the last shift was noticed, and which."""
        return self._noticed[-1] if self._noticed else None

    def describe(self, roles: RolesWanted | None) -> dict[str, Any]:
        """The profile, the last seconds, the shifts noticed in them and the roles that are best for it, as JSON."""
        since_s = time.time() - KEPT_S
        return {
            "demand": msgspec.to_builtins(self.demand()),
            "seconds": [msgspec.to_builtins(one) for one in self._asked if one.second >= since_s],
            "shifts": [{"at_s": at, **msgspec.to_builtins(shift)} for at, shift in self._noticed if at >= since_s],
            "roles": msgspec.to_builtins(roles),
        }


def in_words(shift: Shift) -> str:
    """For an event."""
    unit = "requests/s" if shift.what == "arrivals" else "tokens (geometric mean)"
    return f"{shift.what}: {shift.before:.3g} → {shift.after:.3g} {unit}, noticed after {shift.noticed_s:g} s"
