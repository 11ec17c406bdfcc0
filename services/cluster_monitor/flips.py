"""Flips, drains and resumes: the only place that knows the order of their steps."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from services.cluster_monitor.audit import Asked, Audit, Entry, Result
from services.cluster_monitor.lease import Turn
from services.cluster_monitor.record import Record
from services.cluster_monitor.registry import Registry
from services.cluster_monitor.settings import MonitorSettings
from services.cluster_monitor.steps import Steps
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, DeadlineExceeded, NotFound, OutcomeUnknown, PolyphaseError, Standby, from_code

OPERABLE = (InstanceState.READY, InstanceState.DRAINING)

Run = Callable[[Record, Entry], Awaitable[None]]


class Operations:
    """What can be done to an instance; one at a time each. Every attempt is in the audit, refused ones included.

    An operation has an id: asking for the same one again does nothing anew, but waits for its end and answers as the
    first call did. One that arrives after its deadline is not begun, and one that is under way then ends.
    """

    def __init__(self, settings: MonitorSettings, registry: Registry, audit: Audit, turn: Turn) -> None:
        self._steps = Steps(settings, turn)
        self._turn = turn
        self._registry = registry
        self._audit = audit
        self._under_way: dict[str, asyncio.Event] = {}

    async def drain(self, instance_id: str, asked: Asked, *, force: bool, timeout_s: float | None) -> dict[str, Any]:
        """Give it no new work and wait for what it has.

        Raises Conflict for the last ready instance of a role unless forced, DeadlineExceeded when work is left at the
        timeout (it goes on draining), PeerLost.
        """

        async def run(record: Record, entry: Entry) -> None:
            await self._steps.drain(record, entry, timeout_s)

        return await self._once("drain", instance_id, asked, run, spare_last=not force)

    async def resume(self, instance_id: str, asked: Asked) -> dict[str, Any]:
        """Give it work again in its present role. Raises Conflict, PeerLost."""

        async def run(record: Record, entry: Entry) -> None:
            await self._steps.resume(record)

        return await self._once("resume", instance_id, asked, run, spare_last=False)

    async def flip(
        self, instance_id: str, asked: Asked, *, force: bool, drain_timeout_s: float | None, to: Role | None = None
    ) -> dict[str, Any]:
        """Drain, flip, verify, resume. When a step fails the instance gets work again in the role it has.

        to: the role that is meant, where who asks may not know the present one.
        Raises Conflict for the last ready instance of a role unless forced, and for one that has the role `to`;
        DeadlineExceeded when it does not drain or does not show the new role, PeerLost when it is gone.
        """

        async def run(record: Record, entry: Entry) -> None:
            target = record.role.other
            try:
                await self._steps.drain(record, entry, drain_timeout_s)
                await self._steps.change(record, entry, target)
                await self._steps.resume(record)
            except BaseException:
                await self._steps.undo(record)
                raise

        return await self._once("flip", instance_id, asked, run, spare_last=not force, to=to)

    def describe(self, operation_id: str) -> dict[str, Any]:
        """How an operation stands. Raises NotFound."""
        row = self._audit.find(operation_id)
        if row is None:
            raise NotFound(f"no operation {operation_id!r}: it never arrived here, or is forgotten")
        return row

    async def _once(
        self, kind: str, instance_id: str, asked: Asked, run: Run, *, spare_last: bool, to: Role | None = None
    ) -> dict[str, Any]:
        known = self._audit.find(asked.operation_id)
        if known is not None:
            return await self._again(known, kind, instance_id)
        record = self._registry.get(instance_id)
        entry = self._audit.begin(kind, record, record.role.other if kind == "flip" else record.role, asked)
        try:
            asked.check_deadline()
            self._check(record, spare_last, to)
        except PolyphaseError as refusal:
            self._audit.end(entry, Result.EXPIRED if isinstance(refusal, DeadlineExceeded) else Result.REFUSED, refusal)
            raise
        await self._carry_out(record, entry, asked, run)
        return self.describe(entry.operation_id)

    async def _again(self, known: dict[str, Any], kind: str, instance_id: str) -> dict[str, Any]:
        if (known["kind"], known["instance_id"]) != (kind, instance_id):
            raise Conflict(f"operation {known['operation_id']!r} is a {known['kind']} of {known['instance_id']}")
        if under_way := self._under_way.get(known["operation_id"]):
            await under_way.wait()
        row = self.describe(known["operation_id"])
        if row["result"] == Result.SUCCEEDED:
            return row
        raise from_code(row["code"] or "", row["error"])

    def _check(self, record: Record, spare_last: bool, to: Role | None) -> None:
        if record.operation:
            raise Conflict(f"{record.instance_id}: a {record.operation} is under way")
        if record.state not in OPERABLE:
            raise Conflict(f"{record.instance_id} is {record.state.value}")
        if record.role is to:
            raise Conflict(f"{record.instance_id} has the role {to.value} already")
        last = record.state is InstanceState.READY and len(self._registry.ready(record.role)) <= 1
        if spare_last and last:
            raise Conflict(
                f"{record.instance_id} is the last ready {record.role.value} instance; "
                "without it no request could be served (force allows it)"
            )

    async def _carry_out(self, record: Record, entry: Entry, asked: Asked, run: Run) -> None:
        ended = self._under_way[entry.operation_id] = asyncio.Event()
        record.operation = entry.kind
        self._registry.settle(record)  # a drain or flip takes it out of the ready set before anything else
        failure: PolyphaseError | None = None
        try:
            async with asyncio.timeout(asked.left_s()):
                await run(record, entry)
            self._turn.check()  # another monitor may act by now, and may have undone it
        except TimeoutError:
            late = DeadlineExceeded(f"{entry.kind} of {record.instance_id}: not done by its deadline")
            failure = self._unless_over(record, entry, late)
            raise failure from None
        except PolyphaseError as error:
            failure = self._unless_over(record, entry, error)
            if failure is error:
                raise
            raise failure from error
        except BaseException as error:
            failure = PolyphaseError(repr(error))
            raise
        finally:
            record.operation = ""
            self._registry.settle(record)
            result = Result.UNKNOWN if isinstance(failure, OutcomeUnknown) else Result.FAILED
            self._audit.end(entry, result if failure else Result.SUCCEEDED, failure)
            del self._under_way[entry.operation_id]
            ended.set()

    def _unless_over(self, record: Record, entry: Entry, error: PolyphaseError) -> PolyphaseError:
        """The error; where this monitor's turn has ended meanwhile, that nobody knows what became of it."""
        try:
            self._turn.check()
        except Standby as over:
            said = f"whether the {entry.kind} of {record.instance_id} was carried out is unknown: {over.message}"
            return OutcomeUnknown(said, operation_id=entry.operation_id)
        return error
