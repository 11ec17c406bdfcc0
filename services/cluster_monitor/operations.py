"""Flips, drains and resumes of instances, and moves of requests, step by step: the only code that changes a role.

An `OperationRequest` says what is to be done, and `Operations.run` does it: it checks the request, drains the instance,
changes its role, waits for the heartbeat that shows the new role, and lets the instance work again. An instance with
data-parallel ranks is operated as a whole, whichever of its ranks is named. A move ends when the instance on which the
request decodes has told the request's gateway. `OperationLog` keeps every request, refused ones included. Operators'
requests come over HTTP (`routes`); automatic role changes come from `services.cluster_monitor.roles.RoleController`.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import anyio

from services.cluster_monitor.lease import LeaderTerm
from services.cluster_monitor.operation_log import OperationLog
from services.cluster_monitor.registry import Record, Registry
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import InstanceState, Role
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    NotFound,
    OutcomeUnknown,
    PolyphaseError,
    Standby,
    Unavailable,
    from_code,
)
from shared.runtime.logs import get_log
from shared.wire.api import Operation, OperationKind, OperationResult, Origin
from shared.wire.api.scheduler import RequestRow
from shared.wire.messages import DRAIN, FLIP, MOVE, RESUME, DrainRequest, FlipRequest, MoveRequest, ResumeRequest

log = get_log(__name__)
UNDO_S = 3.0
OPERABLE = (InstanceState.READY, InstanceState.DRAINING)


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """What is to be done to an instance, or to the request `job_id`, who requests it, and by what it was decided
    (`origin`).

    deadline_s: unix time by the caller's clock. A request may lie in a socket for as long as this process is frozen; it
    must not be carried out once its caller has given up. force: also if this is the last ready instance of its role.
    to_role: of a flip; an instance that has this role already is refused. why: the reasons of a policy or a plan.
    drain_timeout_s None: as the settings say. to_instance: of a move; empty for any. A move names no `instance_id`: it
    is found.
    """

    kind: OperationKind
    instance_id: str
    who: str
    force: bool = False
    to_role: Role | None = None
    drain_timeout_s: float | None = None
    why: str | None = None
    deadline_s: float | None = None
    origin: Origin = Origin.OPERATOR
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    job_id: str = ""
    to_instance: str = ""

    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline_s is None else self.deadline_s - time.time()

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded once the deadline has passed."""
        left_s = self.left_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(
                f"the request arrived {-left_s:.1f} s after its deadline, and nothing was done "
                "(by the monitor's clock; clocks of hosts must agree)"
            )


Rule = Callable[[OperationRequest], None]  # raises Conflict where it forbids the request
FindRequest = Callable[[str], Awaitable[RequestRow | None]]  # the state of a request as last reported, by its job id


