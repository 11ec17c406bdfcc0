"""Tells of it when the verdict changes: its level, and troubles that no instance shows."""

from collections.abc import Callable

from services.cluster_monitor.events import EventKind, Events
from services.cluster_monitor.situation import whats
from shared.domain.verdict import Level, Verdict

PERIOD_S = 1.0
STEADY = 3  # looks in turn at which it is so, before it is told: windows pass limits to and fro
_KINDS = {
    "predictor_fallback": (EventKind.PREDICTOR_FALLBACK, EventKind.PREDICTOR_RECOVERED),
    "gateway_gone": (EventKind.GATEWAY_GONE, EventKind.GATEWAY_RETURNED),
    "scheduler_gone": (EventKind.SCHEDULER_GONE, EventKind.SCHEDULER_RETURNED),
}
_WELL = (Level.GOOD, Level.IDLE)


class Watch:
    """Looks at each `step`."""

    def __init__(self, verdict: Callable[[], Verdict], events: Events) -> None:
        self._verdict = verdict
        self._events = events
        self._level = Level.GOOD
        self._told: dict[str, str] = {}
        self._other: dict[str, int] = {}  # for how many looks something is other than was told

    def step(self) -> None:
        """Look once."""
        verdict = self._verdict()
        level = Level.GOOD if verdict.level in _WELL else verdict.level
        if self._steady("level", other=level is not self._level):
            self._level = level
            self._events.note(EventKind.VERDICT, verdict.headline)
        now = whats(verdict, _KINDS)
        for what, (begun, over) in _KINDS.items():
            if not self._steady(what, other=(what in now) != (what in self._told)):
                continue
            if what in now:
                self._told[what] = now[what]
                self._events.note(begun, now[what])
            else:
                self._events.note(over, f"no longer: {self._told.pop(what)}")

    def _steady(self, what: str, *, other: bool) -> bool:
        looks = self._other.get(what, 0) + 1 if other else 0
        self._other[what] = 0 if looks >= STEADY else looks
        return looks >= STEADY
