"""Role, jobs and KV of every instance over time, in the simulator's colours."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from dashboard import figures, look
from dashboard.console import Console
from dashboard.history import POINTS, Column, InstanceColumns, InstanceHistory
from dashboard.plan.nodes import natural
from shared import palette
from shared.domain.instance import Role

MANY = 48  # instances; of more than these fewer moments are drawn
LEAST_PX, MOST_PX, ROW_PX = 64, 340, 14
LABEL_PX = 11
_GONE = ("dead", "left", "forgotten")
_ROLE = {Role.PREFILL.value: 0, Role.DECODE.value: 1}


def heat(console: Console, minutes: int) -> None:
    """Three maps in one figure; nothing where the past of the instances is not known."""
    rows = console.api.instances().result()
    points = POINTS if len(rows.value or ()) <= MANY else POINTS // 2
    read = console.api.instance_history(minutes, points).result()
    if read.value is None or not read.value.instances:
        return
    found, zone = read.value, figures.zone()
    state = f"{minutes} {found.to_s} {len(found.instances)} {zone}"
    with st.container(key="heat-stale" if read.stale else "heat"):
        st.plotly_chart(_figure(state, found, zone), key=f"heat-{minutes}", config=figures.SMALL)


@st.cache_resource(show_spinner=False, max_entries=16)
def _figure(state: str, _found: InstanceHistory, zone: str) -> go.Figure:
    return figure(_found, zone)


def figure(found: InstanceHistory, zone: str) -> go.Figure:
    """A line an instance, those of one role together; a column a moment."""
    names = sorted(found.instances, key=lambda name: (_last_role(found.instances[name]), natural(name)))
    columns = [found.instances[name] for name in names]
    jobs, kv = _grid([c.inflight for c in columns]), _grid([c.kv_used for c in columns])
    roles = np.array([_roles(c) for c in columns], dtype=np.float32)
    x = figures.local(found.time_s, zone)
    maps = (
        ("Role", roles, palette.ROLES, (-1.0, 1.0), ""),
        ("Jobs in flight", jobs, palette.LOAD, (0.0, max(1.0, float(np.nanmax(jobs, initial=0.0)))), ".0f"),
        ("KV in use", kv, palette.KV, (0.0, 1.0), ".0%"),
    )
    drawn = make_subplots(rows=1, cols=len(maps), shared_yaxes=True, horizontal_spacing=0.02)
    titles = []
    for number, (title, values, scale, (low, high), form) in enumerate(maps, 1):
        told = "%{y}" if not form else f"%{{y}}: %{{z:{form}}}"
        drawn.add_trace(
            go.Heatmap(
                x=x,
                y=names,
                z=values,
                colorscale=scale,
                zmin=low,
                zmax=high,
                showscale=False,
                ygap=1 if len(names) <= MANY else 0,
                hovertemplate=f"{told}<br>%{{x}}<extra></extra>",
            ),
            row=1,
            col=number,
        )
        titles.append(_title(title, high, form))
    figures.arrange(drawn, 1)
    tall = min(MOST_PX, max(LEAST_PX, ROW_PX * len(names)))
    drawn.update_layout(height=figures.TOP_PX + figures.FOOT_PX + tall, hovermode="closest")
    every = -(-len(names) * LABEL_PX // tall)  # names that have no room are left out
    drawn.update_yaxes(type="category", autorange="reversed", dtick=every, tickfont_size=9)
    figures.name_panels(drawn, titles)
    return drawn


def _title(title: str, high: float, form: str) -> str:
    if not form:
        keys = (("■ prefill", look.PREFILL), ("■ decode", look.DECODE), ("■ gone", look.IDLE))
        return f"<b>{title}</b>  " + " ".join(f'<span style="color:{colour}">{said}</span>' for said, colour in keys)
    most = "100 %" if form.endswith("%") else f"{high:.0f}"
    return f"<b>{title}</b>  pale: 0, full: {most}"


def _last_role(columns: InstanceColumns) -> int:
    known = [role for role in columns.role if role is not None]
    return _ROLE.get(known[-1], 2) if known else 2


def _roles(columns: InstanceColumns) -> list[float]:
    states: Sequence[str | None] = columns.state or [None] * len(columns.role)
    return [
        float("nan") if role is None else -1.0 if state in _GONE else float(_ROLE.get(role, -1))
        for role, state in zip(columns.role, states, strict=True)
    ]


def _grid(columns: Sequence[Column]) -> NDArray[np.float32]:
    return np.array([[np.nan if value is None else value for value in column] for column in columns], dtype=np.float32)
