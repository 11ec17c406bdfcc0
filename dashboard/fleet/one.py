"""One instance: what it does, how that changed, what it tells of itself, what happened to it, its log."""

import time

import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.confirm import results
from dashboard.console import Console
from dashboard.fleet.cards import buttons, engine, head, kv, load
from dashboard.fleet.details import details
from dashboard.fleet.log_lines import plain
from dashboard.fleet.past import past
from dashboard.fleet.steps import steps
from dashboard.happenings.rows import event_table
from dashboard.history import POINTS, RANGES
from dashboard.records import InstanceRow
from dashboard.session import Session

SLOW_S = 5.0


def one(console: Console, session: Session, instance_id: str) -> None:
    """The parts of the page, each with a period of its own."""
    refresh_s = console.settings.refresh_s
    st.fragment(_now, run_every=refresh_s)(console, session, instance_id)
    with st.container(horizontal=True, vertical_alignment="bottom", key="range-line"):
        st.subheader("Over time", anchor=False, width="content")
        chosen = st.segmented_control(
            "Range", list(RANGES), default="15 min", required=True, key="range", label_visibility="collapsed"
        )
    minutes = RANGES[chosen or "15 min"]
    every_s = max(refresh_s, min(30.0, minutes * 60.0 / POINTS))
    st.fragment(_past, run_every=every_s)(console, minutes, instance_id)
    st.fragment(_slow, run_every=max(SLOW_S, refresh_s))(console, instance_id)


def _now(console: Console, session: Session, instance_id: str) -> None:
    read, now_s = console.api.instances().result(), time.time()
    frame.header(console, "Instances", [frame.of_monitor(console, read)])
    console.link("instances", "All instances", icon=":material/arrow_back:")
    results(session, console, now_s, {row.instance_id: row.load.inflight for row in read.value or ()})
    if read.value is None:
        st.html(look.empty(frame.NO_MONITOR))
        return
    row = next((row for row in read.value if row.instance_id == instance_id), None)
    if row is None:
        st.html(look.empty(f"The monitor knows of no instance {instance_id!r}."))
        return
    with st.container(key=f"one-{instance_id}"):
        st.html(look.page(head(row), engine(row), stale=read.stale))
        left, right = st.columns(2, gap="medium")
        left.html(look.page(load(row), kv(row), stale=read.stale))
        right.html(look.page(_about(row, now_s), stale=read.stale))
        with st.container(horizontal=True, vertical_alignment="center"):
            buttons(row, read.value, console, session, read.stale)
            console.link("requests", "Its requests", icon=":material/search:", instance=instance_id)
            console.link("events", "Its events", icon=":material/history:", instance=instance_id)


def _about(row: InstanceRow, now_s: float) -> str:
    info = row.info
    started_s = info.generation / 1e9
    pairs = [
        ("in this state", units.span(now_s - row.state_since_s) if row.state_since_s else units.NONE),
        ("process", f"for {units.span(now_s - started_s)}" if started_s > 1e9 else units.NONE),
        ("KV blocks", f"{units.count(info.total_blocks)}, each {info.block_size} tokens"),
        ("chunk", f"{units.count(info.chunk_size)} tokens"),
        ("at most", f"{units.count(info.max_model_len)} tokens"),
        ("HTTP", info.http),
    ]
    return look.grid(pairs)


def _past(console: Console, minutes: int, instance_id: str) -> None:
    read = console.api.instance_history(minutes, POINTS, instance_id).result()
    columns = read.value.instances.get(instance_id) if read.value else None
    if read.value is None or columns is None:
        st.html(look.empty("Nothing is known of its past." if not read.error else frame.NO_MONITOR))
        return
    with st.container(key="past-stale" if read.stale else "past"):
        drawn = past(read.value, columns, figures.zone())
        st.plotly_chart(drawn, key=f"past-{minutes}", config=figures.SMALL)


def _slow(console: Console, instance_id: str) -> None:
    api, now_s = console.api, time.time()
    told, happened, log = api.details(instance_id), api.events(instance=instance_id), api.log(instance_id)
    itself = told.result()
    if itself.value is not None:
        steps(itself.value.get("steps", {}))
    st.subheader("What it tells of itself", anchor=False)
    details(itself, now_s)
    st.subheader("What happened to it", anchor=False)
    event_table(happened.result(), console, now_s, "its-events", most_px=260)
    st.subheader("Log", anchor=False)
    tail = log.result()
    if tail.value is None:
        st.html(look.empty(f"No log: {tail.error}"))
    else:
        said = [plain(line) for line in tail.value.lines[-console.settings.log_lines :]]
        st.code("\n".join(said) or "(empty)", language=None, height=300)
