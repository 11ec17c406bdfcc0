"""Charts as HTML: panels over time, maps of all instances, measured against expected values.

Lines and areas are images (SVG, PNG) in the HTML, all words are text beside them, so that a chart needs no code in the
browser: a chart library takes a browser several seconds to load. Values appear when the mouse rests on a chart. Times
are in the reader's time zone; each panel's legend is in its title.
"""

import io
import math
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from zoneinfo import ZoneInfo

import numpy as np
import streamlit as st
from numpy.typing import NDArray
from PIL import Image

from dashboard import markup
from shared import palette
from shared.domain.instance import Role
from shared.wire.api.monitor import Column, InstanceColumns, InstanceHistory, Mark

RANGES = {"5 min": 5, "15 min": 15, "1 h": 60, "6 h": 360, "24 h": 1440}  # minutes
POINTS = 120  # of a history
HOVERS = 40  # places of a panel, at most, that show their values
MARKS_SHOWN = 40  # the newest
MARKED_PANELS = 3  # the first row: its symbols have the texts of the marks
JOBS_COLOUR, DECODE_QUEUE_COLOUR = "#8a63c9", "#b9a1d9"
_WIDTH, _HEIGHT = 1000, 100  # of a drawing, which is stretched to its place
_MAP_ROW_PX, _MAP_PX, _LABEL_PX = 14, 340, 11
_TICKS_S = (60, 120, 300, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200)
_MARK_STYLE = {  # colour, symbol
    "death": (markup.BAD, "✕"),
    "unresponsive": (markup.BAD, "✕"),
    "operation_failed": (markup.BAD, "▲"),
    "flip": (markup.PREFILL, "◆"),
    "policy_flip": (markup.PREFILL, "◆"),
}
_OTHER_MARK = (markup.IDLE, "▲")
_STROKE = {"solid": "━", "dot": "┅", "dash": "╌"}
_DASHES = {"solid": "", "dot": "2 3", "dash": "6 4"}
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
    whose role and state over time take the place of lines. bars: each value is a bar.
    """

    title: str
    lines: Sequence[Line] = ()
    target: float | None = None
    share: bool = False
    stacked: bool = False
    bars: bool = False
    strip: InstanceColumns | None = None


@st.cache_resource(show_spinner=False, max_entries=32)
def cached_chart(state: str, _build: Callable[[], str]) -> str:
    """The chart of that state, built once."""
    return _build()


def panel_grid(
    time_s: Sequence[float], span_s: tuple[float, float], panels: Sequence[Panel], zone: str, marks: Sequence[Mark] = ()
) -> str:
    """Panels over the time from `span_s[0]` to `span_s[1]`, three in a row, with a vertical line for each mark."""
    axis = _TimeAxis(span_s, zone)
    newest = [mark for mark in sorted(marks, key=lambda mark: mark.time_s)[-MARKS_SHOWN:] if axis.contains(mark.time_s)]
    shown = [_panel(panel, time_s, axis, newest, symbols=at < MARKED_PANELS) for at, panel in enumerate(panels)]
    return markup.page(f'<div class="pp-charts">{"".join(shown)}</div>')


def instance_maps(history: InstanceHistory, zone: str) -> str:
    """Maps of role, jobs and KV: a line for each instance, grouped by role; a column for each moment."""
    names = sorted(history.instances, key=lambda name: (_last_role(history.instances[name]), natural_order(name)))
    columns = [history.instances[name] for name in names]
    roles, jobs = _matrix([_role_values(each) for each in columns]), _matrix([each.inflight for each in columns])
    kv = _matrix([each.kv_used for each in columns])
    most = max(1.0, float(np.nanmax(jobs, initial=0.0)))
    axis = _TimeAxis((history.from_s, history.to_s), zone)
    maps = (
        (_title("Role", _ROLE_KEYS), roles, palette.ROLES, (-1.0, 1.0)),
        (_title("Jobs in flight", (("pale: 0", ""), (f"full: {most:.0f}", ""))), jobs, palette.LOAD, (0.0, most)),
        (_title("KV in use", (("pale: 0", ""), ("full: 100 %", ""))), kv, palette.KV, (0.0, 1.0)),
    )
    height_px = min(_MAP_PX, max(64, _MAP_ROW_PX * len(names)))
    drawn = "".join(
        f'<div class="pp-chart">{title}<div class="pp-plot" style="height:{height_px}px">'
        f"{_picture(values, scale, ends)}</div>{axis.labels()}</div>"
        for title, values, scale, ends in maps
    )
    row = 100.0 / max(1, len(names))
    every = -(-len(names) * _LABEL_PX // height_px)  # labels without room are left out
    labels = "".join(
        f'<span style="top:{row * at:.2f}%">{markup.text(name)}</span>'
        for at, name in enumerate(names)
        if not at % every
    )
    hovers = "".join(
        f'<i style="top:{row * at:.2f}%;height:{row:.2f}%" title="{markup.text(_now(name, each))}"></i>'
        for at, (name, each) in enumerate(zip(names, columns, strict=True))
    )
    sides = f'<div class="pp-rows" style="height:{height_px}px">{labels}{hovers}</div>'
    return markup.page(f'<div class="pp-maps">{sides}<div class="pp-charts">{drawn}</div></div>')


def against_expected(
    groups: Mapping[str, tuple[str, Sequence[float], Sequence[float]]], axes: tuple[str, str], height_px: int
) -> str:
    """Points of expected (right) and actual (up) values, by group: colour, expected, actual; and the diagonal on which
    both are equal. Groups with names have a legend.
    """
    values = [value for _, expected, actual in groups.values() for value in (*expected, *actual)]
    most = _round_top(max(values, default=1.0))
    shapes = [_path([(0.0, 0.0), (1.0, 1.0)], markup.IDLE, dash="dot")]
    for colour, expected, actual in groups.values():
        points = "".join(
            f"M{_WIDTH * x / most:.1f} {_HEIGHT * (1 - y / most):.2f}h0" for x, y in zip(expected, actual, strict=True)
        )
        shapes.append(f'<path d="{points}" stroke="{colour}" stroke-width="6" stroke-opacity=".6"/>')
    right = "".join(f'<span style="left:{50 * half}%">{_figure(most * half / 2)}</span>' for half in range(3))
    legend = _title(f"{axes[1]}, up; {axes[0]}, right", [(f"● {name}", groups[name][0]) for name in groups if name])
    return markup.page(
        f'<div class="pp-chart">{legend}<div class="pp-plot" style="height:{height_px}px">{_drawing(shapes)}'
        f'{_value_labels(most, share=False)}</div><div class="pp-times">{right}</div></div>'
    )


def natural_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts p2 before p10."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def drawing(shapes: Sequence[str], height: float) -> str:
    """SVG shapes on a ground of 1000 by `height` as an image, which is stretched to its place. Strokes keep their
    width.
    """
    style = "path{vector-effect:non-scaling-stroke;fill:none;stroke-linecap:round;stroke-linejoin:round}"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" preserveAspectRatio="none">'
        f"<style>{style}</style>{''.join(shapes)}</svg>"
    )
    return f'<img alt="" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'


class _TimeAxis:
    """The time from left to right."""

    def __init__(self, span_s: tuple[float, float], zone: str) -> None:
        self.from_s, self.to_s = span_s
        self._zone = ZoneInfo(zone)
        self._length_s = max(1e-9, self.to_s - self.from_s)

    def contains(self, moment_s: float) -> bool:
        return self.from_s <= moment_s <= self.to_s

    def share(self, moment_s: float) -> float:
        """0: the left end, 1: the right end."""
        return (moment_s - self.from_s) / self._length_s

    def clock(self, moment_s: float, form: str = "%d %b %H:%M:%S") -> str:
        return datetime.fromtimestamp(moment_s, self._zone).strftime(form)

    def labels(self) -> str:
        """Up to five round times of day, below a chart."""
        every_s = next((step for step in _TICKS_S if self._length_s / step <= 5), _TICKS_S[-1])
        offset_s = datetime.fromtimestamp(self.from_s, self._zone).utcoffset()
        shift_s = offset_s.total_seconds() if offset_s is not None else 0.0
        first = math.ceil((self.from_s + shift_s) / every_s)
        last = math.floor((self.to_s + shift_s) / every_s)
        moments = (tick * every_s - shift_s for tick in range(first, last + 1))
        spans = (f'<span style="left:{100 * self.share(at):.1f}%">{self.clock(at, "%H:%M")}</span>' for at in moments)
        return f'<div class="pp-times">{"".join(spans)}</div>'


def _panel(panel: Panel, time_s: Sequence[float], axis: _TimeAxis, marks: Sequence[Mark], *, symbols: bool) -> str:
    xs = [axis.share(moment) for moment in time_s]
    keys = [(f"{_STROKE[line.dash]} {line.name}", line.colour) for line in panel.lines if line.name]
    shapes = [_upright(axis.share(mark.time_s), _MARK_STYLE.get(mark.kind, _OTHER_MARK)[0]) for mark in marks]
    values, top = "", 1.0
    if panel.strip is not None:
        shapes += _role_strip(xs, panel.strip)
        keys += _ROLE_KEYS
    else:
        top = 1.04 if panel.share else _round_top(_largest(panel))
        shapes += _areas(xs, panel.lines, top) if panel.stacked or panel.bars else _lines(xs, panel.lines, top)
        values = _value_labels(top, share=panel.share)
    if panel.target is not None:
        height = panel.target / top
        shapes.append(_path([(0.0, height), (1.0, height)], markup.BAD, width=1.2, dash="dash"))
        keys.append((f"{_STROKE['dash']} {'goal' if panel.share else 'target'} {panel.target:.3g}", markup.BAD))
    over = _symbols(marks, axis) if symbols else ""
    plot = f'<div class="pp-plot">{_drawing(shapes)}{values}{_hovers(panel, time_s, axis)}{over}</div>'
    return f'<div class="pp-chart">{_title(panel.title, keys)}{plot}{axis.labels()}</div>'


def _drawing(shapes: Sequence[str]) -> str:
    return drawing(shapes, _HEIGHT)


def _largest(panel: Panel) -> float:
    """The largest value that a panel shows, or its target."""
    columns = [[value or 0.0 for value in line.values] for line in panel.lines if line.values]
    if panel.stacked:
        columns = [[sum(values) for values in zip(*columns, strict=True)]]
    return max([panel.target or 0.0, *(value for column in columns for value in column)])


def _round_top(largest: float) -> float:
    """The end of an axis that holds the value: 1, 2, 3, 4, 5, 6 or 8 times a power of ten."""
    if largest <= 0.0 or not math.isfinite(largest):
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next((factor * power for factor in (1, 2, 3, 4, 5, 6, 8) if factor * power >= largest), 10.0 * power)


def _lines(xs: Sequence[float], lines: Sequence[Line], top: float) -> list[str]:
    """Each run of known values is a stretch of its line; a run of one value is a dot."""
    paths = []
    for line in lines:
        points = [None if value is None else (x, value / top) for x, value in zip(xs, line.values, strict=False)]
        runs = [list(run) for known, run in groupby(points, lambda point: point is not None) if known]
        d = "".join(_route([point for point in run if point is not None]) for run in runs)
        paths.append(_stroke(d, line.colour, 1.8, line.dash))
    return paths


def _areas(xs: Sequence[float], lines: Sequence[Line], top: float) -> list[str]:
    """Values as filled steps, each line upon the earlier ones."""
    width = _WIDTH * (xs[1] - xs[0]) if len(xs) > 1 else 0.0
    below = [0.0] * len(xs)
    paths = []
    for line in lines:
        heights = [(value or 0.0) / top for value in line.values] or [0.0] * len(xs)
        boxes = "".join(
            f"M{_WIDTH * x - width / 2:.1f} {_HEIGHT * (1 - low):.2f}h{width:.1f}v{-_HEIGHT * height:.2f}h{-width:.1f}z"
            for x, low, height in zip(xs, below, heights, strict=False)
            if height
        )
        paths.append(f'<path d="{boxes}" style="fill:{line.colour}"/>')
        below = [low + height for low, height in zip(below, heights, strict=False)]
    return paths


def _role_strip(xs: Sequence[float], columns: InstanceColumns) -> list[str]:
    """A box for each stretch of time in which the role and whether the instance is gone stay the same."""
    colour_of = {-1.0: markup.IDLE, 0.0: markup.PREFILL, 1.0: markup.DECODE}
    boxes, at = [], 0
    for value, run in groupby(_role_values(columns)):
        end = at + len(list(run))
        if value is not None and at < len(xs):
            left, right = _WIDTH * xs[at], _WIDTH * (xs[end] if end < len(xs) else 1.0)
            boxes.append(f'<rect x="{left:.1f}" width="{right - left:.1f}" height="100" fill="{colour_of[value]}"/>')
        at = end
    return boxes


def _hovers(panel: Panel, time_s: Sequence[float], axis: _TimeAxis) -> str:
    """Upright stripes over a panel; each names its newest values when the mouse rests on it."""
    step = max(1, -(-len(time_s) // HOVERS))
    stripes = []
    for at in range(0, len(time_s), step):
        last = min(at + step, len(time_s)) - 1
        left = max(0.0, axis.share(time_s[at]))
        right = min(1.0, axis.share(time_s[last + 1]) if last + 1 < len(time_s) else 1.0)
        if words := _values_at(panel, last):
            title = markup.text(f"{axis.clock(time_s[last])}\n{words}")
            stripes.append(f'<i style="left:{100 * left:.1f}%;width:{100 * (right - left):.1f}%" title="{title}"></i>')
    return "".join(stripes)


def _values_at(panel: Panel, at: int) -> str:
    if panel.strip is not None:
        states: Sequence[str | None] = panel.strip.state or [None] * len(panel.strip.role)
        return f"{panel.strip.role[at] or 'unknown'}, {states[at] or 'unknown'}"
    known = ((line.name, line.values[at]) for line in panel.lines if at < len(line.values))
    return "\n".join(f"{name} {_figure(value, panel.share)}".strip() for name, value in known if value is not None)


def _symbols(marks: Sequence[Mark], axis: _TimeAxis) -> str:
    """At the top of a panel: a symbol for each mark, which names its event when the mouse rests on it."""
    found = []
    for mark in marks:
        colour, symbol = _MARK_STYLE.get(mark.kind, _OTHER_MARK)
        words = " ".join(filter(None, (axis.clock(mark.time_s), mark.instance_id, mark.text)))
        place = f"left:{100 * axis.share(mark.time_s):.1f}%;color:{colour}"
        found.append(f'<b style="{place}" title="{markup.text(words)}">{symbol}</b>')
    return "".join(found)


def _upright(x: float, colour: str) -> str:
    return _path([(x, 0.0), (x, 1.0)], colour, width=1.0, opacity=0.45)


def _path(
    points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.5, dash: str = "solid", opacity: float = 1.0
) -> str:
    return _stroke(_route(points), colour, width, dash, opacity)


def _route(points: Sequence[tuple[float, float]]) -> str:
    """Points as shares of width and height, from the lower left, as the commands of a path."""
    places = [f"{_WIDTH * x:.1f} {_HEIGHT * (1 - y):.2f}" for x, y in points]
    return f"M{'L'.join(places)}" if len(places) > 1 else f"M{places[0]}h0"


def _stroke(d: str, colour: str, width: float, dash: str, opacity: float = 1.0) -> str:
    dashes = f' stroke-dasharray="{_DASHES[dash]}" style="stroke-linecap:butt"' if _DASHES[dash] else ""
    faint = f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<path d="{d}" stroke="{colour}" stroke-width="{width:g}"{dashes}{faint}/>'


def _value_labels(top: float, *, share: bool) -> str:
    """The lower end, the middle and the upper end of an upright axis."""
    whole = 1.0 if share else top
    return "".join(
        f'<em style="bottom:{100 * whole * half / 2 / top:.1f}%">{_figure(whole * half / 2, share)}</em>'
        for half in range(3)
    )


def _figure(value: float, share: bool = False) -> str:
    if share:
        return f"{100 * value:.3g} %"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _title(name: str, keys: Sequence[tuple[str, str]]) -> str:
    spans = " ".join(f'<span style="color:{colour or "inherit"}">{markup.text(label)}</span>' for label, colour in keys)
    return f'<div class="pp-chart-title">{markup.strong(name)} {spans}</div>'


def _now(name: str, columns: InstanceColumns) -> str:
    """The newest known values of an instance, in words."""
    role, jobs, kv = (
        next((value for value in reversed(column) if value is not None), None)
        for column in (columns.role, columns.inflight, columns.kv_used)
    )
    words = (role, f"{jobs:.0f} jobs" if jobs is not None else "", f"KV {kv:.0%}" if kv is not None else "")
    return f"{name}: {', '.join(str(word) for word in words if word) or 'unknown'}"


def _picture(values: NDArray[np.float32], scale: palette.Scale, ends: tuple[float, float]) -> str:
    """A map as an image with a pixel for each value; unknown values are transparent."""
    low, high = ends
    places, colours = np.array([place for place, _ in scale]), np.array([_rgba(colour) for _, colour in scale])
    known = np.isfinite(values)
    shares = np.where(known, (values - low) / (high - low), 0.0)
    pixels = np.stack([np.interp(shares, places, colours[:, channel]) for channel in range(4)], axis=-1)
    pixels[~known] = 0.0
    buffer = io.BytesIO()
    Image.fromarray(pixels.round().astype(np.uint8)).save(buffer, "PNG")
    return f'<img alt="" class="pp-map" src="data:image/png;base64,{b64encode(buffer.getvalue()).decode()}">'


def _rgba(colour: str) -> tuple[float, ...]:
    """Of `#rrggbb` or `rgba(r,g,b,a)`: channels of 0..255."""
    if colour.startswith("#"):
        return (*(float(int(colour[at : at + 2], 16)) for at in (1, 3, 5)), 255.0)
    red, green, blue, alpha = map(float, colour.removeprefix("rgba(").removesuffix(")").split(","))
    return red, green, blue, 255.0 * alpha


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
