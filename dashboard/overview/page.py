"""The page Overview from top to bottom: the verdict first, then what it rests on."""

import time

import streamlit as st

from dashboard import frame, look
from dashboard.confirm import ask, results
from dashboard.console import Console
from dashboard.history import POINTS, RANGES
from dashboard.overview.asked import classes, demand
from dashboard.overview.graphs import graphs
from dashboard.overview.heat import heat
from dashboard.overview.slo import slo
from dashboard.overview.verdict import chain, counts, verdict
from dashboard.session import Session

SLOW_S = 5.0  # what is not looked at every second
ALWAYS_S = 30.0  # a figure is drawn anew once a step of its history, and at least so often


def overview(console: Console) -> None:
    """One run of the page."""
    session = Session()
    ask(session, console)
    st.fragment(_now, run_every=console.settings.refresh_s)(console, session)
    minutes = _range()
    every_s = max(console.settings.refresh_s, min(ALWAYS_S, minutes * 60.0 / POINTS))
    st.fragment(graphs, run_every=every_s)(console, minutes)
    st.fragment(heat, run_every=every_s)(console, minutes)
    st.fragment(_asked, run_every=max(SLOW_S, console.settings.refresh_s))(console)


def _now(console: Console, session: Session) -> None:
    api, now_s = console.api, time.time()
    asked_verdict, asked_cluster, asked_scheduler = api.verdict(), api.cluster(), api.scheduler_health()
    gateway, predictor = api.gateway_health(), api.predictor()
    judged, cluster, scheduler = asked_verdict.result(), asked_cluster.result(), asked_scheduler.result()
    services = [
        frame.of_monitor(console, judged, cluster),
        frame.of_scheduler(console, scheduler),
        frame.of_gateway(console, frame.waited(gateway)),
        frame.of_predictor(console, frame.waited(predictor)),
    ]
    frame.header(console, cluster.value.model if cluster.value else "", services)
    results(session, console, now_s)
    if judged.value is None:
        st.html(look.empty(frame.NO_MONITOR))
        return
    verdict(judged, console, now_s)
    chain(judged)
    counts(judged, cluster)


def _range() -> int:
    with st.container(horizontal=True, vertical_alignment="bottom", key="range-line"):
        st.subheader("Over time", anchor=False, width="content")
        chosen = st.segmented_control(
            "Range", list(RANGES), default="1 h", required=True, key="range", label_visibility="collapsed"
        )
    return RANGES[chosen or "1 h"]


def _asked(console: Console) -> None:
    api, now_s = console.api, time.time()
    cluster, asked, held = api.cluster(), api.demand(), api.classes()
    slo(cluster.result(), console.settings.slo_goal)
    classes(frame.waited(held))
    demand(asked.result(), cluster.result(), now_s)
