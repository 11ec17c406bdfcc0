"""The page Instances: cards for a few, a table that begins with trouble for many; or one instance by its address."""

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import frame, look
from dashboard.console import INSTANCE, Console, addressed
from dashboard.frame import ask, clickable, clicked, results
from dashboard.instance_details import card, one
from dashboard.operations import Session
from dashboard.reads import Read
from dashboard.records import InstanceRow
from shared.domain.instance import InstanceState, Role

ANY = "all"
TABLE = "instances"
FULL = 0.95  # of its KV; with jobs that wait, that is trouble
_WEIGHT = {
    InstanceState.DEAD: 4.0,
    InstanceState.UNRESPONSIVE: 3.0,
    InstanceState.DRAINING: 1.5,
    InstanceState.STARTING: 1.2,
    InstanceState.READY: 0.0,
}


def instances(console: Console) -> None:
    """One run of the page."""
    session = Session()
    ask(session, console)
    chosen = addressed(INSTANCE)
    if chosen:
        one(console, session, chosen)
    else:
        st.fragment(_all, run_every=console.settings.refresh_s)(console, session)


def trouble(row: InstanceRow) -> float:
    """The more, the worse: those that are gone, then those that are full with jobs waiting, then the busy."""
    usage = row.kv_usage or 0.0
    waits = row.load.waiting / max(1, row.load.running + row.load.waiting)
    full = 1.0 if usage >= FULL and row.load.waiting else 0.0
    return _WEIGHT[row.state] + full + 0.5 * waits + 0.4 * usage


def _all(console: Console, session: Session) -> None:
    opened = clicked(TABLE)
    if opened is not None:
        console.open("instances", instance=opened)
    read, now_s = console.api.instances().result(), time.time()
    frame.header(console, "Instances", [frame.of_monitor(console, read)])
    rows = read.value
    results(session, console, now_s, {row.instance_id: row.load.inflight for row in rows or ()})
    if rows is None:
        st.html(look.empty(frame.NO_MONITOR))
        return
    if not rows:
        st.html(look.empty("No instance has registered yet."))
        return
    shown = sorted(_filtered(rows), key=lambda row: (-trouble(row), row.instance_id))
    if not shown:
        st.html(look.empty("No instance has that role and state."))
    elif len(rows) <= console.settings.cards_shown:
        with st.container(key="cards"):
            for row in shown:
                card(row, rows, console, session, read.stale)
    else:
        _table(shown, read)


def _filtered(rows: Sequence[InstanceRow]) -> list[InstanceRow]:
    with st.container(horizontal=True, vertical_alignment="center"):
        role = st.segmented_control(
            "Role",
            [ANY, *(r.value for r in Role)],
            default=ANY,
            required=True,
            key="role",
            label_visibility="collapsed",
        )
        state = st.segmented_control(
            "State",
            [ANY, *(s.value for s in InstanceState)],
            default=ANY,
            required=True,
            key="state",
            label_visibility="collapsed",
        )
        fits = [row for row in rows if role in (ANY, row.role.value)]
        shown = [row for row in fits if state in (ANY, row.state.value)]
        st.caption(f"{len(shown)} of {len(rows)}", width="content")
    return shown


def _table(shown: Sequence[InstanceRow], read: Read[list[InstanceRow]]) -> None:
    with st.container(key="instances-stale" if read.stale else "instances-table"):
        clickable(
            table(shown),
            [row.instance_id for row in shown],
            TABLE,
            column_config={
                "state": st.column_config.TextColumn(width="medium"),
                "KV used": st.column_config.ProgressColumn(format="percent", min_value=0.0, max_value=1.0),
                "staged": st.column_config.NumberColumn(format="bytes"),
            },
        )
    st.caption("The worst first. A click on one opens its page, with its history and its buttons.")


def table(rows: Sequence[InstanceRow]) -> pd.DataFrame:
    """One line an instance."""
    return pd.DataFrame(
        [
            {
                "instance": row.instance_id,
                "role": row.role.value,
                "state": _state(row),
                "engine": "EMULATED" if row.emulated else row.info.compatibility.engine,
                "accelerator": row.info.accelerator,
                "in flight": row.load.inflight,
                "running": row.load.running,
                "waiting": row.load.waiting,
                "queued tokens": row.load.queued_prefill_tokens,
                "KV used": row.kv_usage,
                "staged": row.load.staged_bytes,
            }
            for row in rows
        ]
    )


def _state(row: InstanceRow) -> str:
    sign = {InstanceState.DEAD: "✕ ", InstanceState.UNRESPONSIVE: "✕ ", InstanceState.DRAINING: "▲ "}
    said = row.operation or row.state.value
    return sign.get(row.state, "") + said + (f": {row.death}" if row.death else "")
