"""What can be asked of the planner: the question before, what runs meanwhile, what is said after."""

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dashboard.operations import Outcome, fate
from dashboard.plan.records import Flip, PlanSearch, Proposal
from dashboard.units import duration


class Act(StrEnum):
    """What can be done on the page Plan."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    AUTO_ON = "auto on"
    AUTO_OFF = "auto off"
    CANCEL = "cancel"
    SUBMIT = "submit"


@dataclass(frozen=True, slots=True)
class Wish:
    """Something that somebody wants. target: a proposal's or a search's id. words: what it is, for people."""

    act: Act
    target: str = ""
    words: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deed:
    """A confirmed wish, under way or ended."""

    wish: Wish
    future: "Future[None]"
    started_s: float = field(default_factory=time.time)
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    reference: str = ""

    def progress(self, left: Mapping[str, int]) -> str:
        """Nothing: the planner's lists tell."""
        return ""

    def outcome(self, now_s: float) -> Outcome:
        """What to tell of it at `now_s` (unix seconds)."""
        words = _WORDS[self.wish.act]
        if not self.future.done():
            return Outcome("running", f"{words.doing}: {duration(max(0.0, now_s - self.started_s))} so far.")
        state, said = fate(self.future.exception())
        texts = {
            "succeeded": words.done,
            "unknown": f"{words.doing}: whether it was done is unknown, the lists below tell. {said}",
            "refused": f"{words.doing} was refused by the planner: {said}",
            "failed": f"{words.doing} failed: {said}",
        }
        return Outcome(state, texts[state])


def accept(proposal: Proposal) -> Wish:
    """The wish to have a proposal carried out."""
    return Wish(Act.ACCEPT, proposal.proposal_id, changes(proposal))


def refuse(proposal: Proposal) -> Wish:
    """The wish that a proposal is not carried out."""
    return Wish(Act.REFUSE, proposal.proposal_id, changes(proposal))


def cancel(search: PlanSearch) -> Wish:
    """The wish to end a search."""
    return Wish(Act.CANCEL, search.plan_id)


def question(wish: Wish) -> str:
    """The one question to say yes or no to."""
    return _WORDS[wish.act].question


def consequences(wish: Wish) -> str:
    """What will happen after a yes."""
    told = _WORDS[wish.act].follows
    return f"**{wish.words}**\n\n{told}" if wish.words else told


def changes(proposal: Proposal) -> str:
    """What a proposal would change, in words."""
    routes = "new routes" if proposal.changes_routes else ""
    return "; ".join(filter(None, (flip_words(proposal.flips), routes))) or "nothing changes"


def flip_words(flips: Sequence[Flip]) -> str:
    """Each flip in words; empty without any."""
    return ", ".join(f"{flip.instance_id} from {flip.from_role} to {flip.to_role}" for flip in flips)


@dataclass(frozen=True, slots=True)
class _Words:
    question: str
    follows: str
    doing: str
    done: str


_WORDS = {
    Act.ACCEPT: _Words(
        "Carry out this proposal?",
        "Each instance that changes its role is drained first; requests go on meanwhile.",
        "Accepting the proposal",
        "The proposal is accepted; its steps are told below.",
    ),
    Act.REFUSE: _Words(
        "Refuse this proposal?",
        "Nothing changes, and the same is not proposed again for a while.",
        "Refusing the proposal",
        "The proposal is refused.",
    ),
    Act.AUTO_ON: _Words(
        "Apply proposals without asking?",
        "From now on the planner flips instances and changes routes by itself when it expects enough of that.",
        "Turning auto on",
        "Auto is on: proposals are applied without asking.",
    ),
    Act.AUTO_OFF: _Words(
        "Ask before each proposal?",
        "What is being applied goes on; whatever is proposed from now on waits for a yes.",
        "Turning auto off",
        "Auto is off: proposals wait for a yes.",
    ),
    Act.CANCEL: _Words(
        "End this search?",
        "The best that it has found so far is its result.",
        "Ending the search",
        "The search is told to end.",
    ),
    Act.SUBMIT: _Words(
        "Search for a plan?",
        "The planner's processor is busy with it for up to some minutes; the running cluster is not changed.",
        "Submitting the search",
        "The search is submitted; it is in the list of searches.",
    ),
}
