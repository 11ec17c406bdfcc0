"""All proposals: at most one is open or being carried out; decisions of people, and what is kept of them."""

import asyncio
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Tally
from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.settings import PlannerSettings
from shared.domain.instance import ClusterView, InstanceState, Role
from shared.domain.route import PolicySpec
from shared.errors import Conflict, InvalidRequest, NotFound, OutcomeUnknown, PolyphaseError, Unavailable
from shared.plan.running import Expected, Finding, Flip
from shared.policy.placement_policies import PlanRoute
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.store.reading import read_proposals
from shared.store.tables import proposals as table
from shared.store.write_behind import WriteBehind
from shared.wire.clients.monitor import SLACK_S, MonitorClient

# MERGED proposal.py
# A proposal: other roles and routes for the running cluster, why, what is expected of them, and what became of it.


class Cause(StrEnum):
    """What made the planner look."""

    LOSS = "loss"
    RETURN = "return"  # or somebody new
    SHIFT = "shift"
    REVIEW = "review"  # nothing in particular: it looks every now and then
    ASKED = "asked"


class ProposalState(StrEnum):
    """How a proposal stands."""

    OPEN = "open"
    APPLYING = "applying"
    APPLIED = "applied"
    FAILED = "failed"  # a step did not succeed; those before it stand
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"  # the situation changed before anybody decided


class Step(msgspec.Struct, frozen=True):
    """What was done of it: a flip or the change of routes. at_s: its end, unix seconds."""

    at_s: float
    what: str
    ok: bool
    text: str = ""


class Proposal(msgspec.Struct, frozen=True):
    """Times are unix seconds. noticed_s: when what caused it was noticed. took_s: for thinking, of that time."""

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
    steps: tuple[Step, ...] = ()
    error: str = ""

    @classmethod
    def of(cls, finding: Finding, cause: Cause, what: str, noticed_s: float, took_s: float, now_s: float) -> "Proposal":
        """An open one. what: happened, in words; may be empty."""
        why = f"{what}: {finding.why}" if what else finding.why
        flips, routes, changes = finding.flips, finding.routes, finding.changes_routes
        said = (cause, why, flips, routes, changes, finding.now, finding.then, now_s, noticed_s, took_s)
        return cls(ProposalState.OPEN, *said)

    @property
    def changes(self) -> tuple[frozenset[Flip], bool]:
        """What tells it from another: the flips, and whether routes change; not by how much."""
        return frozenset(self.flips), self.changes_routes


log = get_log(__name__)
KEPT = 200
STANDS_S = 60.0  # for so long no mere review turns back what was turned
_NEWS = (Cause.LOSS, Cause.RETURN, Cause.SHIFT, Cause.ASKED)