class Operations:
    """Carries operations out, one at a time on each instance.

    A request whose operation id is known already starts nothing: it waits for the end of that operation and gets the
    answer that the first request got.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        registry: Registry,
        operation_log: OperationLog,
        term: LeaderTerm,
        find_request: FindRequest,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._log = operation_log
        self._term = term
        self._find_request = find_request
        self._running: dict[str, asyncio.Event] = {}  # set at the end of each operation, by operation id

    async def run(self, request: OperationRequest, rule: Rule | None = None) -> Operation:
        """Carry a request out, unless the rule forbids it.

        Raises NotFound for an unknown instance or request; Conflict when the rule or the state of the instance or
        request does not allow it (it is the last ready one of its role, it has the role already, it is not ready; it
        does not decode, its gateway does not migrate it); DeadlineExceeded when it does not drain or does not show the
        new role in time; PeerLost; OutcomeUnknown when another monitor took over meanwhile. After a failed drain the
        instance goes on draining; after a failed flip it gets work again in the role that it has.
        """
        if (known := self._log.find(request.operation_id)) is not None:
            return await self._repeat(known, request)
        records = [] if request.kind is OperationKind.MOVE else self._registry.ranks(request.instance_id)
        operation = _begun(request, records)
        self._log.begin(operation)
        try:
            request.check_deadline()
            self._check(records, request)
            if rule is not None:
                rule(request)
        except PolyphaseError as refusal:
            expired = isinstance(refusal, DeadlineExceeded)
            self._log.end(operation, OperationResult.EXPIRED if expired else OperationResult.REFUSED, refusal)
            raise
        await self._carry_out(records, request, operation)
        return operation

    def names(self, instance_id: str) -> tuple[str, ...]:
        """The ids by which an instance is known: its own, or those of its data-parallel ranks."""
        known = tuple(each.instance_id for each in self._registry.all() if each.info.rank_of == instance_id)
        return known or (instance_id,)

    def describe(self, operation_id: str) -> Operation:
        """Raises NotFound."""
        operation = self._log.find(operation_id)
        if operation is None:
            raise NotFound(f"no operation {operation_id!r}: it never arrived here, or is no longer remembered")
        return operation

    async def _repeat(self, known: Operation, request: OperationRequest) -> Operation:
        named = self._registry.find(request.instance_id)
        whole = named.info.whole if named is not None else request.instance_id
        if (known.kind, known.subject) != (request.kind, request.job_id or whole):
            raise Conflict(f"operation {known.operation_id!r} is a {known.kind} of {known.subject}")
        if running := self._running.get(known.operation_id):
            await running.wait()
        if known.result is OperationResult.SUCCEEDED:
            return known
        raise from_code(known.code or "", known.error)

    def _check(self, records: Sequence[Record], request: OperationRequest) -> None:
        if request.kind is OperationKind.MOVE:
            self._check_target(request)
            return
        for record in records:
            if record.operation:
                raise Conflict(f"{record.instance_id}: a {record.operation} is under way")
            if record.state not in OPERABLE:
                raise Conflict(f"{record.instance_id} is {record.state.value}")
        first = records[0]
        if request.to_role and all(record.role is request.to_role for record in records):
            raise Conflict(f"{first.info.whole} has the role {request.to_role.value} already")
        if request.kind is OperationKind.RESUME or request.force:
            return
        names = {record.instance_id for record in records}
        for role in Role:
            ready = {record.instance_id for record in self._registry.ready(role)}
            if ready and ready <= names:
                raise Conflict(
                    f"{first.info.whole} is the last ready {role.value} instance; "
                    "without it no request could be served (force allows it)"
                )

    def _check_target(self, request: OperationRequest) -> None:
        """Raises NotFound, or Conflict where no instance, or not the named one, can take a request over."""
        target = self._registry.find(request.to_instance)
        if not request.to_instance:
            living = [each for each in self._registry.all() if each.role is Role.DECODE and each.alive]
            if len(living) < 2 or not self._registry.ready(Role.DECODE):
                raise Conflict(f"{request.job_id} cannot move: there is no other instance that is ready to decode")
            return
        if target is None:
            ranks = [each for each in self.names(request.to_instance) if each != request.to_instance]
            named = f"; name one of its data-parallel ranks: {', '.join(ranks)}" if ranks else ""
            raise NotFound(f"no instance {request.to_instance!r}{named}")
        if target.state is not InstanceState.READY:
            raise Conflict(f"{target.instance_id} cannot take {request.job_id} over: it is {target.state.value}")
        if target.role is not Role.DECODE:
            raise Conflict(f"{target.instance_id} cannot take {request.job_id} over: it is a {target.role} instance")

    async def _carry_out(self, records: Sequence[Record], request: OperationRequest, operation: Operation) -> None:
        ended = self._running[operation.operation_id] = asyncio.Event()
        for record in records:
            record.operation = operation.kind
            self._registry.settle(record)  # a drain or flip takes it out of the ready set before anything else
        failure: PolyphaseError | None = None
        try:
            async with asyncio.timeout(request.left_s()):
                await self._take_steps(records, request, operation)
            self._term.check()  # another monitor may act by now, and may have undone the operation
        except TimeoutError:
            late = DeadlineExceeded(f"{operation.kind} of {operation.subject}: not done by its deadline")
            failure = self._unknown_after_term(operation) or late
            raise failure from None
        except PolyphaseError as error:
            failure = self._unknown_after_term(operation) or error
            if failure is error:
                raise
            raise failure from error
        except BaseException as error:
            failure = PolyphaseError(repr(error))
            raise
        finally:
            for record in records:
                record.operation = ""
                self._registry.settle(record)
            self._log.end(operation, _result(operation, failure), failure)
            del self._running[operation.operation_id]
            ended.set()

    def _unknown_after_term(self, operation: Operation) -> OutcomeUnknown | None:
        """If this monitor's term is over, the outcome of the operation is unknown."""
        try:
            self._term.check()
        except Standby as over:
            text = f"whether the {operation.kind} of {operation.subject} was carried out is unknown: {over.message}"
            return OutcomeUnknown(text, operation_id=operation.operation_id)
        return None

    async def _take_steps(self, records: Sequence[Record], request: OperationRequest, operation: Operation) -> None:
        match request.kind:
            case OperationKind.DRAIN:
                await self._drain(records, request, operation)
            case OperationKind.RESUME:
                await _each(records, self._resume)
            case OperationKind.MOVE:
                await self._move(request, operation)
            case OperationKind.FLIP:
                try:
                    await self._drain(records, request, operation)
                    drained_mono = asyncio.get_running_loop().time()
                    others = [each for each in records if each.role is not operation.to_role]  # one has restarted
                    await _each(others, lambda record: self._change_role(record, operation.to_role))
                    await _each(records, self._resume)
                    operation.flip_s = asyncio.get_running_loop().time() - drained_mono
                except BaseException:
                    with anyio.move_on_after(UNDO_S, shield=True):  # also while this task is being cancelled
                        await _each(records, self._undo)
                    raise

    async def _drain(self, records: Sequence[Record], request: OperationRequest, operation: Operation) -> None:
        """Wait for the work of all to end. They go on draining when some is left."""
        self._term.check()
        started = asyncio.get_running_loop().time()
        limit_s = request.drain_timeout_s or self._settings.drain_timeout_s
        try:
            await _each(records, lambda record: self._drain_one(record, limit_s))
        finally:
            operation.drain_s = asyncio.get_running_loop().time() - started

    async def _drain_one(self, record: Record, limit_s: float) -> None:
        record.resumed_mono = -math.inf
        reply = await record.client.call(
            DRAIN, DrainRequest(limit_s, self._term.epoch), timeout_s=limit_s + self._settings.rpc_timeout_s
        )
        record.draining = True
        if not reply.drained:
            raise DeadlineExceeded(
                f"{record.instance_id} did not drain within {limit_s:g} s: {reply.remaining} jobs remain"
            )

    async def _change_role(self, record: Record, target: Role) -> None:
        self._term.check()
        request = FlipRequest(target, self._term.epoch)
        reply = await record.client.call(FLIP, request, timeout_s=self._settings.rpc_timeout_s)
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
        self._term.check()
        await record.client.call(RESUME, ResumeRequest(self._term.epoch), timeout_s=self._settings.rpc_timeout_s)
        record.draining, record.resumed_mono = False, asyncio.get_running_loop().time()

    async def _move(self, request: OperationRequest, operation: Operation) -> None:
        """Every living instance gets the request to move the job: no table says as quickly where a job decodes."""
        self._term.check()
        wanted = MoveRequest(request.job_id, request.to_instance, self._term.epoch)
        records = [record for record in self._registry.all() if record.alive]
        calls = (record.client.call(MOVE, wanted, timeout_s=self._settings.rpc_timeout_s) for record in records)
        silent: list[str] = []
        for record, answer in zip(records, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, NotFound):
                continue
            if isinstance(answer, PolyphaseError) and not isinstance(answer, Conflict):
                silent.append(f"{record.instance_id} ({answer.message})")
                continue
            operation.instance_id, operation.generation = record.instance_id, record.info.generation
            if isinstance(answer, BaseException):
                raise answer
            return
        await self._raise_not_found(request.job_id, silent)

    async def _raise_not_found(self, job_id: str, silent: Sequence[str]) -> NoReturn:
        """Why no instance has the job. silent: instances that did not say whether they have it."""
        try:
            row = await self._find_request(job_id)
        except PolyphaseError:
            row = None
        if row is not None and row.phase.final:
            raise Conflict(f"{job_id} has ended: {row.outcome or row.phase.value}")
        if silent:
            raise Unavailable(f"no instance found that decodes {job_id}; without an answer: {', '.join(silent)}")
        if row is None:
            raise NotFound(f"no request {job_id!r} decodes on any instance, and none is known by this id")
        raise Conflict(f"{job_id} does not decode at the moment: its last reported phase is {row.phase.value}")

    async def _undo(self, record: Record) -> None:
        """Let the instance work in whatever role it has."""
        if not record.alive:
            return
        try:
            await self._resume(record)
        except PolyphaseError as error:
            log.error("an instance could not be resumed", instance_id=record.instance_id, why=error.message)


