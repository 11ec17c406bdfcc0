"""An instance as a card, and the buttons that act on it."""

from collections.abc import Sequence

import streamlit as st

from dashboard import look, units
from dashboard.console import Console
from dashboard.operations import Action, intend
from dashboard.records import InstanceRow
from dashboard.session import Session
from shared.domain.instance import InstanceState


def card(row: InstanceRow, rows: Sequence[InstanceRow], console: Console, session: Session, stale: bool) -> None:
    """What it does at the moment, a link to its page, and its buttons."""
    with st.container(border=True, key=f"card-{row.instance_id}"):
        st.html(look.page(head(row), engine(row), load(row), kv(row), stale=stale))
        with st.container(horizontal=True, vertical_alignment="center"):
            console.link("instances", "Open", icon=":material/chevron_right:", instance=row.instance_id)
            buttons(row, rows, console, session, stale)


def head(row: InstanceRow) -> str:
    """Its name, role and state."""
    state = look.dot(row.operation or row.state.value, look.STATE_COLOUR[row.state], row.death)
    role = look.badge(row.role.value, look.ROLE_COLOUR[row.role])
    parts = f'{look.strong(row.instance_id)}{role}<span class="pp-state">{state}</span>'
    return f'<div class="pp-card-head">{parts}</div>'


def engine(row: InstanceRow) -> str:
    """What runs there, on what."""
    info = row.info
    if row.emulated:
        name = look.badge("EMULATED", look.CAUTION, loud=True)
    else:
        name = look.text(f"{info.compatibility.engine} {info.compatibility.engine_version}")
    degrees = (("TP", info.tensor_parallel), ("PP", info.pipeline_parallel))
    parallel = "".join(f", {name} {degree}" for name, degree in degrees if degree > 1)
    return f"<div>{name} {look.soft(f'{info.accelerator}, {info.dtype}{parallel}')}</div>"


def load(row: InstanceRow) -> str:
    """Its jobs."""
    now = row.load
    return look.grid(
        [
            ("running", units.count(now.running)),
            ("waiting", units.count(now.waiting)),
            ("queued tokens", units.count(now.queued_prefill_tokens)),
            ("in flight", units.count(now.inflight)),
            ("decoding", units.count(now.decoding)),
            ("staged", units.size(now.staged_bytes)),
        ]
    )


def kv(row: InstanceRow) -> str:
    """Its KV memory, or why there is none."""
    if row.state is InstanceState.DEAD:
        return look.soft(row.death or "its connection is gone")
    return look.bar("KV", row.kv_usage, units.share(row.kv_usage), look.ROLE_COLOUR[row.role])


def buttons(row: InstanceRow, rows: Sequence[InstanceRow], console: Console, session: Session, stale: bool) -> None:
    """Drain, resume and flip; none for those who may only look."""
    if not console.account.may_operate:
        return
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
