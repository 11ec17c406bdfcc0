"""Flips, drains and resumes of instances: who proposes them, how each is carried out, and the log of all of them.

There is one way to change a role. An `OperationRequest` says what is to be done, and `Operations.run` does it: it
checks the request, drains the instance, changes its role, waits for the heartbeat that shows the new role, and lets the
instance work again. `OperationLog` keeps every request, refused ones included. Requests come from

- people, with `polyphase flip` or the dashboard, over HTTP (`routes.flip`);
- the planner, over the same route, once one of its proposals is accepted (`services.planner.proposals`);
- `RoleController`s of this process: `PolicyController` asks the policy `role_flip` that is in force, `idle` or
  `predictive` of `shared.policy`.
"""

import asyncio
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import anyio
import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.lease import LeaderTerm
from services.cluster_monitor.registry import Record, Registry
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.demand import Demand, RolesWanted
from shared.domain.instance import ClusterView, InstanceState, Role
from shared.domain.policies import PolicySet
from shared.domain.route import Reason
from shared.errors import Conflict, DeadlineExceeded, NotFound, OutcomeUnknown, PolyphaseError, Standby, from_code
from shared.policy import registry
from shared.policy.role_flip import FlipContext, FlipHistory, NoFlip, PredictiveFlip
from shared.runtime.logs import get_log
from shared.store.reading import read_flips
from shared.store.tables import flips
from shared.store.write_behind import WriteBehind
from shared.wire.api import Operation, OperationKind, OperationResult
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, ResumeRequest

log = get_log(__name__)
UNDO_S = 3.0
OPERABLE = (InstanceState.READY, InstanceState.DRAINING)
KEPT = 1_000  # operations in memory
_FLIP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_DRAIN_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """What is to be done to an instance, and who wants it.

    deadline_s: unix time by the caller's clock. A request may lie in a socket for as long as this process is frozen; it
    must not be carried out once its caller has given up. force: also if this is the last ready instance of its role.
    to_role: of a flip; an instance that has this role already is refused. why: the reasons of a program; None for a
    person. drain_timeout_s None: as the settings say.
    """

    kind: OperationKind
    instance_id: str
    who: str
    force: bool = False
    to_role: Role | None = None
    drain_timeout_s: float | None = None
    why: str | None = None
    deadline_s: float | None = None
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)

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


