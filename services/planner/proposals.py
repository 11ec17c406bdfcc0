"""Proposals of other roles and routes: their book, who decides on them, and how an accepted one is carried out.

`watch.Watch` makes proposals. At most one proposal is open, and at most one is being carried out.
`Decider` accepts a proposal for a person, or at once in mode `auto`, and has `carry_out` do it: each flip is requested
from the monitor with the origin `plan`, whose `RoleController` applies its rules; the routes follow.
"""

import asyncio
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from itertools import islice

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.settings import PlannerSettings
from shared.domain.instance import ClusterView, InstanceState, Role
from shared.domain.route import PolicySpec
from shared.errors import Conflict, InvalidRequest, NotFound, OutcomeUnknown, PolyphaseError, Unavailable
from shared.plan.running import Expected, Finding, Flip
from shared.policy.papers.thunderserve import PlanRoute
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.store.reading import read_proposals
from shared.store.tables import proposals as table
from shared.store.write_behind import WriteBehind
from shared.wire.api import EventKind, Operation, OperationResult, Origin
from shared.wire.api.monitor import PoliciesInForce
from shared.wire.api.planner import ProposalState, ProposalStep
from shared.wire.clients.monitor import SLACK_S, MonitorClient

log = get_log(__name__)
KEPT = 200  # proposals in memory, and events that wait for the monitor
STANDS_S = 60.0  # for so long a mere review does not reverse an applied flip
PLACEMENT = "plan"
AUTO = "auto"  # who accepts in mode auto
MAX_WHY = 2_000  # characters of the reasons that the monitor is given
MAX_TEXT = 2_048  # characters of an event's text
MAX_ERROR = 500  # characters of the text of a defect
POLL_S = 0.25  # between two questions how a flip ended whose answer was lost
PERIOD_S = 1.0  # between two attempts to report events


class Cause(StrEnum):
    """Why the planner reviewed the roles."""

    LOSS = "loss"
    RETURN = "return"  # of an instance, or a new one
    SHIFT = "shift"
    REVIEW = "review"  # its periodic review
    ASKED = "asked"


_NEW_FACTS = (Cause.LOSS, Cause.RETURN, Cause.SHIFT, Cause.ASKED)


class Proposal(msgspec.Struct, frozen=True):
    """Other roles and routes for the running cluster. Times are unix seconds.

    noticed_s: when its cause was noticed; took_s: the time that the review took. now, then: what is expected of the
    cluster as it is, and with the proposal.
    """

    state: ProposalState
    cause: Cause
    why: str
    flips: tuple[Flip, ...]
    routes: tuple[PlanRoute, ...]
    changes_routes: bool
    now: Expected
    then: Expected
    made_s: float
    noticed_s: float
    took_s: float
    proposal_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex[:12])
    decided_s: float | None = None
    who: str = ""
    steps: tuple[ProposalStep, ...] = ()
    error: str = ""

    @classmethod
    def from_finding(cls, finding: Finding, cause: Cause, news: str, noticed_s: float, took_s: float) -> "Proposal":
        """An open proposal. news: what has happened, as text; may be empty."""
        return cls(
            state=ProposalState.OPEN,
            cause=cause,
            why=f"{news}: {finding.why}" if news else finding.why,
            flips=finding.flips,
            routes=finding.routes,
            changes_routes=finding.changes_routes,
            now=finding.now,
            then=finding.then,
            made_s=time.time(),
            noticed_s=noticed_s,
            took_s=took_s,
        )

    def changes_like(self, other: "Proposal") -> bool:
        """Whether both have the same flips, and both or neither change routes, by however much."""
        return (frozenset(self.flips), self.changes_routes) == (frozenset(other.flips), other.changes_routes)


