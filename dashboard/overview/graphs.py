"""The cluster over time: rates, latencies against their targets, attainment, failures, load; with what happened."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import streamlit as st
from plotly.subplots import make_subplots

from dashboard import figures, frame, look
from dashboard.console import Console
from dashboard.history import POINTS, History
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
        drawn = _figure(state, found, zone, console.settings.slo_goal)
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
def _figure(state: str, _found: History, zone: str, goal: float) -> go.Figure:
    return figure(_found, zone, goal)


def figure(found: History, zone: str, goal: float) -> go.Figure:
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
