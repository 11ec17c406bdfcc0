"""The instances: cards for a few, a table and one card for many; and the buttons that act on them."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import look, units
from dashboard.operations import Action, intend
from dashboard.panels import NO_MONITOR
from dashboard.reads import Read
from dashboard.records import InstanceRow
from dashboard.session import Session
from shared.domain.instance import InstanceState, Role

ANY = "all"


def instances(read: Read[list[InstanceRow]], session: Session, cards_shown: int) -> None:
    """All of them, or those that the filters leave."""
    st.subheader("Instances", anchor=False)
    rows = read.value
    if rows is None:
        st.html(look.empty(NO_MONITOR))
        return
    if not rows:
        st.html(look.empty("No instance has registered yet."))
        return
    shown = _filtered(rows)
    if not shown:
        st.html(look.empty("No instance has that role and state."))
    elif len(shown) <= cards_shown:
        with st.container(key="cards"):
            for row in shown:
                _card(row, rows, session, read.stale)
    else:
        _table_and_one(shown, rows, session, read.stale)


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


def _table_and_one(shown: Sequence[InstanceRow], rows: Sequence[InstanceRow], session: Session, stale: bool) -> None:
    left, right = st.columns([3, 1], gap="medium")
    with left:
        st.dataframe(
            frame(shown),
            hide_index=True,
            height=430,
            key="instances",
            column_config={
                "KV used": st.column_config.ProgressColumn(format="percent", min_value=0.0, max_value=1.0),
                "staged": st.column_config.NumberColumn(format="bytes"),
            },
        )
    with right:
        by_id = {row.instance_id: row for row in shown}
        chosen = st.selectbox("Instance to act on (type to search)", list(by_id), key="chosen_instance")
        if chosen in by_id:
            _card(by_id[chosen], rows, session, stale)


def frame(rows: Sequence[InstanceRow]) -> pd.DataFrame:
    """One line an instance, for sorting and looking up."""
    return pd.DataFrame(
        [
            {
                "instance": row.instance_id,
                "role": row.role.value,
                "state": row.operation or row.state.value,
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


def _card(row: InstanceRow, rows: Sequence[InstanceRow], session: Session, stale: bool) -> None:
    with st.container(border=True, key=f"card-{row.instance_id}"):
        st.html(look.page(_head(row), _engine(row), _load(row), _kv(row), stale=stale))
        with st.container(horizontal=True):
            _buttons(row, rows, session, stale)


def _head(row: InstanceRow) -> str:
    state = look.dot(row.operation or row.state.value, look.STATE_COLOUR[row.state], row.death)
    role = look.badge(row.role.value, look.ROLE_COLOUR[row.role])
    parts = f'{look.strong(row.instance_id)}{role}<span class="pp-state">{state}</span>'
    return f'<div class="pp-card-head">{parts}</div>'


def _engine(row: InstanceRow) -> str:
    info = row.info
    if row.emulated:
        engine = look.badge("EMULATED", look.CAUTION, loud=True)
    else:
        engine = look.text(f"{info.compatibility.engine} {info.compatibility.engine_version}")
    degrees = (("TP", info.tensor_parallel), ("PP", info.pipeline_parallel))
    parallel = "".join(f", {name} {degree}" for name, degree in degrees if degree > 1)
    return f"<div>{engine} {look.soft(f'{info.accelerator}, {info.dtype}{parallel}')}</div>"


def _load(row: InstanceRow) -> str:
    load = row.load
    return look.grid(
        [
            ("running", units.count(load.running)),
            ("waiting", units.count(load.waiting)),
            ("queued tokens", units.count(load.queued_prefill_tokens)),
            ("in flight", units.count(load.inflight)),
            ("decoding", units.count(load.decoding)),
            ("staged", units.size(load.staged_bytes)),
        ]
    )


def _kv(row: InstanceRow) -> str:
    if row.state is InstanceState.DEAD:
        return look.soft(row.death or "its connection is gone")
    return look.bar("KV", row.kv_usage, units.share(row.kv_usage), look.ROLE_COLOUR[row.role])


def _buttons(row: InstanceRow, rows: Sequence[InstanceRow], session: Session, stale: bool) -> None:
    draining = row.state is InstanceState.DRAINING
    for action, fits in ((Action.DRAIN, not draining), (Action.RESUME, draining), (Action.FLIP, True)):
        label = f"Flip to {row.role.other.value}" if action is Action.FLIP else action.capitalize()
        st.button(
            label,
            key=f"{action}-{row.instance_id}",
            disabled=stale or not (row.operable and fits),
            on_click=session.want,
            args=(intend(action, row, rows),),
        )
