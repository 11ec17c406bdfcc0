"""What all figures over time have in common: the reader's own time, small panels with their keys in their titles."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import plotly.graph_objects as go
import streamlit as st

from dashboard import look
from dashboard.records import Column, Mark

SMALL: dict[str, Any] = {"displayModeBar": False}
PANEL_PX, GAP_PX, TOP_PX, FOOT_PX = 116, 52, 30, 24
MARKS = 40  # the newest are drawn
_MARK_COLOUR = {
    "death": look.BAD,
    "unresponsive": look.BAD,
    "operation_failed": look.BAD,
    "flip": look.PREFILL,
    "policy_flip": look.PREFILL,
}
_MARK_SYMBOL = {"death": "x", "unresponsive": "x-open", "flip": "diamond", "policy_flip": "diamond"}


def local(times_s: Sequence[float], zone: str) -> list[datetime]:
    """Unix seconds as that zone's own time."""
    place = ZoneInfo(zone)
    return [datetime.fromtimestamp(moment, place).replace(tzinfo=None) for moment in times_s]


def zone() -> str:
    """Of the browser."""
    return str(st.context.timezone or "UTC")


def keyed(name: str, series: Sequence[tuple[str, str, str]]) -> str:
    """A panel's title that tells its lines apart: of each its name, colour and dash."""
    stroke = {"solid": "━", "dot": "┅", "dash": "╌"}
    keys = " ".join(f'<span style="color:{colour}">{stroke[dash]} {said}</span>' for said, colour, dash in series)
    return f"<b>{name}</b>  {keys}"


def line(x: Sequence[Any], y: Column, name: str, colour: str, dash: str = "solid", **more: Any) -> go.Scatter:
    """One series; where nothing is known is a gap."""
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        mode="lines",
        line={"color": colour, "width": 1.8, "dash": dash},
        hovertemplate=f"%{{y:.3~s}} {name}<extra></extra>",
        **more,
    )


def arrange(figure: go.Figure, rows: int) -> None:
    """Small panels: no legend, titles at the left, one hover for a moment."""
    figure.update_layout(
        height=TOP_PX + FOOT_PX + rows * PANEL_PX + (rows - 1) * GAP_PX,
        margin={"l": 4, "r": 8, "t": TOP_PX, "b": FOOT_PX},
        showlegend=False,
        hovermode="x",
        hoverdistance=20,
        dragmode=False,
        font_size=11,
    )
    figure.update_xaxes(fixedrange=True, showgrid=False, nticks=5, tickformat="%H:%M", hoverformat="%d %b %H:%M:%S")
    figure.update_yaxes(fixedrange=True, rangemode="tozero", nticks=4, automargin=True, zeroline=False)


def name_panels(figure: go.Figure, titles: Sequence[str]) -> None:
    """Each title over the left end of its panel."""
    for number, title in enumerate(titles, 1):
        suffix = "" if number == 1 else str(number)
        figure.add_annotation(
            text=title,
            xref=f"x{suffix} domain",
            yref=f"y{suffix} domain",
            x=0.0,
            y=1.0,
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
            font_size=11,
        )


def mark(figure: go.Figure, marks: Sequence[Mark], zone: str, columns: int) -> None:
    """A line at each moment through every panel, and what happened on a sign at the top of the first row."""
    newest = sorted(marks, key=lambda one: one.time_s)[-MARKS:]
    if not newest:
        return
    x = local([one.time_s for one in newest], zone)
    for column in range(1, columns + 1):
        suffix = "" if column == 1 else str(column)
        for moment, one in zip(x, newest, strict=True):
            colour = _MARK_COLOUR.get(one.kind, look.IDLE)
            shape = {"x0": moment, "x1": moment, "y0": 0, "y1": 1, "xref": f"x{suffix}", "yref": "paper"}
            figure.add_shape(type="line", line={"color": colour, "width": 1}, opacity=0.45, layer="below", **shape)
        figure.add_trace(
            go.Scatter(
                x=x,
                y=[0] * len(newest),
                mode="markers",
                cliponaxis=False,
                marker={
                    "color": [_MARK_COLOUR.get(one.kind, look.IDLE) for one in newest],
                    "symbol": [_MARK_SYMBOL.get(one.kind, "triangle-up") for one in newest],
                    "size": 8,
                },
                text=[look.text(" ".join(filter(None, (one.instance_id, one.text)))) for one in newest],
                hovertemplate="%{text}<extra></extra>",
            ),
            row=1,
            col=column,
        )