class Proposals:
    """The newest proposals in memory, all of them in the database. `on_change` is called with each new state."""

    def __init__(
        self,
        store: WriteBehind,
        metrics: CollectorRegistry,
        hold_s: float,
        on_change: Callable[[Proposal], None] = lambda _: None,
    ) -> None:
        self._on_change = on_change
        self._store = store
        self._hold_s = hold_s
        self._all: OrderedDict[str, Proposal] = OrderedDict()  # oldest first
        self._counted = PrometheusCounter(
            "polyphase_plan_proposals", "Proposals of the planner, by what became of them", ["state"], registry=metrics
        )

    async def recall(self, engine: AsyncEngine) -> None:
        """Read the proposals of earlier planner processes; unfinished ones end. Raises Unavailable."""
        for row in await read_proposals(engine, KEPT):  # newest first
            if row.proposal_id in self._all:
                continue
            try:
                known = msgspec.json.decode(row.content, type=Proposal)
            except msgspec.MsgspecError as error:  # written by another version
                log.warning("a proposal was not understood", proposal_id=row.proposal_id, error=str(error))
                continue
            self._all[known.proposal_id] = known
            self._all.move_to_end(known.proposal_id, last=False)
            if known.state is ProposalState.APPLYING:
                self._change_state(known, ProposalState.FAILED, error="the planner ended meanwhile")
            elif known.state is ProposalState.OPEN:
                self._change_state(known, ProposalState.WITHDRAWN, error="the planner was restarted")

    def newest(self, limit: int) -> list[Proposal]:
        """The newest first."""
        return list(islice(reversed(self._all.values()), limit))

    def get(self, proposal_id: str) -> Proposal:
        """Raises NotFound."""
        found = self._all.get(proposal_id)
        if found is None:
            raise NotFound(f"no proposal {proposal_id!r}")
        return found

    @property
    def open(self) -> Proposal | None:
        """The proposal that waits for a decision."""
        return self._newest_in(ProposalState.OPEN)

    @property
    def applying(self) -> Proposal | None:
        """The proposal that is being carried out."""
        return self._newest_in(ProposalState.APPLYING)

    @property
    def flipped_lately(self) -> frozenset[str]:
        """Instances that applied proposals have given another role not long ago."""
        since_s = time.time() - STANDS_S
        lately = (one for one in self._all.values() if one.state is ProposalState.APPLIED)
        return frozenset(flip.instance_id for one in lately if (one.decided_s or 0.0) >= since_s for flip in one.flips)

    def make(self, proposal: Proposal) -> Proposal | None:
        """Open a proposal in place of the open one.

        None where a mere review repeats the open proposal, or one that was refused or has failed not long ago. New
        facts (a loss, a return, a shift, a request) bring those back.
        """
        if proposal.cause not in _NEW_FACTS and (self._repeats_open(proposal) or self._failed_lately(proposal)):
            return None
        self.withdraw("another proposal took its place")
        self._keep(proposal)
        self._counted.labels(proposal.state.value).inc()
        log.info("proposal", proposal_id=proposal.proposal_id, cause=proposal.cause.value, why=proposal.why)
        return proposal

    def withdraw(self, why: str) -> None:
        """End the open proposal, if there is one."""
        if (open_one := self.open) is not None:
            self._change_state(open_one, ProposalState.WITHDRAWN, error=why)

    def refuse(self, proposal_id: str, who: str) -> Proposal:
        """Raises NotFound, or Conflict where it is not open."""
        return self._change_state(self.decidable(proposal_id), ProposalState.REFUSED, who=who)

    def accept(self, proposal_id: str, who: str) -> Proposal:
        """It is being carried out from now on. Raises NotFound; Conflict where it is not open or another one is."""
        wanted = self.decidable(proposal_id)
        if (other := self.applying) is not None:
            raise Conflict(f"proposal {other.proposal_id} is being carried out")
        return self._change_state(wanted, ProposalState.APPLYING, who=who)

    def note(self, proposal_id: str, step: ProposalStep) -> None:
        """A step of the proposal has ended."""
        known = self.get(proposal_id)
        self._keep(msgspec.structs.replace(known, steps=(*known.steps, step)))

    def end(self, proposal_id: str, error: str = "") -> None:
        """The proposal was carried out, or failed."""
        self._change_state(self.get(proposal_id), ProposalState.FAILED if error else ProposalState.APPLIED, error=error)

    def decidable(self, proposal_id: str) -> Proposal:
        """An open proposal. Raises NotFound, Conflict."""
        known = self.get(proposal_id)
        if known.state is not ProposalState.OPEN:
            raise Conflict(
                f"proposal {proposal_id} is {known.state.value}" + (f": {known.error}" if known.error else "")
            )
        return known

    def _newest_in(self, state: ProposalState) -> Proposal | None:
        return next((one for one in reversed(self._all.values()) if one.state is state), None)

    def _repeats_open(self, proposal: Proposal) -> bool:
        return (open_one := self.open) is not None and open_one.changes_like(proposal)

    def _failed_lately(self, proposal: Proposal) -> bool:
        """Whether the same changes were refused, or went wrong, not long ago."""
        since_s = time.time() - self._hold_s
        return any(
            (one.state is ProposalState.REFUSED or (one.state is ProposalState.FAILED and one.steps))
            and (one.decided_s or 0.0) >= since_s
            and one.changes_like(proposal)
            for one in self._all.values()
        )

    def _change_state(self, known: Proposal, state: ProposalState, who: str = "", error: str = "") -> Proposal:
        self._counted.labels(state.value).inc()
        log.info("proposal decided", proposal_id=known.proposal_id, state=state.value, who=who, error=error)
        decided_s, who = known.decided_s or time.time(), who or known.who
        return self._keep(msgspec.structs.replace(known, state=state, decided_s=decided_s, who=who, error=error))

    def _keep(self, proposal: Proposal) -> Proposal:
        known = self._all.get(proposal.proposal_id)
        self._all[proposal.proposal_id] = proposal
        if known is None or known.state is not proposal.state:
            self._on_change(proposal)
        while len(self._all) > KEPT:
            self._all.popitem(last=False)
        row = {
            "proposal_id": proposal.proposal_id,
            "state": proposal.state.value,
            "made_s": proposal.made_s,
            "content": msgspec.json.encode(proposal).decode(),
        }
        self._store.put(table, row)
        return proposal


