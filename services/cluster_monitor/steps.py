"""The calls to one instance of which operations are made."""

import asyncio
import math

import anyio

from services.cluster_monitor.audit import Entry
from services.cluster_monitor.lease import Turn
from services.cluster_monitor.record import Record
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import Role
from shared.errors import Conflict, DeadlineExceeded, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import DrainRequest, FlipRequest, ResumeRequest
from shared.wire.methods import DRAIN, FLIP, RESUME

log = get_log(__name__)
UNDO_S = 3.0


class Steps:
    """Drain, change, resume, undo; each notes in the operation's entry how long it took."""

    def __init__(self, settings: MonitorSettings, turn: Turn) -> None:
        self._settings = settings
        self._turn = turn

    async def drain(self, record: Record, entry: Entry, timeout_s: float | None) -> None:
        """Wait for its work to end. Raises DeadlineExceeded when some is left (it goes on draining), PeerLost."""
        self._turn.check()
        limit_s = timeout_s or self._settings.drain_timeout_s
        record.resumed_mono = -math.inf
        started = asyncio.get_running_loop().time()
        try:
            reply = await record.client.call(
                DRAIN, DrainRequest(limit_s, self._turn.epoch), timeout_s=limit_s + self._settings.rpc_timeout_s
            )
        finally:
            entry.drain_s = asyncio.get_running_loop().time() - started
        record.draining = True
        if not reply.drained:
            raise DeadlineExceeded(
                f"{record.instance_id} did not drain within {limit_s:g} s: {reply.remaining} jobs remain"
            )

    async def change(self, record: Record, entry: Entry, target: Role) -> None:
        """Take the other role, and show it. Raises Conflict, DeadlineExceeded, PeerLost."""
        self._turn.check()
        request = FlipRequest(target, self._turn.epoch)
        reply = await record.client.call(FLIP, request, timeout_s=self._settings.rpc_timeout_s)
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

    async def resume(self, record: Record) -> None:
        """Take work again. Raises DeadlineExceeded, PeerLost."""
        self._turn.check()
        await record.client.call(RESUME, ResumeRequest(self._turn.epoch), timeout_s=self._settings.rpc_timeout_s)
        record.draining, record.resumed_mono = False, asyncio.get_running_loop().time()

    async def undo(self, record: Record) -> None:
        """Let it work again in whatever role it has; also when this very call is being cancelled."""
        if not record.alive:
            return
        try:
            with anyio.move_on_after(UNDO_S, shield=True):
                await self.resume(record)
        except PolyphaseError as error:
            log.error("an instance could not be resumed", instance_id=record.instance_id, why=error.message)
