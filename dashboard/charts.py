"""Plotly figures: panels over time, heat maps of instances, measured against expected values. Times are shown in the
reader's time zone; each panel's legend is in its title.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from dashboard import markup
from shared import palette
from shared.domain.instance import Role
from shared.wire.api.monitor import Column, InstanceColumns, InstanceHistory, Mark

CONFIG: dict[str, object] = {"displayModeBar": False}
RANGES = {"5 min": 5, "15 min": 15, "1 h": 60, "6 h": 360, "24 h": 1440}  # minutes
POINTS = 120  # of a history
COLUMNS = 3
PANEL_PX, GAP_PX, TOP_PX, FOOT_PX = 116, 52, 30, 24
MARKS_SHOWN = 40  # the newest
JOBS_COLOUR, DECODE_QUEUE_COLOUR = "#8a63c9", "#b9a1d9"
_MARK_STYLE = {  # colour, symbol
    "death": (markup.BAD, "x"),
    "unresponsive": (markup.BAD, "x-open"),
    "operation_failed": (markup.BAD, "triangle-up"),
    "flip": (markup.PREFILL, "diamond"),
    "policy_flip": (markup.PREFILL, "diamond"),
}
_OTHER_MARK = (markup.IDLE, "triangle-up")
_STROKE = {"solid": "━", "dot": "┅", "dash": "╌"}
_ROLE_KEYS = (("■ prefill", markup.PREFILL), ("■ decode", markup.DECODE), ("■ gone", markup.IDLE))
_GONE_STATES = ("dead", "left", "forgotten")
_ROLE_VALUE = {Role.PREFILL.value: 0.0, Role.DECODE.value: 1.0}  # as `palette.ROLES` has them; -1: gone


@dataclass(frozen=True, slots=True)
class Line:
    """A series of a panel; None in `values` is a gap."""

    values: Column
    name: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True, slots=True)
class Panel:
    """A small chart. target: a horizontal dashed line. share: the values are shares, 0..1. strip: an instance
    whose role and state over time take the place of lines.
    """

    title: str
    lines: Sequence[Line] = ()
    target: float | None = None
    share: bool = False
    stacked: bool = False
    strip: InstanceColumns | None = None


@st.cache_resource(show_spinner=False, max_entries=32)
def cached_figure(state: str, _build: Callable[[], go.Figure]) -> go.Figure:
    """The figure of that state, built once."""
    return _build()


def panel_grid(
    time_s: Sequence[float], span_s: tuple[float, float], panels: Sequence[Panel], zone: str, marks: Sequence[Mark] = ()
) -> go.Figure:
    """Panels over the time from `span_s[0]` to `span_s[1]`, three in a row, with a vertical line for each mark."""
    rows = -(-len(panels) // COLUMNS)
    cells: list[dict[str, object] | None] = [{} for _ in panels] + [None] * (rows * COLUMNS - len(panels))
    figure = make_subplots(
        rows=rows,
        cols=COLUMNS,
        specs=[cells[at : at + COLUMNS] for at in range(0, len(cells), COLUMNS)],
        vertical_spacing=GAP_PX / (rows * PANEL_PX + (rows - 1) * GAP_PX),
        horizontal_spacing=0.045,
    )
    x, titles = local_times(time_s, zone), []
    for place, panel in enumerate(panels):
        at = {"row": place // COLUMNS + 1, "col": place % COLUMNS + 1}
        keys = [(f"{_STROKE[line.dash]} {line.name}", line.colour) for line in panel.lines if line.name]
        for line in panel.lines:
            figure.add_trace(_trace(x, line, panel.stacked), **at)
        if panel.strip is not None:
            figure.add_trace(_role_strip(x, panel.strip), **at)
            figure.update_yaxes(showticklabels=False, **at)
            keys += _ROLE_KEYS
        if panel.target is not None:
            figure.add_hline(y=panel.target, line={"color": markup.BAD, "width": 1.2, "dash": "dash"}, **at)
            keys.append((f"{_STROKE['dash']} {'goal' if panel.share else 'target'} {panel.target:.3g}", markup.BAD))
        if panel.share:
            figure.update_yaxes(range=[0, 1.04], tickformat=".0%", **at)
        titles.append(_title(panel.title, keys))
    _arrange(figure, rows, titles)
    figure.update_xaxes(range=local_times(span_s, zone))
    _add_marks(figure, marks, zone)
    return figure


def instance_maps(history: InstanceHistory, zone: str) -> go.Figure:
    """Heat maps of role, jobs and KV: a line for each instance, grouped by role; a column for each moment."""
    many, label_px = 48, 11
    names = sorted(history.instances, key=lambda name: (_last_role(history.instances[name]), natural_order(name)))
    columns = [history.instances[name] for name in names]
    jobs, kv = _matrix([each.inflight for each in columns]), _matrix([each.kv_used for each in columns])
    roles = _matrix([_role_values(each) for each in columns])
    most = max(1.0, float(np.nanmax(jobs, initial=0.0)))
    maps = (
        (_title("Role", _ROLE_KEYS), roles, palette.ROLES, (-1.0, 1.0), "%{y}"),
        (f"<b>Jobs in flight</b>  pale: 0, full: {most:.0f}", jobs, palette.LOAD, (0.0, most), "%{y}: %{z:.0f}"),
        ("<b>KV in use</b>  pale: 0, full: 100 %", kv, palette.KV, (0.0, 1.0), "%{y}: %{z:.0%}"),
    )
    figure = make_subplots(rows=1, cols=len(maps), shared_yaxes=True, horizontal_spacing=0.02)
    x = local_times(history.time_s, zone)
    for number, (_, values, scale, (low, high), hover) in enumerate(maps, 1):
        figure.add_trace(
            go.Heatmap(
                x=x,
                y=names,
                z=values,
                colorscale=scale,
                zmin=low,
                zmax=high,
                showscale=False,
                ygap=1 if len(names) <= many else 0,
                hovertemplate=f"{hover}<br>%{{x}}<extra></extra>",
            ),
            row=1,
            col=number,
        )
    _arrange(figure, 1, [title for title, *_ in maps])
    height_px = min(340, max(64, 14 * len(names)))
    figure.update_layout(height=TOP_PX + FOOT_PX + height_px, hovermode="closest")
    every = -(-len(names) * label_px // height_px)  # labels without room are left out
    figure.update_yaxes(type="category", autorange="reversed", dtick=every, tickfont_size=9)
    return figure


def against_expected(
    groups: Mapping[str, tuple[str, Sequence[float], Sequence[float]]],
    axes: tuple[str, str],
    hover: str,
    height_px: int,
) -> go.Figure:
    """Points of expected (right) and actual (up) values, by group: colour, expected, actual; and the diagonal on which
    both are equal. Groups with names have a legend.
    """
    values = [value for _, expected, actual in groups.values() for value in (*expected, *actual)]
    most = 1.05 * max(values, default=1.0)
    diagonal = {"color": markup.IDLE, "width": 1.5, "dash": "dot"}
    figure = go.Figure(
        go.Scatter(x=[0, most], y=[0, most], mode="lines", line=diagonal, hoverinfo="skip", showlegend=False)
    )
    for name, (colour, expected, actual) in groups.items():
        marker = {"color": colour, "size": 6, "opacity": 0.6}
        figure.add_trace(
            go.Scatter(
                x=expected,
                y=actual,
                name=name,
                mode="markers",
                marker=marker,
                showlegend=bool(name),
                hovertemplate=f"{name + ': ' if name else ''}{hover}<extra></extra>",
            )
        )
    margin = {"l": 8, "r": 8, "t": 24 if any(groups) else 8, "b": 8}
    legend = {"orientation": "h", "y": 1.14}
    figure.update_layout(height=height_px, margin=margin, legend=legend, dragmode=False, font_size=11)
    for update, title in ((figure.update_xaxes, axes[0]), (figure.update_yaxes, axes[1])):
        update(title_text=title, range=[0, most], fixedrange=True, zeroline=False, automargin=True)
    return figure


def local_times(times_s: Sequence[float], zone: str) -> list[datetime]:
    """Unix seconds as local times without a zone, as Plotly wants them."""
    place = ZoneInfo(zone)
    return [datetime.fromtimestamp(moment, place).replace(tzinfo=None) for moment in times_s]


def natural_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts p2 before p10."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _trace(x: Sequence[datetime], line: Line, stacked: bool) -> go.Scatter:
    fill = {"stackgroup": "all", "line_width": 0.5, "fillcolor": line.colour} if stacked else {}
    return go.Scatter(
        x=x,
        y=line.values,
        name=line.name,
        mode="lines",
        line={"color": line.colour, "width": 1.8, "dash": line.dash},
        hovertemplate=f"%{{y:.3~s}} {line.name}<extra></extra>",
        **fill,
    )


def _role_strip(x: Sequence[datetime], columns: InstanceColumns) -> go.Heatmap:
    pairs = zip(columns.role, columns.state or [None] * len(columns.role), strict=True)
    return go.Heatmap(
        x=x,
        y=[""],
        z=[_role_values(columns)],
        text=[[f"{role or 'unknown'}, {state or 'unknown'}" for role, state in pairs]],
        colorscale=palette.ROLES,
        zmin=-1.0,
        zmax=1.0,
        showscale=False,
        hovertemplate="%{text}<extra></extra>",
    )


def _title(name: str, keys: Sequence[tuple[str, str]]) -> str:
    spans = " ".join(f'<span style="color:{colour}">{label}</span>' for label, colour in keys)
    return f"<b>{name}</b>  {spans}"


def _arrange(figure: go.Figure, rows: int, titles: Sequence[str]) -> None:
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
    for number, title in enumerate(titles, 1):
        suffix = "" if number == 1 else str(number)
        place = {"xref": f"x{suffix} domain", "yref": f"y{suffix} domain", "x": 0.0, "y": 1.0}
        figure.add_annotation(text=title, **place, xanchor="left", yanchor="bottom", showarrow=False, font_size=11)


def _add_marks(figure: go.Figure, marks: Sequence[Mark], zone: str) -> None:
    """A line through each panel, and a symbol at the top of the first row whose hover text names the event."""
    newest = sorted(marks, key=lambda mark: mark.time_s)[-MARKS_SHOWN:]
    if not newest:
        return
    x = local_times([mark.time_s for mark in newest], zone)
    colours, symbols = zip(*(_MARK_STYLE.get(mark.kind, _OTHER_MARK) for mark in newest), strict=True)
    for column in range(1, COLUMNS + 1):
        axis = f"x{'' if column == 1 else column}"
        for moment, colour in zip(x, colours, strict=True):
            shape = {"x0": moment, "x1": moment, "y0": 0, "y1": 1, "xref": axis, "yref": "paper"}
            figure.add_shape(type="line", line={"color": colour, "width": 1}, opacity=0.45, layer="below", **shape)
        symbol = go.Scatter(
            x=x,
            y=[0] * len(newest),
            mode="markers",
            cliponaxis=False,
            marker={"color": colours, "symbol": symbols, "size": 8},
            text=[markup.text(" ".join(filter(None, (mark.instance_id, mark.text)))) for mark in newest],
            hovertemplate="%{text}<extra></extra>",
        )
        figure.add_trace(symbol, row=1, col=column)


def _last_role(columns: InstanceColumns) -> float:
    known = [role for role in columns.role if role is not None]
    return _ROLE_VALUE.get(known[-1], 2.0) if known else 2.0


def _role_values(columns: InstanceColumns) -> Column:
    states: Sequence[str | None] = columns.state or [None] * len(columns.role)
    return [
        None if role is None else -1.0 if state in _GONE_STATES else _ROLE_VALUE.get(role, -1.0)
        for role, state in zip(columns.role, states, strict=True)
    ]


def _matrix(columns: Sequence[Column]) -> NDArray[np.float32]:
    return np.array([[np.nan if value is None else value for value in column] for column in columns], dtype=np.float32)
