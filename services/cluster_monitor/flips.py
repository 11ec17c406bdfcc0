"""Flips, drains and resumes: the only place that knows the order of their steps."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import anyio

from services.cluster_monitor.audit import Asked, Audit, Entry, Result
from services.cluster_monitor.lease import Turn
from services.cluster_monitor.registry import Record, Registry
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.demand import Demand, RolesWanted
from shared.domain.instance import ClusterView, InstanceState, Role
from shared.domain.policies import PolicySet
from shared.domain.route import PolicySpec, Reason
from shared.errors import Conflict, DeadlineExceeded, NotFound, OutcomeUnknown, PolyphaseError, Standby, from_code
from shared.policy import registry
from shared.policy.predictive_roles import PredictiveFlip
from shared.policy.role_flip import FlipDecision, NoFlip, Seen
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.wire.messages import DRAIN, FLIP, RESUME, DrainRequest, FlipRequest, ResumeRequest

# MERGED steps.py
# The calls to one instance of which operations are made.


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


# MERGED auto_flips.py
# Role flips that a policy decides: the thin driver between it and the operations that carry a flip out.

POLICY = "role_flip:"  # who, in the audit, before the policy's name
_STOOD = (Result.RUNNING, Result.SUCCEEDED, Result.UNKNOWN)


class AutoFlips:
    """Asks the policy that the view names at each `step`, another one without what its predecessor remembered.

    Its decisions run as operations like any other, with their reasons in the audit.
    """

    def __init__(
        self, view: Callable[[], ClusterView], seen: Callable[[], Seen], operations: Operations, tasks: Background
    ) -> None:
        self._view = view
        self._seen = seen
        self._operations = operations
        self._tasks = tasks
        self._spec = PolicySet().role_flip
        self._policy = registry.role_flip(self._spec.name)
        self._state = self._policy.start()

    def step(self) -> None:
        """Ask once."""
        now, view = asyncio.get_running_loop().time(), self._view()
        self._follow(view.policies.role_flip)
        if isinstance(self._policy, NoFlip):
            return
        self._state, decision = self._policy.step(self._state, view, now, self._seen())
        if decision is not None:
            self._tasks.start(f"role flip of {decision.instance_id}", self._flip(decision))

    def held(self) -> Seen:
        """What people's flips forbid every policy, and the planner, at the moment."""
        return self._seen()

    def wanted(self) -> RolesWanted | None:
        """The roles that `predictive` would go for, whether it is in force or not; None while it cannot tell."""
        policy = self._policy if isinstance(self._policy, PredictiveFlip) else PredictiveFlip()
        return policy.wanted(self._view(), self._seen())

    def _follow(self, spec: PolicySpec) -> None:
        if spec != self._spec:
            self._spec = spec
            self._policy = registry.role_flip(spec.name, spec.parameters)
            self._state = self._policy.start()

    async def _flip(self, decision: FlipDecision) -> None:
        who = f"{POLICY}{self._policy.name}"
        asked = Asked(who, why=in_words(decision.reasons))
        try:
            await self._operations.flip(decision.instance_id, asked, force=False, drain_timeout_s=None)
        except PolyphaseError as error:  # the policy decides again when its conditions hold again
            log.warning("a flip failed", instance_id=decision.instance_id, who=who, error=error.message)


def seen_now(demand: Demand | None, audit: Audit, respects_s: float) -> Seen:
    """What a policy may know beside the loads; flips that people have ordered hold for `respects_s`."""
    now = time.time()
    return Seen.of(demand, _by_people(audit, now - respects_s), now, respects_s)


def _by_people(audit: Audit, since_s: float) -> Iterator[tuple[float, str, Role]]:
    """The flips that people have ordered since then and that were not refused and did not fail, newest first.

    Programs give reasons with theirs, people do not.
    """
    for row in audit.newest_first():
        if row["started_s"] < since_s:
            return
        if row["kind"] == "flip" and row["result"] in _STOOD and not row["why"]:
            yield row["started_s"], row["instance_id"], Role(row["to_role"])


def in_words(reasons: Iterable[Reason]) -> str:
    """Reasons as one line for the audit."""
    return "; ".join(
        f"{reason.what} ({', '.join(f'{name} {value}' for name, value in reason.figures.items())})"
        for reason in reasons
    )
