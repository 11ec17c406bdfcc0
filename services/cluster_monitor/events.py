"""What happened in the cluster, for those who were not looking: deaths, returns, refusals, flips that a policy made."""

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from heapq import nlargest
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.audit import Result
from services.cluster_monitor.registry import Record
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
    VERDICT = "verdict"  # it has another level
    PREDICTOR_FALLBACK = "predictor_fallback"  # lengths are no classifier's any more
    PREDICTOR_RECOVERED = "predictor_recovered"
    GATEWAY_GONE = "gateway_gone"
    GATEWAY_RETURNED = "gateway_returned"
    SCHEDULER_GONE = "scheduler_gone"
    SCHEDULER_RETURNED = "scheduler_returned"
    REQUEST_REFUSED = "request_refused"  # it lost one instance after the other
    PLAN_PROPOSED = "plan_proposed"  # the planner tells of these
    PLAN_ACCEPTED = "plan_accepted"
    PLAN_REFUSED = "plan_refused"
    PLAN_WITHDRAWN = "plan_withdrawn"  # the situation changed before anybody decided
    PLAN_APPLIED = "plan_applied"
    PLAN_FAILED = "plan_failed"


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

    def newest(
        self,
        limit: int,
        since_s: float = 0.0,
        kinds: Iterable[EventKind] = (),
        instance_id: str = "",
        before_s: float = float("inf"),
    ) -> list[dict[str, Any]]:
        """Events later than `since_s` and before `before_s` (unix seconds), newest first; of some kinds, or of one
        instance only, if any is named.
        """
        wanted = [kind.value for kind in kinds] or list(self._rings)
        found = (
            row
            for kind in wanted
            for row in self._rings[kind]
            if since_s < row["time_s"] < before_s and instance_id in ("", row["instance_id"])
        )
        return nlargest(limit, found, key=lambda row: float(row["time_s"]))

    def note(
        self,
        kind: EventKind,
        text: str,
        instance_id: str = "",
        role: str = "",
        *,
        operation_id: str = "",
        job_id: str = "",
        subject: str = "",
        event_id: str = "",
    ) -> None:
        """Keep an event, with what it concerns: an instance, an operation, a request, or anything else by its name."""
        row = {
            "event_id": event_id or uuid.uuid4().hex,
            "time_s": time.time(),
            "kind": kind.value,
            "instance_id": instance_id,
            "role": role,
            "text": text,
            "operation_id": operation_id,
            "job_id": job_id,
            "subject": subject,
        }
        self._rings[kind.value].append(row)
        self._store.put(events, dict(row))

    def told(self, kind: EventKind, text: str, subject: str, event_id: str) -> bool:
        """Another service tells of one; whether it is new. It may come twice."""
        if any(row["event_id"] == event_id for row in self._rings[kind.value]):
            return False
        self.note(kind, text, subject=subject, event_id=event_id)
        return True

    def request_refused(self, job_id: str, ended_s: float, losses: Sequence[tuple[int, str]]) -> None:
        """A request was refused because of the instances that it lost, each after so many tokens of its answer. It may
        come twice.
        """
        event_id = f"request_refused:{job_id}:{ended_s:.6f}"
        if any(row["event_id"] == event_id for row in self._rings[EventKind.REQUEST_REFUSED.value]):
            return
        lost = ", ".join(f"{name or 'none'} at output token {position}" for position, name in losses)
        text = f"request {job_id} lost one instance after the other ({lost}) and is not tried again"
        last = losses[-1][1] if losses else ""
        self.note(EventKind.REQUEST_REFUSED, text[:2048], last, job_id=job_id, event_id=event_id)

    def refused(self, instance_id: str, role: str, why: str) -> None:
        """A registration was refused. Instances try again and again: the same words are kept once a while."""
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
        found = _ended(row)
        if found is not None:
            kind, text, role = found
            self.note(kind, text, row["instance_id"], row[role], operation_id=row["operation_id"])


def _ended(row: dict[str, Any]) -> tuple[EventKind, str, str] | None:
    """Of an operation: what kind of event, its text, and which role is its instance's."""
    what = f"{row['kind']} by {row['who']}"
    match row["result"]:
        case Result.REFUSED | Result.EXPIRED:
            return EventKind.OPERATION_REFUSED, f"{what}: {row['error']}", "from_role"
        case Result.FAILED:
            return EventKind.OPERATION_FAILED, f"{what}: {row['error']}", "from_role"
        case Result.SUCCEEDED if row["why"]:
            text = f"{row['from_role']} → {row['to_role']} by {row['who']}: {row['why']}"
            return EventKind.POLICY_FLIP, text, "to_role"
    return None


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
