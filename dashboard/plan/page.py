"""The page Plan from top to bottom. All of it refreshes itself, but for an open question."""

import time

import streamlit as st

from dashboard import look, resources, units
from dashboard.confirm import results
from dashboard.dashboard_settings import DashboardSettings
from dashboard.panels import outage
from dashboard.plan.in_force import in_force
from dashboard.plan.plan_session import PlanSession
from dashboard.plan.planner import Planner, PlanSnapshot
from dashboard.plan.proposals import auto, proposals
from dashboard.plan.question import Submit, ask
from dashboard.plan.searches import searches
from dashboard.plan.what_if import what_if

NOT_THERE = (
    "No planner is configured: POLYPHASE_DASHBOARD_PLANNER_URL is empty. With one, this page shows the plan in force, "
    "what it should do, and what would be better."
)


def plan(settings: DashboardSettings) -> None:
    """One run of the page: it was opened, or a question was answered."""
    if not settings.planner_url:
        _header("", settings)
        st.html(look.empty(NOT_THERE))
        return
    planner, session, submit = resources.planner(settings), PlanSession(), resources.pool().submit
    ask(session, planner, submit)
    st.fragment(_live, run_every=settings.refresh_s)(planner, session, submit)


def _live(planner: Planner, session: PlanSession, submit: Submit) -> None:
    """All that refreshes; runs alone every few seconds and after each click in it."""
    if session.intent is not None and not session.asking:
        st.rerun()  # the question is asked outside of this fragment, so that no refresh can take it away
    snapshot, settings, now_s = planner.snapshot(), planner.settings, time.time()
    _header(look.dot("planner", look.BAD if snapshot.error else look.GOOD, snapshot.error or "answers"), settings)
    _outage(snapshot, settings, now_s)
    auto(snapshot.fleet, session)
    results(session, now_s)
    in_force(snapshot.fleet)
    proposals(snapshot.proposals, session, now_s)
    what_if(snapshot.fleet, session, planner, submit, now_s)
    searches(snapshot.searches, session, planner, now_s)


def _header(dots: str, settings: DashboardSettings) -> None:
    live = look.soft(f"refreshed every {units.duration(settings.refresh_s)}") if dots else ""
    parts = f"<b>Polyphase</b>{look.soft('Plan')}<span class='pp-services'>{dots}{live}</span>"
    st.html(look.page(f'<div class="pp-head">{parts}</div>'))


def _outage(snapshot: PlanSnapshot, settings: DashboardSettings, now_s: float) -> None:
    if snapshot.error:
        meaning = "Proposals, searches and what-ifs wait until it answers. Serving goes on without it."
        outage("The planner", settings.planner_url, snapshot.error, meaning, snapshot.known_s, now_s)
