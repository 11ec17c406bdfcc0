"""A proposal: other roles and routes for the running cluster, why, what is expected of them, and what became of it."""

import uuid
from enum import StrEnum

import msgspec

from shared.plan.review import Finding, Flip
from shared.plan.running import Expected
from shared.policy.plan_routes import PlanRoute


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
