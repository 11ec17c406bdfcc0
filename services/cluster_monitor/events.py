"""What happened in the cluster, for those who were not looking: deaths, returns, refusals, flips that a policy made."""

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import StrEnum
from heapq import nlargest
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.audit import Result
from services.cluster_monitor.record import Record
from shared.domain.instance import InstanceState
from shared.store.reading import read_events
from shared.store.tables import events
from shared.store.write_behind import WriteBehind

KEPT = 500  # of each kind: a flood of one must not push out the others
_SAME_S = 60.0  # a refusal that repeats its words is told again after so long
_REMEMBERED = 1_000


class EventKind(StrEnum):
    """What there is to tell."""

    REGISTERED = "registered"
    RESTARTED = "restarted"  # a new process of an instance that is known
    RETURNED = "returned"  # the same process, after a broken connection or a restart of the monitor
    UNRESPONSIVE = "unresponsive"
    RECOVERED = "recovered"
    DEATH = "death"
    LEFT = "left"  # it stopped in good order
    FORGOTTEN = "forgotten"
    REGISTRATION_REFUSED = "registration_refused"
    OPERATION_REFUSED = "operation_refused"  # or arrived after its deadline
    OPERATION_FAILED = "operation_failed"
    POLICY_FLIP = "policy_flip"
    POLICIES_CHANGED = "policies_changed"
    DEMAND_SHIFT = "demand_shift"  # of what clients ask for; of no instance


class Events:
    """The newest of each kind in memory, all of them in the database."""

    def __init__(self, store: WriteBehind) -> None:
        self._store = store
        self._rings: dict[str, deque[dict[str, Any]]] = {kind.value: deque(maxlen=KEPT) for kind in EventKind}
        self._said: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    async def load(self, engine: AsyncEngine) -> None:
        """Read those of former lives; what this one has told meanwhile may be among them. Raises Unavailable."""
        found = await read_events(engine, KEPT * len(EventKind))
        here = {row["event_id"] for ring in self._rings.values() for row in ring}
        for row in found:  # newest first
            ring = self._rings.get(row["kind"])
            if ring is not None and len(ring) < KEPT and row["event_id"] not in here:
                ring.appendleft(row)

    def newest(self, limit: int, since_s: float = 0.0, kinds: Iterable[EventKind] = ()) -> list[dict[str, Any]]:
        """Events later than `since_s` (unix seconds), newest first; of some kinds only, if any are named."""
        wanted = [kind.value for kind in kinds] or list(self._rings)
        found = (row for kind in wanted for row in self._rings[kind] if row["time_s"] > since_s)
        return nlargest(limit, found, key=lambda row: float(row["time_s"]))

    def note(self, kind: EventKind, text: str, instance_id: str = "", role: str = "") -> None:
        """Keep an event."""
        row = {
            "event_id": uuid.uuid4().hex,
            "time_s": time.time(),
            "kind": kind.value,
            "instance_id": instance_id,
            "role": role,
            "text": text,
        }
        self._rings[kind.value].append(row)
        self._store.put(events, dict(row))

    def refused(self, instance_id: str, role: str, why: str) -> None:
        """A registration was refused. Workers try ten times a second: the same words are kept once a while."""
        now, said = time.monotonic(), (EventKind.REGISTRATION_REFUSED.value, instance_id, why)
        if now - self._said.get(said, -_SAME_S) < _SAME_S:
            return
        self._said[said] = now
        self._said.move_to_end(said)
        if len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)
        self.note(EventKind.REGISTRATION_REFUSED, why, instance_id, role)

    def changed(self, record: Record, before: InstanceState) -> None:
        """For `Registry.on_change`."""
        found = _kind_of(record, before)
        if found is not None:
            self.note(*found, record.instance_id, record.role.value)

    def operated(self, row: dict[str, Any]) -> None:
        """For the audit: an operation ended."""
        what = f"{row['kind']} by {row['who']}"
        match row["result"]:
            case Result.REFUSED | Result.EXPIRED:
                self.note(EventKind.OPERATION_REFUSED, f"{what}: {row['error']}", row["instance_id"], row["from_role"])
            case Result.FAILED:
                self.note(EventKind.OPERATION_FAILED, f"{what}: {row['error']}", row["instance_id"], row["from_role"])
            case Result.SUCCEEDED if row["why"]:
                text = f"{row['from_role']} → {row['to_role']} by {row['who']}: {row['why']}"
                self.note(EventKind.POLICY_FLIP, text, row["instance_id"], row["to_role"])


def _kind_of(record: Record, before: InstanceState) -> tuple[EventKind, str] | None:
    match record.state:
        case InstanceState.STARTING if before is InstanceState.STARTING:
            return EventKind(record.arrival), f"{record.info.accelerator} at {record.info.rpc}"
        case InstanceState.UNRESPONSIVE:
            return EventKind.UNRESPONSIVE, "no heartbeat"
        case InstanceState.DEAD:
            return EventKind.DEATH, record.death
        case _ if before is InstanceState.UNRESPONSIVE:
            return EventKind.RECOVERED, "its heartbeats came again"
    return None