class Proposals:
    """The newest in memory, all of them in the database. `on_change` is told of each that has another state."""

    def __init__(
        self,
        store: WriteBehind,
        registry: CollectorRegistry,
        hold_s: float,
        on_change: Callable[[Proposal], None] = lambda _: None,
    ) -> None:
        self._on_change = on_change
        self._store = store
        self._hold_s = hold_s
        self._all: OrderedDict[str, Proposal] = OrderedDict()  # oldest first
        self._counted = Tally(
            "polyphase_plan_proposals", "Proposals of the planner, by what became of them", ["state"], registry=registry
        )

    async def recall(self, engine: AsyncEngine) -> None:
        """Read those of a former life. What was being carried out then has failed. Raises Unavailable."""
        for row in await read_proposals(engine, KEPT):  # newest first
            if row["proposal_id"] in self._all:
                continue
            try:
                known = msgspec.json.decode(row["content"], type=Proposal)
            except msgspec.MsgspecError as error:  # written by another version
                log.warning("a proposal was not understood", proposal_id=row["proposal_id"], error=str(error))
                continue
            if known.state is ProposalState.APPLYING:
                self._keep(self._became(known, ProposalState.FAILED, error="the planner ended meanwhile"))
            elif known.state is ProposalState.OPEN:
                self._keep(self._became(known, ProposalState.WITHDRAWN, error="the planner was started again"))
            else:
                self._all[known.proposal_id] = known
            self._all.move_to_end(known.proposal_id, last=False)

    def newest(self, limit: int) -> list[Proposal]:
        """Newest first."""
        return list(islice(reversed(self._all.values()), limit))

    def get(self, proposal_id: str) -> Proposal:
        """Raises NotFound."""
        found = self._all.get(proposal_id)
        if found is None:
            raise NotFound(f"no proposal {proposal_id!r}")
        return found

    @property
    def open(self) -> Proposal | None:
        """The one that waits for a decision."""
        return next((one for one in reversed(self._all.values()) if one.state is ProposalState.OPEN), None)

    @property
    def applying(self) -> Proposal | None:
        """The one that is being carried out."""
        return next((one for one in reversed(self._all.values()) if one.state is ProposalState.APPLYING), None)

    def make(self, proposal: Proposal) -> Proposal | None:
        """Put it in the place of the open one.

        None where it says the same as that, or as one that was refused or has failed not long ago. New facts (a loss,
        a return, a shift, a question) bring those back; a mere review does not.
        """
        open_one = self.open
        if open_one is not None and open_one.changes == proposal.changes and proposal.cause not in _NEWS:
            return None
        if proposal.cause not in _NEWS and self._in_vain(proposal):
            return None
        self.withdraw("another took its place")
        self._keep(proposal)
        self._counted.labels(proposal.state.value).inc()
        log.info("proposal", proposal_id=proposal.proposal_id, cause=proposal.cause.value, why=proposal.why)
        return proposal

    def withdraw(self, why: str) -> None:
        """The open one, if any, is no longer right."""
        if (open_one := self.open) is not None:
            self._keep(self._became(open_one, ProposalState.WITHDRAWN, error=why))

    def refuse(self, proposal_id: str, who: str) -> Proposal:
        """Raises NotFound, or Conflict where it is not open."""
        return self._keep(self._became(self.decidable(proposal_id), ProposalState.REFUSED, who=who))

    @property
    def turned_lately(self) -> frozenset[str]:
        """Instances that applied proposals have given another role not long ago."""
        since_s = time.time() - STANDS_S
        lately = (one for one in self._all.values() if one.state is ProposalState.APPLIED)
        return frozenset(flip.instance_id for one in lately if (one.decided_s or 0.0) >= since_s for flip in one.flips)

    def accept(self, proposal_id: str, who: str) -> Proposal:
        """It is carried out from now on. Raises NotFound; Conflict where it is not open or another is under way."""
        wanted = self.decidable(proposal_id)
        if (other := self.applying) is not None:
            raise Conflict(f"proposal {other.proposal_id} is being carried out")
        return self._keep(self._became(wanted, ProposalState.APPLYING, who=who))

    def note(self, proposal_id: str, step: Step) -> None:
        """A step of one that is being carried out has ended."""
        known = self.get(proposal_id)
        self._keep(msgspec.structs.replace(known, steps=(*known.steps, step)))

    def end(self, proposal_id: str, error: str = "") -> None:
        """It is carried out, or not."""
        state = ProposalState.FAILED if error else ProposalState.APPLIED
        known = self.get(proposal_id)
        self._keep(msgspec.structs.replace(self._became(known, state, error=error), who=known.who))

    def decidable(self, proposal_id: str) -> Proposal:
        """An open one. Raises NotFound, Conflict."""
        known = self.get(proposal_id)
        if known.state is not ProposalState.OPEN:
            raise Conflict(
                f"proposal {proposal_id} is {known.state.value}" + (f": {known.error}" if known.error else "")
            )
        return known

    def _in_vain(self, proposal: Proposal) -> bool:
        """Whether the same was refused, or went wrong, not long ago."""
        since_s = time.time() - self._hold_s
        return any(
            (one.state is ProposalState.REFUSED or (one.state is ProposalState.FAILED and one.steps))
            and (one.decided_s or 0.0) >= since_s
            and one.changes == proposal.changes
            for one in self._all.values()
        )

    def _became(self, known: Proposal, state: ProposalState, who: str = "", error: str = "") -> Proposal:
        self._counted.labels(state.value).inc()
        log.info("proposal decided", proposal_id=known.proposal_id, state=state.value, who=who, error=error)
        decided_s = known.decided_s or time.time()
        return msgspec.structs.replace(known, state=state, decided_s=decided_s, who=who or known.who, error=error)

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


# MERGED carry_out.py
# An accepted proposal is carried out by the monitor: flips with their drains, then the routes.


PLACEMENT = "plan"
MOST_WHY = 2_000  # characters of it that the monitor is given
ASK_S = 0.25  # between two questions how a flip ended whose answer was lost


async def carry_out(
    proposal: Proposal,
    ready: Mapping[Role, int],
    monitor: MonitorClient,
    drain_timeout_s: float,
    note: Callable[[Step], None],
) -> str:
    """Flip, and route when all flips have succeeded; what went wrong, in words, or nothing.

    ready: instances by role at the moment. Never raises an error of the monitor: each is a step that failed; what is
    under way then ends, and nothing more is begun.
    """
    flips = _Flips(proposal, ready, monitor, drain_timeout_s, note)
    failed = await flips.run()
    if failed:
        return "; ".join(failed)
    if proposal.changes_routes:
        call = monitor.set_policies({"placement": placement_of(proposal.routes)}, who=flips.who)
        return await _step("change the routes", call, note)
    return ""


