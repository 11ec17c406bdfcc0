"""Actions on the planner: the client of its HTTP API, the confirmation, the running operation and its outcome, and
what a browser session remembers of the Plan page.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, cast

import msgspec
import streamlit as st

from dashboard.accounts import Account
from dashboard.console import Console
from dashboard.data import Api
from dashboard.operations import Acting, Outcome, fate
from dashboard.plan.records import Fleet, Flip, PlanSearch, Proposal, WhatIf
from dashboard.reads import Read
from dashboard.units import duration
from shared.errors import Unavailable


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


@dataclass(frozen=True, slots=True)
class Supposed:
    """A what-if that was asked, and its answer when it comes. asked_s: unix seconds."""

    change: Mapping[str, Any]
    future: "Future[WhatIf]"
    asked_s: float


class PlanSession(Acting[Wish, Deed]):
    """Streamlit's session state of this page, by name and type."""

    def __init__(self, may_operate: bool = True) -> None:
        super().__init__("plan_")
        self.may_operate = may_operate

    def busy(self, target: str) -> bool:
        """Whether nothing can be done with a proposal or a search: something is under way, or one may only look."""
        return not self.may_operate or any(
            deed.wish.target == target and not deed.future.done() for deed in self.operations
        )

    @property
    def supposed(self) -> Supposed | None:
        """The last what-if."""
        return cast("Supposed | None", st.session_state.get("plan_supposed"))

    @supposed.setter
    def supposed(self, value: Supposed | None) -> None:
        st.session_state["plan_supposed"] = value

    @property
    def search(self) -> PlanSearch | None:
        """The search on the screen, with its file; ended ones do not change."""
        return cast("PlanSearch | None", st.session_state.get("plan_search"))

    @search.setter
    def search(self, value: PlanSearch) -> None:
        st.session_state["plan_search"] = value


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """Everything on the page, read at about one moment."""

    fleet: Read[Fleet]
    proposals: Read[list[Proposal]]
    searches: Read[list[PlanSearch]]


class Planner:
    """One planner, for callers in threads. One per process."""

    def __init__(self, api: Api) -> None:
        self.settings = api.settings
        self._api, self._hub, self._client = api, api.hub, api.hub.clients.planner

    def snapshot(self) -> PlanSnapshot:
        """Read all there is on the page."""
        shown, fresh_s = self.settings, self._api.fresh_s
        newest = partial(self._client.proposals, shown.proposals_shown)
        latest = partial(self._client.plans, shown.searches_shown)
        fleet: Future[Read[Fleet]] = self._hub.ask("fleet", self._client.fleet, Fleet, fresh_s)
        proposals: Future[Read[list[Proposal]]] = self._hub.ask("proposals", newest, list[Proposal], fresh_s)
        searches: Future[Read[list[PlanSearch]]] = self._hub.ask("plans", latest, list[PlanSearch], fresh_s)
        return PlanSnapshot(fleet.result(), proposals.result(), searches.result())

    def search(self, plan_id: str) -> Read[PlanSearch]:
        """One search, with its cluster file."""
        call = partial(self._client.plan, plan_id)
        return self._hub.ask(f"plan {plan_id}", call, PlanSearch, self._api.fresh_s).result()

    def what_if(self, change: Mapping[str, Any]) -> WhatIf:
        """What a changed cluster or demand would do. Raises what the planner refuses or fails with."""
        try:
            return msgspec.convert(self._hub.run(self._client.what_if(change)).result(), WhatIf)
        except ValueError as error:  # not JSON, or not of the kind
            raise Unavailable(f"the planner's answer was not understood: {error}") from error

    def act(self, wish: Wish, account: Account) -> None:
        """Have it done. Raises what the planner refuses or fails with, and as `Api.allow`."""
        self._api.allow(account)
        try:
            self._hub.run(self._act(wish, account.name)).result()
        finally:
            self._hub.forget()

    async def _act(self, wish: Wish, name: str) -> None:
        client = self._client
        match wish.act:
            case Act.ACCEPT:
                await client.accept(wish.target, who=name)
            case Act.REFUSE:
                await client.refuse(wish.target, who=name)
            case Act.AUTO_ON | Act.AUTO_OFF:
                await client.set_auto(wish.act is Act.AUTO_ON, who=name)
            case Act.CANCEL:
                await client.cancel(wish.target, who=name)
            case Act.SUBMIT:
                await client.submit(wish.body, who=name)


def ask(session: PlanSession, planner: Planner, console: Console) -> None:
    """Put the waiting question on the screen. Auto-refreshes run beside it and leave it alone."""
    wish = session.intent
    if wish is None:
        return
    session.asking = True
    st.dialog(question(wish), on_dismiss=session.drop_intent)(_body)(session, planner, console, wish)


def _body(session: PlanSession, planner: Planner, console: Console, wish: Wish) -> None:
    st.write(consequences(wish))
    with st.container(horizontal=True, horizontal_alignment="right"):
        answered = st.button("Cancel", key="cancel", on_click=session.drop_intent)
        act = (session, planner, console, wish)
        answered |= st.button("Confirm", key="confirm", type="primary", on_click=_act, args=act)
    if answered:
        st.rerun()


def _act(session: PlanSession, planner: Planner, console: Console, wish: Wish) -> None:
    if session.settle(wish):
        session.add(Deed(wish, console.submit(planner.act, wish, console.account)))
