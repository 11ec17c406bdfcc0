"""The page: `streamlit run dashboard/app.py`. All of it refreshes itself, but for an open question."""

import time
from concurrent.futures import ThreadPoolExecutor

import streamlit as st
from pydantic import ValidationError

from dashboard import look
from dashboard.clients import classes, demand
from dashboard.confirm import ask, results
from dashboard.dashboard_settings import DashboardSettings
from dashboard.data import Api
from dashboard.instances import instances
from dashboard.jobs import chosen_phase, jobs
from dashboard.panels import audit, events, header, outages, slo, totals
from dashboard.session import Session
from shared.errors import InvalidRequest

OPERATIONS = 16  # actions under way at once, over all sessions


def main() -> None:
    """One run of the script: a new session, or an answered question."""
    st.set_page_config(page_title="Polyphase", page_icon=":material/lan:", layout="wide")
    st.html(look.STYLE)
    try:
        settings = DashboardSettings.load()
    except (InvalidRequest, ValidationError) as error:
        st.error(f"**The dashboard's settings cannot work.**\n\n```text\n{error}\n```")
        return
    api, session = _api(settings), Session()
    ask(session, api, _pool().submit)
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
    jobs(snapshot.requests, api, session, now_s)
    events(snapshot.events, now_s)
    audit(snapshot.flips, now_s)


@st.cache_resource(show_spinner=False, hash_funcs={DashboardSettings: DashboardSettings.model_dump_json})
def _api(settings: DashboardSettings) -> Api:
    return Api(settings)


@st.cache_resource(show_spinner=False)
def _pool() -> ThreadPoolExecutor:
    """Threads for actions: a flip takes as long as its drain, and the page goes on meanwhile."""
    return ThreadPoolExecutor(OPERATIONS, thread_name_prefix="operation")


if __name__ == "__main__":
    main()
