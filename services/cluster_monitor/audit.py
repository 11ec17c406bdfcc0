"""Who did what to which instance, how long it took and how it ended."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.registry import Record
from shared.domain.instance import Role
from shared.errors import DeadlineExceeded, OutcomeUnknown, PolyphaseError
from shared.runtime.logs import get_log
from shared.store.reading import read_flips
from shared.store.tables import flips
from shared.store.write_behind import WriteBehind

log = get_log(__name__)
KEPT = 1_000
KINDS = ("flip", "drain", "resume")
_FLIP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_DRAIN_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Result(StrEnum):
    """How an operation stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"  # the state of the instance did not allow it; nothing was done
    EXPIRED = "expired"  # it arrived after its deadline; nothing was done
    UNKNOWN = "unknown"  # the monitor, or its turn, ended meanwhile


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks for an operation, and under which terms.

    `deadline_s` is unix time, by the clock of who asks: a request may lie in a socket for as long as this process is
    frozen, and must not be carried out when nobody waits for it any more. `why`: the reasons, where a policy asks.
    """

    who: str
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    deadline_s: float | None = None
    why: str | None = None

    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline_s is None else self.deadline_s - time.time()

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded once it has passed."""
        left_s = self.left_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(
                f"it arrived {-left_s:.1f} s after its deadline, and nothing was done "
                "(by the monitor's clock; clocks of hosts must agree)"
            )


@dataclass(slots=True)
class Entry:
    """One operation. Durations in seconds, None when the step was not reached; `started_s` is unix time."""

    kind: str
    instance_id: str
    generation: int
    from_role: str
    to_role: str
    who: str
    started_s: float
    operation_id: str
    why: str | None = None
    drain_s: float | None = None
    flip_s: float | None = None
    total_s: float | None = None
    result: str = Result.RUNNING.value
    error: str = ""
    code: str | None = None  # of the error


class Audit:
    """The newest operations in memory, all of them in the database."""

    def __init__(
        self, store: WriteBehind, registry: CollectorRegistry, on_end: Callable[[dict[str, Any]], None]
    ) -> None:
        self._store = store
        self._on_end = on_end
        self._entries: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by operation id, newest last
        self._operations = Counter(
            "polyphase_operations", "Flips, drains and resumes by result", ["kind", "result"], registry=registry
        )
        for kind in KINDS:
            for result in Result:
                if result is not Result.RUNNING:
                    self._operations.labels(kind, result)  # from nothing on: a rate misses what a series begins with
        self._flip = Histogram(
            "polyphase_flip_seconds",
            "The role change itself, as the instance measured it",
            buckets=_FLIP_S,
            registry=registry,
        )
        self._drain = Histogram(
            "polyphase_drain_seconds", "Waiting for accepted work to end", buckets=_DRAIN_S, registry=registry
        )

    async def load(self, engine: AsyncEngine) -> None:
        """Read the newest operations of former lives. Raises Unavailable."""
        for row in await read_flips(engine, KEPT):  # newest first
            if row["operation_id"] in self._entries or len(self._entries) >= KEPT:
                continue
            if row["result"] == Result.RUNNING:
                error = OutcomeUnknown("the monitor ended while it was under way")
                row.update(result=Result.UNKNOWN.value, error=error.message, code=error.code)
                self._store.put(flips, dict(row))
            self._entries[row["operation_id"]] = row
            self._entries.move_to_end(row["operation_id"], last=False)

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Operations, newest first."""
        return list(islice(self.newest_first(), limit))

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """All that are remembered."""
        return reversed(self._entries.values())

    def find(self, operation_id: str) -> dict[str, Any] | None:
        """One of the newest operations."""
        return self._entries.get(operation_id)

    def begin(self, kind: str, record: Record, to_role: Role, asked: Asked) -> Entry:
        """Note that an operation is asked for."""
        entry = Entry(
            kind,
            record.instance_id,
            record.info.generation,
            record.role.value,
            to_role.value,
            asked.who,
            time.time(),
            asked.operation_id,
            asked.why,
        )
        self._keep(asdict(entry))
        return entry

    def end(self, entry: Entry, result: Result, error: PolyphaseError | None = None) -> None:
        """Note how it ended."""
        entry.total_s = max(0.0, time.time() - entry.started_s)
        entry.result = result.value
        if error is not None:
            entry.error, entry.code = error.message, error.code
        row = asdict(entry)
        self._keep(row)
        self._operations.labels(entry.kind, entry.result).inc()
        if entry.drain_s is not None:
            self._drain.observe(entry.drain_s)
        if entry.flip_s is not None:
            self._flip.observe(entry.flip_s)
        self._on_end(row)
        level = log.warning if error else log.info
        level("operation ended", **row)

    def _keep(self, row: dict[str, Any]) -> None:
        self._entries[row["operation_id"]] = row
        if len(self._entries) > KEPT:
            self._entries.popitem(last=False)
        self._store.put(flips, dict(row))
