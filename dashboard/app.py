"""The pages: `streamlit run dashboard/app.py`. All of them refresh themselves, but for an open question."""

import time
from pathlib import Path

import streamlit as st
from pydantic import ValidationError

from dashboard import look, resources
from dashboard.clients import classes, demand
from dashboard.confirm import ask, results
from dashboard.dashboard_settings import DashboardSettings
from dashboard.data import Api
from dashboard.instances import instances
from dashboard.jobs import chosen_phase, jobs
from dashboard.output_lengths import output_lengths
from dashboard.panels import audit, events, header, outages, slo, totals
from dashboard.session import Session
from shared.errors import InvalidRequest

PLAN = Path(__file__).with_name("plan_page.py")


def main() -> None:
    """One run of the script: a new session, another page, or an answered question."""
    st.set_page_config(page_title="Polyphase", page_icon=":material/lan:", layout="wide")
    st.html(look.STYLE)
    try:
        settings = DashboardSettings.load()
    except (InvalidRequest, ValidationError) as error:
        st.error(f"**The dashboard's settings cannot work.**\n\n```text\n{error}\n```")
        return

    def cluster() -> None:
        _cluster(settings)

    pages = [
        st.Page(cluster, title="Cluster", icon=":material/lan:", default=True),
        st.Page(PLAN, title="Plan", icon=":material/route:", url_path="plan"),
    ]
    st.navigation(pages, position="top").run()


def _cluster(settings: DashboardSettings) -> None:
    api, session = resources.api(settings), Session()
    ask(session, api, resources.pool().submit)
    st.fragment(_live, run_every=settings.refresh_s)(api, session)


def _live(api: Api, session: Session) -> None:
    """All that refreshes; runs alone every few seconds and after each click in it."""
    if session.intent is not None and not session.asking:
        st.rerun()  # the question is asked outside of this fragment, so that no refresh can take it away
    snapshot = api.snapshot(chosen_phase())
    now_s = time.time()
    header(snapshot, api.settings)
    outages(snapshot, api.settings, now_s)
    totals(snapshot, api.settings.slo_goal)
    results(session, now_s)
    instances(snapshot.instances, session, api.settings.cards_shown)
    slo(snapshot.cluster, api.settings.slo_goal)
    classes(snapshot.classes)
    demand(snapshot.demand, snapshot.cluster, now_s)
    output_lengths(snapshot.predictor)
    jobs(snapshot.requests, api, session, now_s)
    events(snapshot.events, now_s)
    audit(snapshot.flips, now_s)


if __name__ == "__main__":
    main()