class Operations:
    """Carries operations out, one at a time on each instance.

    A request whose operation id is known already starts nothing: it waits for the end of that operation and gets the
    answer that the first request got.
    """

    def __init__(
        self, settings: MonitorSettings, registry: Registry, operation_log: "OperationLog", term: LeaderTerm
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._log = operation_log
        self._term = term
        self._running: dict[str, asyncio.Event] = {}  # set at the end of each operation, by operation id

    async def run(self, request: OperationRequest) -> Operation:
        """Carry a request out.

        Raises Conflict when the state of the instance does not allow it (it is the last ready one of its role, it has
        the role already, it is not ready); DeadlineExceeded when it does not drain or does not show the new role in
        time; PeerLost; OutcomeUnknown when another monitor took over meanwhile. After a failed drain the instance goes
        on draining; after a failed flip it gets work again in the role that it has.
        """
        if (known := self._log.find(request.operation_id)) is not None:
            return await self._repeat(known, request)
        record = self._registry.get(request.instance_id)
        operation = self._log.begin(request, record)
        try:
            request.check_deadline()
            self._check(record, request)
        except PolyphaseError as refusal:
            expired = isinstance(refusal, DeadlineExceeded)
            self._log.end(operation, OperationResult.EXPIRED if expired else OperationResult.REFUSED, refusal)
            raise
        await self._carry_out(record, request, operation)
        return operation

    async def run_proposed(self, request: OperationRequest) -> None:
        """Carry out what a controller proposed. A failure is logged: the controller may propose the flip again."""
        try:
            await self.run(request)
        except PolyphaseError as error:
            log.warning("a flip failed", instance_id=request.instance_id, who=request.who, error=error.message)

    def describe(self, operation_id: str) -> Operation:
        """Raises NotFound."""
        operation = self._log.find(operation_id)
        if operation is None:
            raise NotFound(f"no operation {operation_id!r}: it never arrived here, or is no longer remembered")
        return operation

    async def _repeat(self, known: Operation, request: OperationRequest) -> Operation:
        if (known.kind, known.instance_id) != (request.kind, request.instance_id):
            raise Conflict(f"operation {known.operation_id!r} is a {known.kind} of {known.instance_id}")
        if running := self._running.get(known.operation_id):
            await running.wait()
        if known.result is OperationResult.SUCCEEDED:
            return known
        raise from_code(known.code or "", known.error)

    def _check(self, record: Record, request: OperationRequest) -> None:
        if record.operation:
            raise Conflict(f"{record.instance_id}: a {record.operation} is under way")
        if record.state not in OPERABLE:
            raise Conflict(f"{record.instance_id} is {record.state.value}")
        if record.role is request.to_role:
            raise Conflict(f"{record.instance_id} has the role {request.to_role.value} already")
        takes_work_away = request.kind is not OperationKind.RESUME and record.state is InstanceState.READY
        if takes_work_away and not request.force and len(self._registry.ready(record.role)) <= 1:
            raise Conflict(
                f"{record.instance_id} is the last ready {record.role.value} instance; "
                "without it no request could be served (force allows it)"
            )

    async def _carry_out(self, record: Record, request: OperationRequest, operation: Operation) -> None:
        ended = self._running[operation.operation_id] = asyncio.Event()
        record.operation = operation.kind
        self._registry.settle(record)  # a drain or flip takes it out of the ready set before anything else
        failure: PolyphaseError | None = None
        try:
            async with asyncio.timeout(request.left_s()):
                await self._take_steps(record, request, operation)
            self._term.check()  # another monitor may act by now, and may have undone the operation
        except TimeoutError:
            late = DeadlineExceeded(f"{operation.kind} of {record.instance_id}: not done by its deadline")
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
            record.operation = ""
            self._registry.settle(record)
            failed = OperationResult.UNKNOWN if isinstance(failure, OutcomeUnknown) else OperationResult.FAILED
            self._log.end(operation, failed if failure else OperationResult.SUCCEEDED, failure)
            del self._running[operation.operation_id]
            ended.set()

    def _unknown_after_term(self, operation: Operation) -> OutcomeUnknown | None:
        """If this monitor's term is over, the outcome of the operation is unknown."""
        try:
            self._term.check()
        except Standby as over:
            text = f"whether the {operation.kind} of {operation.instance_id} was carried out is unknown: {over.message}"
            return OutcomeUnknown(text, operation_id=operation.operation_id)
        return None

    async def _take_steps(self, record: Record, request: OperationRequest, operation: Operation) -> None:
        match request.kind:
            case OperationKind.DRAIN:
                await self._drain(record, request, operation)
            case OperationKind.RESUME:
                await self._resume(record)
            case OperationKind.FLIP:
                try:
                    await self._drain(record, request, operation)
                    await self._change_role(record, operation)
                    await self._resume(record)
                except BaseException:
                    await self._undo(record)
                    raise

    async def _drain(self, record: Record, request: OperationRequest, operation: Operation) -> None:
        """Wait for the instance's work to end. It goes on draining when some is left."""
        self._term.check()
        limit_s = request.drain_timeout_s or self._settings.drain_timeout_s
        record.resumed_mono = -math.inf
        started = asyncio.get_running_loop().time()
        try:
            reply = await record.client.call(
                DRAIN, DrainRequest(limit_s, self._term.epoch), timeout_s=limit_s + self._settings.rpc_timeout_s
            )
        finally:
            operation.drain_s = asyncio.get_running_loop().time() - started
        record.draining = True
        if not reply.drained:
            raise DeadlineExceeded(
                f"{record.instance_id} did not drain within {limit_s:g} s: {reply.remaining} jobs remain"
            )

    async def _change_role(self, record: Record, operation: Operation) -> None:
        self._term.check()
        target = operation.to_role
        request = FlipRequest(target, self._term.epoch)
        reply = await record.client.call(FLIP, request, timeout_s=self._settings.rpc_timeout_s)
        operation.flip_s = reply.duration_s
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

    async def _undo(self, record: Record) -> None:
        """Let the instance work in whatever role it has, also while the operation's task is being cancelled."""
        if not record.alive:
            return
        try:
            with anyio.move_on_after(UNDO_S, shield=True):
                await self._resume(record)
        except PolyphaseError as error:
            log.error("an instance could not be resumed", instance_id=record.instance_id, why=error.message)


class OperationLog:
    """The newest operations in memory, all of them in the database. `on_end` is called with each that has ended."""

    def __init__(
        self, store: WriteBehind, metrics: CollectorRegistry, on_end: Callable[[Operation], None] = lambda _: None
    ) -> None:
        self._store = store
        self._on_end = on_end
        self._operations: OrderedDict[str, Operation] = OrderedDict()  # by operation id, newest last
        self._ended = Counter(
            "polyphase_operations", "Flips, drains and resumes by result", ["kind", "result"], registry=metrics
        )
        for kind in OperationKind:
            for result in OperationResult:
                if result is not OperationResult.RUNNING:
                    self._ended.labels(kind, result)  # a series starts at 0: rate() misses a first value other than 0
        self._flip = Histogram(
            "polyphase_flip_seconds",
            "The role change itself, as the instance measured it",
            buckets=_FLIP_BUCKETS_S,
            registry=metrics,
        )
        self._drain = Histogram(
            "polyphase_drain_seconds", "Waiting for accepted work to end", buckets=_DRAIN_BUCKETS_S, registry=metrics
        )

    async def load(self, engine: AsyncEngine) -> None:
        """Read the newest operations of earlier monitor processes. Raises Unavailable."""
        for operation in await read_flips(engine, Operation, KEPT):  # newest first
            if operation.operation_id in self._operations or len(self._operations) >= KEPT:
                continue
            if operation.result is OperationResult.RUNNING:
                unknown = OutcomeUnknown("the monitor ended while it was under way")
                operation.result = OperationResult.UNKNOWN
                operation.error, operation.code = unknown.message, unknown.code
                self._write(operation)
            self._operations[operation.operation_id] = operation
            self._operations.move_to_end(operation.operation_id, last=False)

    def newest(self, limit: int) -> list[Operation]:
        """The newest first."""
        return list(islice(self.newest_first(), limit))

    def newest_first(self) -> Iterator[Operation]:
        """All operations in memory."""
        return reversed(self._operations.values())

    def find(self, operation_id: str) -> Operation | None:
        """An operation in memory."""
        return self._operations.get(operation_id)

    def begin(self, request: OperationRequest, record: Record) -> Operation:
        """Log a request before it is checked."""
        operation = Operation(
            operation_id=request.operation_id,
            kind=request.kind,
            instance_id=record.instance_id,
            generation=record.info.generation,
            from_role=record.role,
            to_role=record.role.other if request.kind is OperationKind.FLIP else record.role,
            who=request.who,
            started_s=time.time(),
            why=request.why,
        )
        self._operations[operation.operation_id] = operation
        if len(self._operations) > KEPT:
            self._operations.popitem(last=False)
        self._write(operation)
        return operation

    def end(self, operation: Operation, result: OperationResult, error: PolyphaseError | None = None) -> None:
        """Log how an operation ended."""
        operation.total_s = max(0.0, time.time() - operation.started_s)
        operation.result = result
        if error is not None:
            operation.error, operation.code = error.message, error.code
        self._write(operation)
        self._ended.labels(operation.kind, result).inc()
        if operation.drain_s is not None:
            self._drain.observe(operation.drain_s)
        if operation.flip_s is not None:
            self._flip.observe(operation.flip_s)
        self._on_end(operation)
        level = log.warning if error else log.info
        level("operation ended", **msgspec.to_builtins(operation))

    def _write(self, operation: Operation) -> None:
        self._store.put(flips, msgspec.to_builtins(operation))


class RoleController(Protocol):
    """Proposes role flips from what the monitor knows. `Operations` carries them out."""

    def propose(self) -> OperationRequest | None:
        """At most one flip at a time."""
        ...


class PolicyController:
    """The `RoleController` of the policy `role_flip` that the view names.

    A policy that replaces another starts without the history of its predecessor. facts: what a policy may know beside
    the loads.
    """

    def __init__(self, view: Callable[[], ClusterView], facts: Callable[[], FlipContext]) -> None:
        self._view = view
        self.facts = facts
        self._spec = PolicySet().role_flip
        self._policy = registry.role_flip(self._spec.name)
        self._history = FlipHistory()

    def propose(self) -> OperationRequest | None:
        """Ask the policy."""
        view = self._view()
        if view.policies.role_flip != self._spec:
            self._spec = view.policies.role_flip
            self._policy = registry.role_flip(self._spec.name, self._spec.parameters)
            self._history = FlipHistory()
        if isinstance(self._policy, NoFlip):
            return None
        now = asyncio.get_running_loop().time()
        decision = self._policy.propose(view, now, self._history, self.facts())
        if decision is None:
            return None
        who, why = f"role_flip:{self._policy.name}", in_words(decision.reasons)
        return OperationRequest(OperationKind.FLIP, decision.instance_id, who, why=why)

    def wanted(self) -> RolesWanted | None:
        """The roles that `predictive` would aim for, whether or not it is in force; None while it cannot tell."""
        policy = self._policy if isinstance(self._policy, PredictiveFlip) else PredictiveFlip()
        return policy.wanted(self._view(), self.facts())


def facts_now(demand: Demand | None, operations: Iterable[Operation], respects_s: float) -> FlipContext:
    """Demand, and what people's flips forbid for `respects_s`. operations: newest first."""
    now = time.time()
    return FlipContext.after_orders(demand, _flips_by_people(operations, now - respects_s), now, respects_s)


def _flips_by_people(operations: Iterable[Operation], since_s: float) -> Iterator[tuple[float, str, Role]]:
    """Time, instance and new role of each flip that a person ordered since then and that stands."""
    stands = (OperationResult.RUNNING, OperationResult.SUCCEEDED, OperationResult.UNKNOWN)
    for one in operations:
        if one.started_s < since_s:
            return
        by_person = not one.why  # programs give their reasons
        if one.kind is OperationKind.FLIP and one.result in stands and by_person:
            yield one.started_s, one.instance_id, one.to_role


def in_words(reasons: Iterable[Reason]) -> str:
    """Reasons as one line of text."""
    return "; ".join(
        f"{reason.what} ({', '.join(f'{name} {value}' for name, value in reason.figures.items())})"
        for reason in reasons
    )
