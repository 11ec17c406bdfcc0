"""What the services tell of the past, as types: columns of equal length, None where nothing is known."""

import msgspec

from shared.wire.messages import JobReport

Column = list[float | None]
RANGES = {"5 min": 5, "15 min": 15, "1 h": 60, "6 h": 360, "24 h": 1440}  # minutes
POINTS = 120


class Mark(msgspec.Struct, frozen=True):
    """A moment at which something happened."""

    time_s: float
    kind: str
    text: str
    instance_id: str = ""


class History(msgspec.Struct, frozen=True):
    """The monitor's `GET /history`. Times are unix seconds; `classes`: the columns of each SLO class."""

    from_s: float
    to_s: float
    step_s: float
    time_s: list[float]
    series: dict[str, Column]
    targets: dict[str, float | None] = {}
    classes: dict[str, dict[str, Column]] = {}
    class_targets: dict[str, dict[str, float | None]] = {}
    marks: list[Mark] = []

    def of(self, slo: str) -> "History":
        """The same with what one class had in place of all; of all for a class that is not known."""
        if slo not in self.classes:
            return self
        series = {**self.series, **self.classes[slo]}
        return msgspec.structs.replace(self, series=series, targets=self.class_targets.get(slo, {}))


class InstanceColumns(msgspec.Struct, frozen=True):
    """One instance over time."""

    role: list[str | None] = []
    state: list[str | None] = []
    kv_used: Column = []
    running: Column = []
    waiting: Column = []
    queued_prefill_tokens: Column = []
    inflight: Column = []
    staged_bytes: Column = []


class InstanceHistory(msgspec.Struct, frozen=True):
    """The monitor's `GET /history/instances`."""

    from_s: float
    to_s: float
    step_s: float
    time_s: list[float]
    instances: dict[str, InstanceColumns]


class LogTail(msgspec.Struct, frozen=True):
    """The last lines of an instance's log."""

    lines: list[str] = []


class FoundRow(JobReport):
    """A request as a search finds it. caller: the name of the key that asked, empty without one."""

    caller: str = ""


class Found(msgspec.Struct, frozen=True):
    """The scheduler's `GET /requests/search`; `more`: there are others beyond these."""

    rows: list[FoundRow]
    more: bool = False
