"""Decodes that go on elsewhere: a job that is paused for want of KV memory, and a job that migrates with its KV.

A migration has four steps. While the job decodes on, its KV is exported from its instance and pulled into the prefix
cache of the target, again for what has come meanwhile as long as that is much (`_copy_ahead`). Then the job leaves its
instance between two engine steps, the rest of its KV is staged there, and the reply of its decode call has the
`Handover`. The pipeline then has the target decode from that. Where a step fails before the job has left, it stays;
after that, the pipeline's usual retries recompute what is missing.
"""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.job import Job
from shared.domain.kv import TransferOutcome
from shared.domain.prompt import packed
from shared.domain.route import InstanceRef, Reason, Route
from shared.errors import EngineFailed, NotFound, PolyphaseError
from shared.policy.leaving import AGAIN_S, COPY_ROUNDS, REST_TOKENS
from shared.policy.overload import MOVE_LEAST_S
from shared.runtime.logs import get_log
from shared.wire.messages import (
    EXPORT,
    LEAVE,
    PULL,
    RELEASE,
    DecodeReply,
    ExportRequest,
    Leave,
    LeaveCause,
    LeaveRequest,
    Pause,
    PullRequest,
    ReleaseRequest,
)
from shared.wire.rpc_client import RpcClients

log = get_log(__name__)
EXPORT_S, PULL_S, LEAVE_S = 5.0, 60.0, 10.0  # deadlines of the calls
WISHED = (LeaveCause.MEMORY, LeaveCause.TPOT)  # causes for which a job leaves only where that is clearly better
ARRIVE_S = 5.0  # for tokens to arrive whose KV the instance has exported
_LOOK_S = 0.005


class Places(Protocol):
    """Where the mover gets routes, and reports where the job is."""

    async def elsewhere(self, job: Job, instance: InstanceRef, pause_s: float) -> Route:
        """A route on which a job that stays paused at the instance for so many seconds continues clearly sooner. Raises
        Stays, and the errors of a placement.
        """
        ...

    async def target(self, job: Job, instance: InstanceRef, leave: Leave) -> InstanceRef:
        """The decode instance to which a job of the instance should migrate. Raises Stays, and the errors of a
        placement.
        """
        ...

    def stays(self, job: Job) -> None:
        """The job is where it was; the scheduler has booked it elsewhere."""
        ...


@dataclass(slots=True)
class Migration:
    """A job on its way to the target. transfer_id: of the rest of its KV, once it is to leave."""

    target: InstanceRef
    transfer_id: str = ""
    copied: int = 0  # tokens of KV that the target has in its prefix cache


