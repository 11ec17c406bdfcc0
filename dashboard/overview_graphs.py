"""The figures of the overview over time: rates, latencies against their targets, attainment, failures and load; and
a heat map of the role, jobs and KV of every instance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from dashboard import figures, frame, look
from dashboard.console import Console
from dashboard.plan.picture import natural
from dashboard.records import POINTS, Column, History, InstanceColumns, InstanceHistory
from shared import palette
from shared.domain.instance import Role
from shared.domain.verdict import Stage

COLUMNS = 3
ALL = "all classes"
KEY = "✕ death · ◆ flip · ▲ anything else that happened; point at one to read it"


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the figure's. lines: series, what it is called, colour, dash. target: the name of one, drawn dashed."""

    title: str
    lines: Sequence[tuple[str, str, str, str]]
    target: str = ""
    share: bool = False
    stacked: bool = False


PANELS = (
    Panel("Requests/s", [("requests_per_s", "ended", look.DECODE, "solid")]),
    Panel(
        "Tokens/s",
        [
            ("prompt_tokens_per_s", "prompt", look.PREFILL, "solid"),
            ("output_tokens_per_s", "output", look.DECODE, "solid"),
        ],
    ),
    Panel("SLO attainment", [("attainment", "all met", look.GOOD, "solid")], target="attainment", share=True),
    Panel(
        "Each target met",
        [
            ("ttft_attainment", "TTFT", look.PREFILL, "solid"),
            ("tpot_attainment", "TPOT", look.DECODE, "solid"),
            ("itl_attainment", "ITL", look.TRANSFER, "solid"),
        ],
        target="attainment",
        share=True,
    ),
    Panel(
        "TTFT (s)", [("ttft_p50_s", "p50", look.PREFILL, "dot"), ("ttft_p99_s", "p99", look.PREFILL, "solid")], "ttft_s"
    ),
    Panel(
        "TPOT (s)", [("tpot_p50_s", "p50", look.DECODE, "dot"), ("tpot_p99_s", "p99", look.DECODE, "solid")], "tpot_s"
    ),
    Panel(
        "Longest gap (s)",
        [("gap_p50_s", "p50", look.DECODE, "dot"), ("gap_p90_s", "p90", look.DECODE, "solid")],
        "itl_s",
    ),
    Panel(
        "Not served, a second",
        [
            ("failed_per_s", "failed", look.BAD, "solid"),
            ("refused_per_s", "refused", look.CAUTION, "solid"),
            ("cancelled_per_s", "cancelled", look.IDLE, "dot"),
        ],
    ),
    Panel(
        "Time (s)",
        [
            (f"stage_{Stage.QUEUE}_s", "queue", look.IDLE, "solid"),
            (f"stage_{Stage.PREFILL}_s", "prefill", look.PREFILL, "solid"),
            (f"stage_{Stage.TRANSFER}_s", "transfer", look.TRANSFER, "solid"),
            (f"stage_{Stage.DECODE_QUEUE}_s", "d. queue", "#b9a1d9", "solid"),
            (f"stage_{Stage.DECODE}_s", "decode", look.DECODE, "solid"),
        ],
        stacked=True,
    ),
    Panel("Jobs", [("running", "running", look.DECODE, "solid"), ("waiting", "waiting", look.CAUTION, "solid")]),
    Panel(
        "KV in use",
        [("kv_used_prefill", "prefill", look.PREFILL, "solid"), ("kv_used_decode", "decode", look.DECODE, "solid")],
        share=True,
    ),
)


def graphs(console: Console, minutes: int) -> None:
    """All panels in one figure; nothing of it is built again before its history has changed."""
    read = console.api.history(minutes, POINTS).result()
    if read.value is None:
        st.html(look.empty(frame.NO_MONITOR if read.error else "Nothing is known of the past yet."))
        return
    slo = _class(read.value)
    found, zone = read.value.of(slo), figures.zone()
    state = f"{minutes} {slo} {found.to_s} {len(found.marks)} {zone} {console.settings.slo_goal}"
    with st.container(key="over-time-stale" if read.stale else "over-time"):
        drawn = _graphs_figure(state, found, zone, console.settings.slo_goal)
        st.plotly_chart(drawn, key=f"history-{minutes}", config=figures.SMALL)
        if found.marks:
            st.caption(KEY)


def _class(found: History) -> str:
    if len(found.classes) < 2:
        return ALL
    chosen = st.segmented_control(
        "Class", [ALL, *found.classes], default=ALL, required=True, key="class", label_visibility="collapsed"
    )
    return str(chosen or ALL)


@st.cache_resource(show_spinner=False, max_entries=16)
def _graphs_figure(state: str, _found: History, zone: str, goal: float) -> go.Figure:
    return graphs_figure(_found, zone, goal)


def graphs_figure(found: History, zone: str, goal: float) -> go.Figure:
    """The panels, three in a row."""
    rows = -(-len(PANELS) // COLUMNS)
    height = rows * figures.PANEL_PX + (rows - 1) * figures.GAP_PX
    cells: list[dict[str, object] | None] = [{} for _ in PANELS] + [None] * (rows * COLUMNS - len(PANELS))
    specs = [cells[at : at + COLUMNS] for at in range(0, len(cells), COLUMNS)]
    drawn = make_subplots(
        rows=rows, cols=COLUMNS, specs=specs, vertical_spacing=figures.GAP_PX / height, horizontal_spacing=0.045
    )
    x = figures.local(found.time_s, zone)
    targets = {**found.targets, "attainment": goal}
    titles = []
    for place, panel in enumerate(PANELS):
        row, column = place // COLUMNS + 1, place % COLUMNS + 1
        keys = [(said, colour, dash) for _, said, colour, dash in panel.lines]
        for name, said, colour, dash in panel.lines:
            more = {"stackgroup": "all", "line_width": 0.5, "fillcolor": colour} if panel.stacked else {}
            known = found.series.get(name, [])
            drawn.add_trace(figures.line(x, known, said, colour, dash, **more), row=row, col=column)
        target = targets.get(panel.target)
        if target is not None:
            line = {"color": look.BAD, "width": 1.2, "dash": "dash"}
            drawn.add_hline(y=target, line=line, row=row, col=column)
            keys.append((f"{'goal' if panel.share else 'target'} {target:.3g}", look.BAD, "dash"))
        if panel.share:
            drawn.update_yaxes(range=[0, 1.04], tickformat=".0%", row=row, col=column)
        titles.append(figures.keyed(panel.title, keys))
    figures.arrange(drawn, rows)
    ends = figures.local([found.from_s, found.to_s], zone)
    drawn.update_xaxes(range=ends)
    figures.name_panels(drawn, titles)
    figures.mark(drawn, found.marks, zone, COLUMNS)
    return drawn


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
        st.plotly_chart(_heat_figure(state, found, zone), key=f"heat-{minutes}", config=figures.SMALL)


@st.cache_resource(show_spinner=False, max_entries=16)
def _heat_figure(state: str, _found: InstanceHistory, zone: str) -> go.Figure:
    return heat_figure(_found, zone)


def heat_figure(found: InstanceHistory, zone: str) -> go.Figure:
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