def placement_of(routes: tuple[PlanRoute, ...]) -> PolicySpec:
    """Placement along these routes."""
    return PolicySpec(PLACEMENT, {"routes": [[one.prefill, one.decode, round(one.share, 4)] for one in routes]})


class _Flips:
    """The flips of one proposal.

    At most half of the instances of a role drain at once, so that the others serve, and nobody leaves a role as its
    last one while another is still to come to it. Where two are to change places, who computes prompts goes first:
    meanwhile the others compute their own.
    """

    def __init__(
        self,
        proposal: Proposal,
        ready: Mapping[Role, int],
        monitor: MonitorClient,
        drain_timeout_s: float,
        note: Callable[[Step], None],
    ) -> None:
        self.who = f"planner: proposal {proposal.proposal_id}, {proposal.who}"
        self._proposal = proposal
        self._ready = Counter(ready)
        self._most = {role: max(1, ready.get(role, 0) // 2) for role in Role}
        self._monitor = monitor
        self._drain_timeout_s = drain_timeout_s
        self._note = note
        self._waiting = sorted(proposal.flips, key=lambda one: ready.get(one.to_role, 0))
        self._running: dict[asyncio.Task[str], Flip] = {}

    async def run(self) -> list[str]:
        """Each in its turn; what went wrong, in words."""
        failed: list[str] = []
        async with asyncio.TaskGroup() as group:
            while self._running or (self._waiting and not failed):
                if not failed:
                    self._begin_all(group)
                if not self._running:
                    return [f"{self._waiting[0].instance_id} is the last that decodes"]
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    one, wrong = self._running.pop(task), task.result()
                    self._ready[one.from_role if wrong else one.to_role] += 1
                    failed += [wrong] if wrong else []
        return failed

    def _begin_all(self, group: asyncio.TaskGroup) -> None:
        for one in list(self._waiting):
            draining = sum(other.from_role is one.from_role for other in self._running.values())
            if self._ready[one.from_role] > 1 and draining < self._most[one.from_role]:
                self._begin(group, one, force=False)
        if not self._running and self._ready[Role.DECODE]:
            last = next((one for one in self._waiting if one.from_role is Role.PREFILL), None)
            if last is not None:
                self._begin(group, last, force=True)

    def _begin(self, group: asyncio.TaskGroup, one: Flip, *, force: bool) -> None:
        self._waiting.remove(one)
        self._ready[one.from_role] -= 1
        self._running[group.create_task(self._flip(one, force))] = one

    async def _flip(self, one: Flip, force: bool) -> str:
        what = f"flip {one.instance_id} to {one.to_role.value}"
        return await _step(what, self._answered(one, force), self._note)

    async def _answered(self, one: Flip, force: bool) -> dict[str, Any]:
        """How the flip went, even if the monitor was started again meanwhile. Raises the monitor's error."""
        try:
            return await self._monitor.flip(
                one.instance_id,
                force=force,
                drain_timeout_s=self._drain_timeout_s,
                who=self.who,
                why=self._proposal.why[:MOST_WHY],
                to=one.to_role,
            )
        except OutcomeUnknown as error:
            return await self._found_out(error)

    async def _found_out(self, lost: OutcomeUnknown) -> dict[str, Any]:
        until_s = time.monotonic() + self._drain_timeout_s + SLACK_S
        while time.monotonic() < until_s:
            await asyncio.sleep(ASK_S)
            try:
                told = await self._monitor.operation(lost.operation_id)
            except NotFound:
                raise lost from None
            except PolyphaseError:
                continue  # it is away: the deadline ends this
            if told["result"] == "succeeded":
                return told
            if told["result"] != "running":
                raise Unavailable(told["error"] or lost.message)
        raise lost


async def _step(what: str, call: Awaitable[dict[str, Any]], note: Callable[[Step], None]) -> str:
    try:
        answer = await call
    except PolyphaseError as error:
        note(Step(time.time(), what, False, error.message))
        return f"{what}: {error.message}"
    drain_s = answer.get("drain_s")
    note(Step(time.time(), what, True, f"drained in {drain_s:.2f} s" if drain_s is not None else ""))
    return ""


# MERGED decider.py
# Who decides on proposals: people, or nobody where they are applied by themselves; and their being carried out.

AUTO = "auto"  # who, where nobody was asked


class Decider:
    """auto: whether proposals are applied without being asked about; as the settings say until somebody changes it."""

    def __init__(
        self, settings: PlannerSettings, monitor: MonitorClient, proposals: Proposals, tasks: Background
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._proposals = proposals
        self._tasks = tasks
        self.auto = settings.auto
        self.view: ClusterView | None = None

    def heard(self, view: ClusterView) -> None:
        """A broadcast of the monitor."""
        self.view = view

    def set_auto(self, auto: bool, who: str) -> None:
        """An open proposal is applied, too, where it is switched on."""
        log.info("proposals are applied by themselves" if auto else "proposals wait for people", who=who)
        self.auto = auto
        if (waiting := self._proposals.open) is not None:
            self.proposed(waiting)

    def proposed(self, proposal: Proposal) -> None:
        """A new proposal: applied at once where nobody wants to be asked."""
        if self.auto and not self.why_not_auto:
            try:
                self.accept(proposal.proposal_id, AUTO)
            except PolyphaseError as error:  # another is under way
                log.info("left open", proposal_id=proposal.proposal_id, why=error.message)

    @property
    def why_not_auto(self) -> str:
        """Why nothing is applied by itself; empty when nothing speaks against it."""
        policy = self.view.policies.role_flip.name if self.view is not None else "off"
        return "" if policy == "off" else f"the policy role_flip: {policy} flips roles itself"

    def accept(self, proposal_id: str, who: str) -> Proposal:
        """Begin to carry it out. Raises NotFound; Conflict, also where the roles are others by now."""
        if misfit := self._misfit(self._proposals.decidable(proposal_id)):
            self._proposals.withdraw(misfit)
            raise Conflict(f"proposal {proposal_id} does not fit any more: {misfit}")
        accepted = self._proposals.accept(proposal_id, who)
        self._tasks.start(f"proposal {proposal_id}", self._carry_out(accepted))
        return accepted

    def _misfit(self, proposal: Proposal) -> str:
        """Why its flips are not what they were; empty when they are."""
        views = {one.instance_id: one for one in self.view.instances} if self.view is not None else {}
        for flip in proposal.flips:
            one = views.get(flip.instance_id)
            if one is None:
                return f"{flip.instance_id} is gone"
            if one.state is not InstanceState.READY or one.role is not flip.from_role:
                return f"{flip.instance_id} is {one.state.value} as a {one.role.value} instance"
        return ""

    async def _carry_out(self, proposal: Proposal) -> None:
        views = self.view.instances if self.view is not None else ()
        ready = Counter(one.role for one in views if one.state is InstanceState.READY)

        error = "the planner ended meanwhile"
        try:
            error = await carry_out(
                proposal,
                ready,
                self._monitor,
                self._settings.drain_timeout_s,
                lambda step: self._proposals.note(proposal.proposal_id, step),
            )
        finally:
            self._proposals.end(proposal.proposal_id, error)


# MERGED news.py
# What became of proposals, as events of the cluster: told to the monitor, later where it is away.

PERIOD_S = 1.0
MOST = 2_048  # characters of a text
_KINDS = {
    ProposalState.OPEN: "plan_proposed",
    ProposalState.APPLYING: "plan_accepted",
    ProposalState.REFUSED: "plan_refused",
    ProposalState.WITHDRAWN: "plan_withdrawn",
    ProposalState.APPLIED: "plan_applied",
    ProposalState.FAILED: "plan_failed",
}


class PlanNews:
    """Keeps the newest until the monitor has taken them, in order."""

    def __init__(self, monitor: MonitorClient) -> None:
        self._monitor = monitor
        self._waiting: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def became(self, proposal: Proposal) -> None:
        """A proposal has another state."""
        kind = _KINDS[proposal.state]
        said = [f"by {proposal.who}" if proposal.who else "", proposal.error or proposal.why]
        event = {
            "event_id": f"{proposal.proposal_id}:{kind}",
            "kind": kind,
            "text": (": ".join(part for part in said if part) or kind)[:MOST],
            "subject": proposal.proposal_id,
        }
        self._waiting.append(event)

    async def step(self) -> None:
        """Tell what waits."""
        while self._waiting:
            event = self._waiting[0]
            try:
                await self._monitor.happened(event)
            except InvalidRequest as error:
                log.error("an event was refused", kind=event["kind"], reason=error.message)
            except PolyphaseError:
                return  # it is away: later
            if self._waiting and self._waiting[0] is event:  # not pushed out meanwhile
                self._waiting.popleft()
