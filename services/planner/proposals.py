"""All proposals: at most one is open or being carried out; decisions of people, and what is kept of them."""

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import msgspec
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.proposal import Cause, Proposal, ProposalState, Step
from shared.errors import Conflict, NotFound
from shared.runtime.logs import get_log
from shared.store.reading import read_proposals
from shared.store.tables import proposals as table
from shared.store.write_behind import WriteBehind

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
        self._counted = Counter(
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
