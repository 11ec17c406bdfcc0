"""The cluster's log of events: deaths, returns, refusals, flips by policies, changes of plans."""

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from heapq import nlargest

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.registry import Record
from shared.domain.instance import InstanceState
from shared.runtime.logs import get_log
from shared.store.reading import read_events
from shared.store.tables import events
from shared.store.write_behind import WriteBehind
from shared.wire.api import Event, EventKind, LostInstance, Operation, OperationResult, Origin

log = get_log(__name__)
KEPT = 500  # of each kind: a flood of one kind must not push out the others
_SAME_S = 60.0  # a registration refused again for the same reason is logged again after so long
_REMEMBERED = 1_000  # such refusals


class Events:
    """The newest events of each kind in memory, all of them in the database."""

    def __init__(self, store: WriteBehind) -> None:
        self._store = store
        self._rings: dict[EventKind, deque[Event]] = {kind: deque(maxlen=KEPT) for kind in EventKind}
        self._refusals: OrderedDict[tuple[str, str], float] = OrderedDict()  # instance and reason, when it was logged

    async def load(self, engine: AsyncEngine) -> None:
        """Read events of earlier monitor processes; this one's may be among them. Raises Unavailable."""
        here = {event.event_id for ring in self._rings.values() for event in ring}
        for event in await read_events(engine, Event, KEPT * len(EventKind)):  # newest first
            ring = self._rings[event.kind]
            if len(ring) < KEPT and event.event_id not in here:
                ring.appendleft(event)

    def newest(
        self,
        limit: int,
        since_s: float = 0.0,
        kinds: Iterable[EventKind] = (),
        instance_id: str = "",
        before_s: float = float("inf"),
    ) -> list[Event]:
        """Events later than `since_s` and before `before_s` (unix seconds), newest first; of some kinds, or of one
        instance only, if any is named.
        """
        found = (
            event
            for kind in tuple(kinds) or EventKind
            for event in self._rings[kind]
            if since_s < event.time_s < before_s and instance_id in ("", event.instance_id)
        )
        return nlargest(limit, found, key=lambda event: event.time_s)

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
        origin: str = "",
    ) -> None:
        """Log an event, with the instance, operation, request or other subject that it concerns."""
        event_id = event_id or uuid.uuid4().hex
        event = Event(
            event_id=event_id,
            time_s=time.time(),
            kind=kind,
            text=text,
            instance_id=instance_id,
            role=role,
            operation_id=operation_id,
            job_id=job_id,
            subject=subject,
            origin=origin,
        )
        self._rings[kind].append(event)
        self._store.put(events, msgspec.to_builtins(event))

    def report(self, kind: EventKind, text: str, subject: str, event_id: str) -> bool:
        """Another service reports an event, perhaps twice. Returns whether it is new."""
        if new := not self._has(kind, event_id):
            self.note(kind, text, subject=subject, event_id=event_id)
        return new

    def request_refused(self, job_id: str, ended_s: float, losses: Sequence[LostInstance]) -> None:
        """A request was refused because it lost one instance after the other. The report may come twice."""
        event_id = f"request_refused:{job_id}:{ended_s:.6f}"
        if self._has(EventKind.REQUEST_REFUSED, event_id):
            return
        lost = ", ".join(f"{loss.instance_id or 'none'} at output token {loss.position}" for loss in losses)
        text = f"request {job_id} lost one instance after the other ({lost}) and is not tried again"
        last = losses[-1].instance_id if losses else ""
        self.note(EventKind.REQUEST_REFUSED, text[:2048], last, job_id=job_id, event_id=event_id)

    def refused(self, instance_id: str, role: str, why: str) -> None:
        """A registration was refused. Instances retry: the same reason is logged once in a while."""
        now, refusal = time.monotonic(), (instance_id, why)
        if now - self._refusals.get(refusal, -_SAME_S) < _SAME_S:
            return
        self._refusals[refusal] = now
        self._refusals.move_to_end(refusal)
        if len(self._refusals) > _REMEMBERED:
            self._refusals.popitem(last=False)
        self.note(EventKind.REGISTRATION_REFUSED, why, instance_id, role)

    def changed(self, record: Record, before: InstanceState) -> None:
        """For `Registry.on_change`."""
        match record.state:
            case InstanceState.STARTING if before is InstanceState.STARTING:
                kind, text = record.arrival, f"{record.info.accelerator} at {record.info.rpc}"
            case InstanceState.UNRESPONSIVE:
                kind, text = EventKind.UNRESPONSIVE, "no heartbeat"
            case InstanceState.DEAD:
                kind, text = EventKind.DEATH, record.death
            case _ if before is InstanceState.UNRESPONSIVE:
                kind, text = EventKind.RECOVERED, "its heartbeats came again"
            case _:
                return
        self.note(kind, text, record.instance_id, record.role.value)

    def gone(self, record: Record, how: EventKind, why: str) -> None:
        """For `Registry.on_gone`."""
        self.note(how, why, record.instance_id, record.role.value)

    def operated(self, operation: Operation) -> None:
        """For `OperationLog`: an operation has ended."""
        role = operation.from_role
        what = f"{operation.kind} of {operation.job_id}" if operation.job_id else operation.kind
        text = f"{what} by {operation.who}: {operation.error}"
        match operation.result:
            case OperationResult.REFUSED | OperationResult.EXPIRED:
                kind = EventKind.OPERATION_REFUSED
            case OperationResult.FAILED:
                kind = EventKind.OPERATION_FAILED
            case OperationResult.SUCCEEDED if operation.origin is not Origin.OPERATOR:
                kind, role = EventKind.POLICY_FLIP, operation.to_role
                why = f": {operation.why}" if operation.why else ""
                text = f"{operation.from_role} → {operation.to_role} by {operation.who}{why}"
            case _:
                return
        subject = {"operation_id": operation.operation_id, "origin": operation.origin.value}
        self.note(kind, text, operation.instance_id, role, job_id=operation.job_id, **subject)

    def _has(self, kind: EventKind, event_id: str) -> bool:
        return any(event.event_id == event_id for event in self._rings[kind])