class Decider:
    """Accepts proposals. auto: whether each is accepted at once; as the settings say until somebody changes it."""

    def __init__(
        self, settings: PlannerSettings, monitor: MonitorClient, proposals: Proposals, tasks: Background
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._proposals = proposals
        self._tasks = tasks
        self.auto = settings.auto
        self.view: ClusterView | None = None  # of the monitor's latest broadcast

    def set_auto(self, auto: bool, who: str) -> None:
        """Switch the mode; an open proposal is accepted, too, when `auto` is switched on."""
        log.info("mode changed: " + ("proposals are applied at once" if auto else "proposals wait for people"), who=who)
        self.auto = auto
        if (waiting := self._proposals.open) is not None:
            self.proposed(waiting)

    def proposed(self, proposal: Proposal) -> None:
        """There is a new proposal."""
        if self.auto and not self.why_not_auto:
            try:
                self.accept(proposal.proposal_id, AUTO)
            except PolyphaseError as error:  # another one is being carried out
                log.info("left open", proposal_id=proposal.proposal_id, why=error.message)

    @property
    def why_not_auto(self) -> str:
        """Why mode `auto` accepts nothing; empty where it may."""
        policy = self.view.policies.role_flip.name if self.view is not None else "off"
        return "" if policy == "off" else f"the policy role_flip: {policy} flips roles itself"

    def accept(self, proposal_id: str, who: str) -> Proposal:
        """Begin to carry a proposal out. Raises NotFound; Conflict, also where the roles are others by now."""
        if mismatch := self._mismatch(self._proposals.decidable(proposal_id)):
            self._proposals.withdraw(mismatch)
            raise Conflict(f"proposal {proposal_id} does not fit any more: {mismatch}")
        accepted = self._proposals.accept(proposal_id, who)
        self._tasks.start(f"proposal {proposal_id}", self._carry_out(accepted))
        return accepted

    def _mismatch(self, proposal: Proposal) -> str:
        """Why its flips are not possible any more; empty when they are."""
        for flip in proposal.flips:
            view = self.view.get(flip.instance_id) if self.view is not None else None
            if view is None:
                return f"{flip.instance_id} is gone"
            if view.state is not InstanceState.READY or view.role is not flip.from_role:
                return f"{flip.instance_id} is {view.state.value} as a {view.role.value} instance"
        return ""

    async def _carry_out(self, proposal: Proposal) -> None:
        ready = {role: len(self.view.ready(role)) if self.view is not None else 0 for role in Role}
        error = "the planner ended meanwhile"  # if this task is cancelled
        try:
            error = await carry_out(
                proposal,
                ready,
                self._monitor,
                self._settings.drain_timeout_s,
                lambda step: self._proposals.note(proposal.proposal_id, step),
            )
        except Exception as defect:  # ends the process; the proposal keeps the cause
            error = in_words(defect)
            raise
        finally:
            self._proposals.end(proposal.proposal_id, error)


async def carry_out(
    proposal: Proposal,
    ready: Mapping[Role, int],
    monitor: MonitorClient,
    drain_timeout_s: float,
    note: Callable[[ProposalStep], None],
) -> str:
    """Have the monitor make the flips and, when all have succeeded, change the routes. Returns what went wrong, or "".

    ready: instances by role at the moment. An error of the monitor is a step that failed: what is under way then ends,
    and nothing more is begun.
    """
    who = f"planner: proposal {proposal.proposal_id}, {proposal.who}"

    async def flip(wanted: Flip, force: bool) -> str:
        call = _flip(monitor, wanted, force, drain_timeout_s, who, proposal.why[:MAX_WHY])
        return await _step(f"flip {wanted.instance_id} to {wanted.to_role.value}", call, note)

    if failed := await _FlipOrder(proposal.flips, ready, flip).run():
        return "; ".join(failed)
    if proposal.changes_routes:
        routes = [[route.prefill, route.decode, round(route.share, 4)] for route in proposal.routes]
        call = monitor.set_policies({"placement": PolicySpec(PLACEMENT, {"routes": routes})}, who=who)
        return await _step("change the routes", call, note)
    return ""


def in_words(defect: Exception) -> str:
    """A defect of the planner as the reason for the end of a proposal."""
    cause: BaseException = defect
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return f"the planner itself failed: {type(cause).__name__}: {cause}"[:MAX_ERROR]


class _FlipOrder:
    """Makes several flips so that the cluster goes on serving.

    At most half of the instances of a role drain at once, and the last instance of a role leaves it only when no other
    one is still to come to it. Where two are to change places, the prefill instance goes first: meanwhile the decode
    instances compute their own prompts.
    """

    def __init__(
        self, flips: tuple[Flip, ...], ready: Mapping[Role, int], flip: Callable[[Flip, bool], Awaitable[str]]
    ) -> None:
        self._flip = flip
        self._ready = Counter(ready)
        self._max_draining = {role: max(1, ready.get(role, 0) // 2) for role in Role}
        self._waiting = sorted(flips, key=lambda one: ready.get(one.to_role, 0))
        self._running: dict[asyncio.Task[str], Flip] = {}

    async def run(self) -> list[str]:
        """Returns what went wrong."""
        failed: list[str] = []
        async with asyncio.TaskGroup() as group:
            while self._running or (self._waiting and not failed):
                if not failed:
                    self._begin_all(group)
                if not self._running:
                    return [f"{self._waiting[0].instance_id} is the last that decodes"]
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    flip, error = self._running.pop(task), task.result()
                    self._ready[flip.from_role if error else flip.to_role] += 1
                    failed += [error] if error else []
        return failed

    def _begin_all(self, group: asyncio.TaskGroup) -> None:
        for flip in list(self._waiting):
            draining = sum(other.from_role is flip.from_role for other in self._running.values())
            if self._ready[flip.from_role] > 1 and draining < self._max_draining[flip.from_role]:
                self._begin(group, flip, force=False)
        if not self._running and self._ready[Role.DECODE]:
            last_prefill = next((flip for flip in self._waiting if flip.from_role is Role.PREFILL), None)
            if last_prefill is not None:
                self._begin(group, last_prefill, force=True)

    def _begin(self, group: asyncio.TaskGroup, flip: Flip, *, force: bool) -> None:
        async def run() -> str:
            return await self._flip(flip, force)

        self._waiting.remove(flip)
        self._ready[flip.from_role] -= 1
        self._running[group.create_task(run())] = flip


async def _flip(
    monitor: MonitorClient, flip: Flip, force: bool, drain_timeout_s: float, who: str, why: str
) -> Operation:
    """The operation that the monitor carried out, even if the monitor was restarted meanwhile. Raises its error."""
    try:
        return await monitor.flip(
            flip.instance_id,
            force=force,
            drain_timeout_s=drain_timeout_s,
            who=who,
            why=why,
            origin=Origin.PLAN,
            to=flip.to_role,
        )
    except OutcomeUnknown as lost:
        until_mono = time.monotonic() + drain_timeout_s + SLACK_S
        while time.monotonic() < until_mono:
            await asyncio.sleep(POLL_S)
            try:
                operation = await monitor.operation(lost.operation_id)
            except NotFound:
                break
            except PolyphaseError:
                continue  # the monitor is away: the deadline ends this
            if operation.result is OperationResult.SUCCEEDED:
                return operation
            if operation.result is not OperationResult.RUNNING:
                raise Unavailable(operation.error or lost.message) from lost
        raise


async def _step(what: str, call: Awaitable[Operation | PoliciesInForce], note: Callable[[ProposalStep], None]) -> str:
    try:
        answer = await call
    except PolyphaseError as error:
        note(ProposalStep(time.time(), what, False, error.message))
        return f"{what}: {error.message}"
    drain_s = answer.drain_s if isinstance(answer, Operation) else None
    note(ProposalStep(time.time(), what, True, f"drained in {drain_s:.2f} s" if drain_s is not None else ""))
    return ""


EVENTS = {
    ProposalState.OPEN: EventKind.PLAN_PROPOSED,
    ProposalState.APPLYING: EventKind.PLAN_ACCEPTED,
    ProposalState.REFUSED: EventKind.PLAN_REFUSED,
    ProposalState.WITHDRAWN: EventKind.PLAN_WITHDRAWN,
    ProposalState.APPLIED: EventKind.PLAN_APPLIED,
    ProposalState.FAILED: EventKind.PLAN_FAILED,
}


class ProposalEvents:
    """New states of proposals, as events of the cluster: the newest wait until the monitor accepts them."""

    def __init__(self, monitor: MonitorClient) -> None:
        self._monitor = monitor
        self._waiting: deque[dict[str, str]] = deque(maxlen=KEPT)

    def record(self, proposal: Proposal) -> None:
        """Report the new state of a proposal."""
        kind = EVENTS[proposal.state].value
        parts = [f"by {proposal.who}" if proposal.who else "", proposal.error or proposal.why]
        event = {
            "event_id": f"{proposal.proposal_id}:{kind}",
            "kind": kind,
            "text": (": ".join(part for part in parts if part) or kind)[:MAX_TEXT],
            "subject": proposal.proposal_id,
        }
        self._waiting.append(event)

    async def step(self) -> None:
        """Report the events that wait."""
        while self._waiting:
            event = self._waiting[0]
            try:
                await self._monitor.report_event(event)
            except InvalidRequest as error:
                log.error("an event was refused", kind=event["kind"], reason=error.message)
            except PolyphaseError:
                return  # the monitor is away: later
            if self._waiting and self._waiting[0] is event:  # it was not pushed out meanwhile
                self._waiting.popleft()
