"""Who did what to which instance, how long it took and how it ended."""

import time
import uuid
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.record import Record
from shared.domain.instance import Role
from shared.runtime.logs import get_log
from shared.store.reading import read_flips
from shared.store.tables import flips
from shared.store.write_behind import WriteBehind

log = get_log(__name__)
KEPT = 1_000
_FLIP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_DRAIN_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


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
    drain_s: float | None = None
    flip_s: float | None = None
    total_s: float | None = None
    result: str = "running"
    error: str = ""
    why: str | None = None  # the reasons, where a policy decided
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Audit:
    """The newest operations in memory, all of them in the database."""

    def __init__(self, store: WriteBehind, registry: CollectorRegistry) -> None:
        self._store = store
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._operations = Counter(
            "polyphase_operations",
            "Flips, drains and resumes by result",
            ["kind", "result"],
            registry=registry,
        )
        self._flip = Histogram(
            "polyphase_flip_seconds", "The role change itself, as the instance measured it",
            buckets=_FLIP_S, registry=registry,
        )  # fmt: skip
        self._drain = Histogram(
            "polyphase_drain_seconds", "Waiting for accepted work to end", buckets=_DRAIN_S, registry=registry
        )

    async def load(self, engine: AsyncEngine) -> None:
        """Read the newest operations of former lives. Raises Unavailable."""
        known = {entry["operation_id"] for entry in self._entries}
        older = [row for row in await read_flips(engine, KEPT) if row["operation_id"] not in known]
        for row in older[: KEPT - len(self._entries)]:
            self._entries.append(row)

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Operations, newest first."""
        return list(self._entries)[:limit]

    def begin(self, kind: str, record: Record, to_role: Role, who: str, why: str | None = None) -> Entry:
        """Note that an operation starts."""
        entry = Entry(
            kind,
            record.instance_id,
            record.info.generation,
            record.role.value,
            to_role.value,
            who,
            time.time(),
            why=why,
        )
        row = asdict(entry)
        self._entries.appendleft(row)
        self._store.put(flips, dict(row))
        return entry

    def end(self, entry: Entry, error: str = "") -> dict[str, Any]:
        """Note how it ended; gives back the whole entry."""
        entry.total_s = max(0.0, time.time() - entry.started_s)
        entry.result, entry.error = ("failed", error) if error else ("succeeded", "")
        row = asdict(entry)
        for known in self._entries:
            if known["operation_id"] == entry.operation_id:
                known.update(row)
                break
        self._store.put(flips, dict(row))
        self._operations.labels(entry.kind, entry.result).inc()
        if entry.drain_s is not None:
            self._drain.observe(entry.drain_s)
        if entry.flip_s is not None:
            self._flip.observe(entry.flip_s)
        level = log.warning if error else log.info
        level("operation ended", **row)
        return row