class Mover:
    """Runs one decode of a job, and ends it early where the job goes on elsewhere.

    The instance reports that the job is paused (`on_pause`), or that it should leave (`on_leave`). The mover then
    requests another place for it. A paused job does not go there if a token arrived meanwhile, or if its KV is being
    computed again.
    """

    def __init__(self, job: Job, instance: InstanceRef, max_moves: int, clients: RpcClients, places: Places) -> None:
        self._job = job
        self._instance = instance
        self._max_moves = max_moves
        self._clients = clients
        self._places = places
        self._decoding = asyncio.timeout(None)  # the block in which the job decodes; `_leave` sets its time limit
        self._moving: asyncio.Task[None] | None = None
        self._route: Route | None = None  # on which the job continues
        self.migration: Migration | None = None  # which has come so far that the job is to leave

    async def run(self, decode: Awaitable[DecodeReply]) -> DecodeReply | Route:
        """The reply of the decode; or the route on which the job continues, and then the decode was cancelled."""
        try:
            async with self._decoding:
                try:
                    return await decode
                finally:
                    await self._stop_moving()
        except TimeoutError:
            if self._route is None or not self._decoding.expired():
                raise
            return self._route

    def on_pause(self, pause: Pause) -> None:
        if self._is_moving or pause.computing or pause.expected_s < MOVE_LEAST_S:
            return
        if self._job.can_move(self._max_moves):
            self._moving = asyncio.get_running_loop().create_task(self._move(pause))

    def on_leave(self, leave: Leave) -> None:
        if self._is_moving or not self._job.can_migrate:
            return
        is_recent = time.monotonic() - self._job.migrated_mono <= AGAIN_S  # loads lag: it might go to and fro
        if leave.cause not in WISHED or not is_recent:
            self._moving = asyncio.get_running_loop().create_task(self._migrate(leave))

    @property
    def _is_moving(self) -> bool:
        return self._moving is not None and not self._moving.done()

    async def _move(self, pause: Pause) -> None:
        job, instance_id, paused = self._job, self._instance.instance_id, self._job.call.paused
        try:
            route = await self._places.elsewhere(job, self._instance, pause.expected_s)
        except asyncio.CancelledError:
            return  # by `_stop_moving`
        except PolyphaseError as error:
            log.debug("a paused job stays", job_id=job.spec.job_id, instance_id=instance_id, reason=error.message)
            return
        if paused is None or job.call.paused is not paused or paused.computed_s:
            self._places.stays(job)
            return
        log.info("a paused job moves", job_id=job.spec.job_id, instance_id=instance_id, tokens=len(job.tokens))
        job.moved(instance_id, time.time() - paused.began_s, pause, route)
        self._leave(route)

    def _leave(self, route: Route) -> None:
        """End the decode, and only the decode, by a time limit of its block that has passed already.

        This relies on `asyncio.timeout`: in the next round of the event loop it cancels the task of the job, unless the
        block has ended by then. At the end of the block it takes that cancellation back and raises TimeoutError, unless
        the task was cancelled for another reason, too (a client that disconnects, the deadline in `Pipeline.run`).
        With `task.cancel()`, telling the two cancellations apart and `Task.uncancel` would be left to this class; a
        decode in a task of its own could be cancelled simply, but each job would pay for that task.
        """
        self._route = route
        self._decoding.reschedule(asyncio.get_running_loop().time())

    async def _migrate(self, leave: Leave) -> None:
        job, job_id, source = self._job, self._job.spec.job_id, self._instance
        held: list[tuple[InstanceRef, str]] = []  # transfers that are staged or pulled, and where
        booked = False
        try:
            target = await self._places.target(job, source, leave)
            booked = True
            job.migrations, job.migrated_mono = job.migrations + 1, time.monotonic()
            migration = Migration(target)
            job.migrates(source.instance_id, target.instance_id, leave.cause)
            await self._copy_ahead(migration, held)
            migration.transfer_id = self._transfer_id(COPY_ROUNDS)
            self.migration = migration
            try:
                await self._call(source, LEAVE, LeaveRequest(job_id, migration.transfer_id, migration.copied), LEAVE_S)
            except NotFound:
                held.append((source, migration.transfer_id))
                raise
        except asyncio.CancelledError:
            return  # by `_stop_moving`
        except PolyphaseError as error:
            log.info("a job does not migrate", job_id=job_id, instance_id=source.instance_id, reason=error.message)
            if booked and not job.finished:
                job.decided("stay", source.instance_id, (Reason(error.message, {"code": error.code}),))
                job.migrated("stayed")
                self._places.stays(job)
        finally:
            for instance, transfer_id in held:
                self._clients.to(instance.rpc).notify(RELEASE, ReleaseRequest([transfer_id]))

    async def _copy_ahead(self, migration: Migration, held: list[tuple[InstanceRef, str]]) -> None:
        """Have the target pull the job's KV while it decodes on, until little is missing."""
        job, source, target = self._job, self._instance, migration.target
        for round_number in range(COPY_ROUNDS):
            transfer_id = self._transfer_id(round_number)
            held += [(source, transfer_id), (target, transfer_id)]
            export = ExportRequest(transfer_id, job.spec.job_id, start=migration.copied)
            reply = await self._call(source, EXPORT, export, EXPORT_S)
            if reply.handle is None:
                return
            await self._arrived(reply.handle.tokens + 1)
            pull = PullRequest(
                job=job.view(decode_only=True),
                prompt=packed(job.known_tokens[: reply.handle.tokens + 1]),
                generation=job.spec.generation,
                handle=reply.handle,
                if_room=round_number == 0,
            )
            pulled = await self._call(target, PULL, pull, PULL_S)
            if pulled.transfer.outcome is TransferOutcome.RECOMPUTED:
                raise EngineFailed(f"{target.instance_id} could not pull the KV: {pulled.transfer.error}")
            if pulled.held <= migration.copied:
                return
            migration.copied = pulled.held
            if job.known_count - migration.copied <= REST_TOKENS:
                return

    async def _arrived(self, tokens: int) -> None:
        """Wait for the gateway to have so many tokens of prompt and answer. Raises EngineFailed when it does not."""
        until_mono = time.monotonic() + ARRIVE_S
        while self._job.known_count < tokens:
            if self._job.finished or time.monotonic() > until_mono:
                raise EngineFailed("the answer has ended")
            await asyncio.sleep(_LOOK_S)

    async def _call(self, instance: InstanceRef, method: Any, request: Any, timeout_s: float) -> Any:
        return await self._clients.to(instance.rpc).call(method, request, timeout_s=min(timeout_s, self._job.left_s))

    def _transfer_id(self, number: int) -> str:
        """Of a copy; no two of a job are alike."""
        return f"{self._job.transfer_id}/m{self._job.migrations}.{number}"

    async def _stop_moving(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.gather(self._moving)