def _begun(request: OperationRequest, records: Sequence[Record]) -> Operation:
    """records: of the instance; empty for a move."""
    first = records[0] if records else None
    role = first.role if first is not None else Role.DECODE
    return Operation(
        operation_id=request.operation_id,
        kind=request.kind,
        instance_id=first.info.whole if first is not None else "",
        generation=first.info.generation if first is not None else 0,
        from_role=role,
        to_role=(request.to_role or role.other) if request.kind is OperationKind.FLIP else role,
        who=request.who,
        started_s=time.time(),
        why=request.why,
        origin=request.origin,
        job_id=request.job_id,
        to_instance=request.to_instance,
    )


def _result(operation: Operation, failure: PolyphaseError | None) -> OperationResult:
    """A move that no instance accepts has changed nothing."""
    if failure is None:
        return OperationResult.SUCCEEDED
    if isinstance(failure, OutcomeUnknown):
        return OperationResult.UNKNOWN
    refused = operation.kind is OperationKind.MOVE and isinstance(failure, (NotFound, Conflict))
    return OperationResult.REFUSED if refused else OperationResult.FAILED


async def _each(records: Sequence[Record], step: Callable[[Record], Awaitable[None]]) -> None:
    """Take a step at all records at once, and wait for all before the first error is raised."""
    for ended in await asyncio.gather(*map(step, records), return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
