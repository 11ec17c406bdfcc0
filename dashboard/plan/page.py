"""The Plan page from top to bottom, with the what-if form for lost or added instances and changed demand. The page
refreshes itself unless a confirmation is open.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard import frame, look, units
from dashboard.console import Console, Submit
from dashboard.frame import results
from dashboard.plan.in_force import NO_PLANNER, changes, in_force
from dashboard.plan.operations import Planner, PlanSession, PlanSnapshot, Supposed, ask
from dashboard.plan.picture import natural
from dashboard.plan.proposals import auto, flips, proposals
from dashboard.plan.records import Fleet, WhatIf
from dashboard.plan.searches import searches
from dashboard.reads import Read
from shared.domain.instance import Role
from shared.errors import PolyphaseError

FACTORS = {"rate_factor": "Request rate ×", "prompt_factor": "Prompt length ×", "output_factor": "Output length ×"}


def what_if(read: Read[Fleet], session: PlanSession, planner: Planner, submit: Submit, now_s: float) -> None:
    """The form, and the answer to what was asked last."""
    st.subheader("What if", anchor=False)
    fleet = read.value
    if fleet is None:
        st.html(look.empty(NO_PLANNER))
        return
    ids = sorted((one.instance_id for one in fleet.instances if not one.lost), key=natural)
    if not ids:
        st.html(look.empty("The planner knows of no instance that is there."))
        return
    _form(ids, session, planner, submit, read.stale)
    if session.supposed is not None:
        _answer(session.supposed, now_s)


def change_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the question, out of what the form's fields hold."""
    count = int(state.get("suppose_count", 0))
    added = [{"like": state["suppose_like"], "count": count, "role": state["suppose_role"]}] if count else []
    factors = {name: float(state.get(f"suppose_{name}", 1.0)) for name in FACTORS}
    return {"lost": list(state.get("suppose_lost", [])), "added": added, **factors}


def words(change: Mapping[str, Any]) -> str:
    """The question in words."""
    parts = [f"without {', '.join(change['lost'])}"] if change["lost"] else []
    parts += [f"{one['count']} more like {one['like']} as {one['role']}" for one in change["added"]]
    parts += [f"{said.lower()} {change[name]:g}" for name, said in FACTORS.items() if change[name] != 1.0]
    return "; ".join(parts) or "nothing changed"


def _form(ids: Sequence[str], session: PlanSession, planner: Planner, submit: Submit, stale: bool) -> None:
    with st.form("what-if", border=True):
        lost, count, like, role = st.columns([4, 1.3, 2, 1.7], gap="small")
        lost.multiselect("Lose instances", ids, key="suppose_lost", placeholder="none")
        count.number_input("Add", min_value=0, max_value=1000, step=1, key="suppose_count")
        like.selectbox("like instance", ids, key="suppose_like")
        role.selectbox("as", [role.value for role in Role], key="suppose_role")
        columns = st.columns([1.5, 1.5, 1.5, 4.5], gap="small", vertical_alignment="bottom")
        for column, (name, said) in zip(columns, FACTORS.items(), strict=False):
            column.number_input(
                said, min_value=0.01, max_value=100.0, value=1.0, step=0.1, format="%.2f", key=f"suppose_{name}"
            )
        columns[-1].form_submit_button(
            "Work it out", key="suppose", disabled=stale, on_click=_ask, args=(session, planner, submit)
        )


def _ask(session: PlanSession, planner: Planner, submit: Submit) -> None:
    change = change_of(st.session_state.to_dict())
    known = session.supposed
    if known is None or known.future.done() or known.change != change:
        session.supposed = Supposed(change, submit(planner.what_if, change), time.time())


def _answer(supposed: Supposed, now_s: float) -> None:
    asked = f"{look.strong(words(supposed.change).capitalize())} {look.soft(units.ago(supposed.asked_s, now_s))}"
    if not supposed.future.done():
        st.html(look.page(f"{asked} {look.soft('· being worked out …')}"))
        return
    error = supposed.future.exception()
    if error is not None:
        said = error.message if isinstance(error, PolyphaseError) else f"{type(error).__name__}: {error}"
        st.warning(f"What if {words(supposed.change)}: {said}", icon=":material/block:")
        return
    with st.container(key="what-if-answer"):
        st.html(look.page(f"<div>{asked}</div>", *_told(supposed.future.result())))


def _told(answer: WhatIf) -> list[str]:
    best = answer.best
    titles, columns = ["Now", "Then, roles as they are"], [answer.now, answer.then]
    if best is not None:
        titles, columns = [*titles, "Then, with the best flips"], [*columns, best.expected]
    parts = [changes(titles, columns)]
    if best is not None:
        what = flips(best.flips) if best.flips else look.text("none: the roles are best as they are")
        parts.append(look.below(f"{look.soft('Best flips:')} {what}"))
    if answer.why:
        parts.append(look.below(look.text(answer.why)))
    return parts


NOT_THERE = (
    "No planner is configured: POLYPHASE_DASHBOARD_PLANNER_URL is empty. With one, this page shows the plan in force, "
    "what it should do, and what would be better."
)


def plan(console: Console) -> None:
    """One run of the page: it was opened, or a question was answered."""
    if not console.settings.planner_url:
        frame.header(console, "Plan", [], every_s=frame.NEVER_S)
        st.html(look.empty(NOT_THERE))
        return
    planner, session = Planner(console.api), PlanSession(console.account.may_operate)
    ask(session, planner, console)
    st.fragment(_live, run_every=console.settings.refresh_s)(planner, session, console)


def _live(planner: Planner, session: PlanSession, console: Console) -> None:
    """All that refreshes; runs alone every few seconds and after each click in it."""
    snapshot, now_s = planner.snapshot(), time.time()
    frame.header(console, "Plan", [_service(snapshot, console)])
    auto(snapshot.fleet, session)
    results(session, console, now_s)
    in_force(snapshot.fleet)
    proposals(snapshot.proposals, session, now_s)
    what_if(snapshot.fleet, session, planner, console.submit_question, now_s)
    searches(snapshot.searches, session, planner, now_s)


def _service(snapshot: PlanSnapshot, console: Console) -> frame.Service:
    meaning = "Proposals, searches and what-ifs wait until it answers. Serving goes on without it."
    reads = (snapshot.fleet, snapshot.proposals, snapshot.searches)
    return frame.Service("planner", console.settings.planner_url, meaning, reads)
