"""The page Plan from top to bottom. All of it refreshes itself, but for an open question."""

import time

import streamlit as st

from dashboard import frame, look
from dashboard.confirm import results
from dashboard.console import Console
from dashboard.plan.in_force import in_force
from dashboard.plan.plan_session import PlanSession
from dashboard.plan.planner import Planner, PlanSnapshot
from dashboard.plan.proposals import auto, proposals
from dashboard.plan.question import ask
from dashboard.plan.searches import searches
from dashboard.plan.what_if import what_if

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
