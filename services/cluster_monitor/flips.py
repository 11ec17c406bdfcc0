"""Flips, drains and resumes: the only place that knows the order of their steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from services.cluster_monitor.audit import Audit, Entry
from services.cluster_monitor.record import Record
from services.cluster_monitor.registry import Registry
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, DeadlineExceeded, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import DrainRequest, FlipRequest, ResumeRequest
from shared.wire.methods import DRAIN, FLIP, RESUME

log = get_log(__name__)
OPERABLE = (InstanceState.READY, InstanceState.DRAINING)
UNDO_S = 3.0


class Operations:
    """What can be done to an instance; one at a time each. Every attempt that starts is in the audit."""

    def __init__(self, settings: MonitorSettings, registry: Registry, audit: Audit) -> None:
        self._settings = settings
        self._registry = registry
        self._audit = audit

    async def drain(self, instance_id: str, *, force: bool, timeout_s: float | None, who: str) -> dict[str, Any]:
        """Give it no new work and wait for what it has.

        Raises Conflict for the last ready instance of a role unless forced, DeadlineExceeded when work is left at the
        timeout (it goes on draining), PeerLost.
        """
        record = self._operable(instance_id)
        self._check_last(record, force)
        async with self._operation("drain", record, record.role, who) as entry:
            await self._drain(record, entry, timeout_s)
            record.draining = True
        return self._result(entry)

    async def resume(self, instance_id: str, who: str) -> dict[str, Any]:
        """Give it work again in its present role. Raises Conflict, PeerLost."""
        record = self._operable(instance_id)
        async with self._operation("resume", record, record.role, who) as entry:
            await self._resume(record)
        return self._result(entry)

    async def flip(
        self, instance_id: str, *, force: bool, drain_timeout_s: float | None, who: str, why: str | None = None
    ) -> dict[str, Any]:
        """Drain, flip, verify, resume. When a step fails the instance gets work again in the role it has.

        Raises Conflict for the last ready instance of a role unless forced, DeadlineExceeded when it does not
        drain or does not show the new role, PeerLost when it is gone.
        """
        record = self._operable(instance_id)
        self._check_last(record, force)
        target = record.role.other
        async with self._operation("flip", record, target, who, why) as entry:
            try:
                await self._drain(record, entry, drain_timeout_s)
                await self._change(record, entry, target)
                await self._resume(record)
            except BaseException:
                await self._undo(record)
                raise
        return self._result(entry)

    def _operable(self, instance_id: str) -> Record:
        record = self._registry.get(instance_id)
        if record.operation:
            raise Conflict(f"{instance_id}: a {record.operation} is under way")
        if record.state not in OPERABLE:
            raise Conflict(f"{instance_id} is {record.state.value}")
        return record

    def _check_last(self, record: Record, force: bool) -> None:
        ready = self._registry.ready(record.role)
        if not force and record.state is InstanceState.READY and len(ready) <= 1:
            raise Conflict(
                f"{record.instance_id} is the last ready {record.role.value} instance; "
                "without it no request could be served (force allows it)"
            )

    @asynccontextmanager
    async def _operation(
        self, kind: str, record: Record, to_role: Role, who: str, why: str | None = None
    ) -> AsyncIterator[Entry]:
        entry = self._audit.begin(kind, record, to_role, who, why)
        record.operation = kind
        self._registry.settle(record)  # a drain or flip takes it out of the ready set before anything else
        error = ""
        try:
            yield entry
        except BaseException as failure:
            error = failure.message if isinstance(failure, PolyphaseError) else repr(failure)
            raise
        finally:
            record.operation = ""
            self._registry.settle(record)
            self._audit.end(entry, error)

    def _result(self, entry: Entry) -> dict[str, Any]:
        found = (row for row in self._audit.newest(1000) if row["operation_id"] == entry.operation_id)
        return dict(next(found))

    async def _drain(self, record: Record, entry: Entry, timeout_s: float | None) -> None:
        limit_s = timeout_s or self._settings.drain_timeout_s
        started = asyncio.get_running_loop().time()
        try:
            reply = await record.client.call(
                DRAIN, DrainRequest(limit_s), timeout_s=limit_s + self._settings.rpc_timeout_s
            )
        finally:
            entry.drain_s = asyncio.get_running_loop().time() - started
        if not reply.drained:
            record.draining = True
            raise DeadlineExceeded(
                f"{record.instance_id} did not drain within {limit_s:g} s: {reply.remaining} jobs remain"
            )

    async def _change(self, record: Record, entry: Entry, target: Role) -> None:
        reply = await record.client.call(FLIP, FlipRequest(target), timeout_s=self._settings.rpc_timeout_s)
        entry.flip_s = reply.duration_s
        if reply.role is not target:
            raise Conflict(f"{record.instance_id} answered the flip with the role {reply.role.value}")
        try:
            await record.next_heartbeat(lambda beat: beat.role is target, self._settings.verify_timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{record.instance_id} sent no heartbeat as {target.value} within "
                f"{self._settings.verify_timeout_s:g} s of its flip"
            ) from error

    async def _resume(self, record: Record) -> None:
        await record.client.call(RESUME, ResumeRequest(), timeout_s=self._settings.rpc_timeout_s)
        record.draining = False

    async def _undo(self, record: Record) -> None:
        """Let it work again in whatever role it has; also when this very call is being cancelled."""
        if not record.alive:
            return
        try:
            with anyio.move_on_after(UNDO_S, shield=True):
                await self._resume(record)
        except PolyphaseError as error:
            log.error("an instance could not be resumed", instance_id=record.instance_id, why=error.message)
