"""The report of a simulation as one HTML page.

The page has figures, plots (latency by policy, course over time, load and roles of instances) and instances.
It needs no network access, and follows the light or dark theme of the browser. Relies on plotly.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots
from rich.table import Table
from rich.text import Text

from shared import palette
from shared.errors import InvalidRequest
from shared.sim.outcomes import LoadTimeline, SimResult
from shared.sim.workload import Workload
from tools.simulate import report
from tools.simulate.deployment import Deployment
from tools.simulate.report import Run, file_word

_POINTS = 500  # of a distribution
_INTERVALS = 60  # of a run: percentiles are taken over each
_MIN_REQUESTS = 5  # of an interval that is shown
_SLO, _DOTTED = "Dashed: the SLO.", "Dotted: 99th percentile."
Scale = list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure; light, dark: the colour scale of each trace that has one, by theme."""

    name: str
    title: str
    figure: go.Figure
    note: str = ""
    light: dict[int, Scale] = field(default_factory=dict)
    dark: dict[int, Scale] = field(default_factory=dict)


def plots_of(runs: Sequence[Run]) -> list[Plot]:
    """All plots, in the order of the page."""
    found = [
        Plot("latency", "Latency: share of completed requests within a time", latency_figure(runs), _SLO),
        Plot("course", "TTFT and TPOT by time of arrival", course_figure(runs), f"Solid: median. {_DOTTED} {_SLO}"),
    ]
    if any(run.goodput is not None and run.goodput.tried for run in runs):
        found.append(Plot("goodput", "Goodput: SLO attainment by rate", goodput_figure(runs)))
    for run in runs:
        if run.result.timeline is not None and len(run.result.timeline.time_s):
            found.append(load_plot(run.result, run.result.timeline, run.label))
    return found


def latency_figure(runs: Sequence[Run]) -> go.Figure:
    """Distribution functions of TTFT, TPOT and JCT of completed requests; the SLO as a dashed line."""
    kinds = ("ttft", "tpot", "jct")
    figure = make_subplots(rows=1, cols=3, subplot_titles=[f"{kind.upper()} (s)" for kind in kinds], shared_yaxes=True)
    for number, run in enumerate(runs):
        outcomes = run.result.outcomes
        for column, kind in enumerate(kinds, 1):
            values = getattr(outcomes, f"{kind}_s")[outcomes.completed]
            seconds, shares = _distribution(values[np.isfinite(values)])
            figure.add_trace(_line(run, number, seconds, shares, legend=column == 1), row=1, col=column)
    slo = runs[0].spec.slo
    for column, target in ((1, slo.ttft_s), (2, slo.tpot_s)):
        figure.add_vline(x=target, line={"dash": "dash", "color": palette.BAD, "width": 1}, row=1, col=column)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_xaxes(type="log", dtick="D2")
    return _framed(figure, 380, len(runs))


def course_figure(runs: Sequence[Run]) -> go.Figure:
    """Median (line) and 99th percentile (dotted) of TTFT and TPOT, by time of arrival."""
    kinds = ("ttft", "tpot")
    figure = make_subplots(rows=1, cols=2, subplot_titles=[f"{kind.upper()} (s)" for kind in kinds])
    for number, run in enumerate(runs):
        outcomes = run.result.outcomes
        for column, kind in enumerate(kinds, 1):
            middle_s, p50, p99 = _course(outcomes.arrival_s, getattr(outcomes, f"{kind}_s"), outcomes.completed)
            figure.add_trace(_line(run, number, middle_s, p50, legend=column == 1), row=1, col=column)
            figure.add_trace(_line(run, number, middle_s, p99, legend=False, dash="dot"), row=1, col=column)
    slo = runs[0].spec.slo
    for column, target in ((1, slo.ttft_s), (2, slo.tpot_s)):
        figure.add_hline(y=target, line={"dash": "dash", "color": palette.BAD, "width": 1}, row=1, col=column)
    figure.update_xaxes(title_text="seconds from the start")
    figure.update_yaxes(type="log", dtick="D2")
    return _framed(figure, 380, len(runs))


def goodput_figure(runs: Sequence[Run]) -> go.Figure:
    """SLO attainment at each rate that the search tried."""
    figure = make_subplots(rows=1, cols=1)
    for number, run in enumerate(runs):
        tried = sorted(run.goodput.tried) if run.goodput is not None else []
        rates, attained = np.array([rate for rate, _ in tried]), np.array([share for _, share in tried])
        figure.add_trace(_line(run, number, rates, attained, legend=True, mode="lines+markers"))
    figure.update_xaxes(title_text="requests/s")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return _framed(figure, 340, len(runs))


def load_plot(result: SimResult, timeline: LoadTimeline, label: str) -> Plot:
    """Role, requests in decode, queued prefill tokens and KV of each instance over time."""
    names = [use.instance_id for use in result.instances]
    gone = timeline.role < 0
    rows: tuple[tuple[str, NDArray[np.generic], str, float | None], ...] = (
        ("role", np.where(gone, -1, timeline.role), "", 1.0),
        ("requests in decode", timeline.decoding, palette.DECODE, None),
        ("prefill tokens that wait", timeline.queued_prefill_tokens, palette.PREFILL, None),
        ("share of KV in use", timeline.kv_share, palette.TRANSFER, 1.0),
    )
    figure = make_subplots(
        rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[row[0] for row in rows]
    )
    for number, (title, values, colour, most) in enumerate(rows, 1):
        known = np.asarray(values, dtype=np.float64) if not colour else np.where(gone, np.nan, values)
        figure.add_trace(_heat(timeline, names, title, known, -1.0 if not colour else 0.0, most), row=number, col=1)
    figure.update_xaxes(title_text="seconds from the start", row=len(rows), col=1)
    figure.update_yaxes(autorange="reversed")
    _framed(figure, len(rows) * (70 + min(18, max(6, 900 // len(names))) * len(names)), 0)
    scales = (
        {at: _roles(ground) if not colour else ground.heat(colour) for at, (_, _, colour, _) in enumerate(rows)}
        for ground in (palette.LIGHT, palette.DARK)
    )
    return Plot(f"load-{file_word(label)}", f"Load of each instance: {label}", figure, "", *scales)


def _heat(
    timeline: LoadTimeline, names: list[str], title: str, values: NDArray[np.float64], least: float, most: float | None
) -> go.Heatmap:
    return go.Heatmap(
        x=timeline.time_s,
        y=names,
        z=values.T,
        zmin=least,
        zmax=most,
        showscale=False,
        hovertemplate=f"%{{y}} at %{{x:.2f}} s<br>{title}: %{{z}}<extra></extra>",
    )


def _roles(ground: palette.Ground) -> Scale:
    """The colour scale of -1, 0, 1: gone, prefill, decode."""
    shades = (ground.line, palette.PREFILL, palette.DECODE)
    return [(edge / 3, shade) for at, shade in enumerate(shades) for edge in (at, at + 1)]


def _line(
    run: Run,
    number: int,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    *,
    legend: bool,
    dash: str = "solid",
    mode: str = "lines",
) -> go.Scatter:
    colour = palette.SERIES[number % len(palette.SERIES)]
    group = {"name": run.label, "legendgroup": run.label, "showlegend": legend}
    return go.Scatter(x=x, y=y, mode=mode, line={"color": colour, "dash": dash, "width": 2}, **group)


def _framed(figure: go.Figure, height: int, labels: int) -> go.Figure:
    """The common layout, without colours, which depend on the theme; with a legend for several labels."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 8, "t": 36, "b": 8},
        showlegend=labels > 1,
        legend={"orientation": "h", "y": -0.2},
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def _distribution(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not len(values):
        return np.empty(0), np.empty(0)
    shares = np.linspace(0.0, 1.0, min(_POINTS, len(values)) + 1)
    return np.asarray(np.quantile(values, shares), dtype=np.float64), shares


def _course(
    arrival_s: NDArray[np.float64], values_s: NDArray[np.float64], completed: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The middle of each interval with enough requests, with their median and 99th percentile."""
    use = completed & np.isfinite(values_s)
    if not use.any():
        return np.empty(0), np.empty(0), np.empty(0)
    edges = np.linspace(arrival_s[0], arrival_s[-1], _INTERVALS + 1)
    at = np.clip(np.searchsorted(edges, arrival_s, side="right") - 1, 0, _INTERVALS - 1)
    rows = [
        ((edges[one] + edges[one + 1]) / 2, *np.quantile(values_s[chosen], (0.5, 0.99)))
        for one in range(_INTERVALS)
        if (chosen := use & (at == one)).sum() >= _MIN_REQUESTS
    ]
    middle, p50, p99 = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return middle, p50, p99


NAME = "report.html"
_HERE = Path(__file__).parent


def write_page(folder: Path, deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> Path:
    """Write `report.html` into a folder, which is created if needed. Raises InvalidRequest."""
    file = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(page(deployment, workload, runs), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return file


def page(deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> str:
    """The HTML document."""
    plots = plots_of(runs)
    cluster, traffic = report.summary_lines(deployment, workload, runs)
    body = [
        f"<h1>{escape(deployment.name)}</h1>",
        f"<p>{escape(cluster)}</p><p class=soft>{escape(traffic)}</p>",
        *_alarms(deployment, runs),
        "<h2>Figures</h2>",
        _table(report.figures_table(runs), [None, None, *range(len(runs))] if len(runs) > 1 else []),
        *(_section(plot) for plot in plots),
        *(f"<h2>Instances: {escape(run.label)}</h2>{_table(report.instances_table(run))}" for run in runs),
    ]
    script = f"const GROUNDS = {_grounds()};\nconst PLOTS = {_data(plots)};\n{(_HERE / 'page.js').read_text()}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(deployment.name)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">\n<style>{_style()}</style>\n'
        f"<script>{get_plotlyjs()}</script></head>\n<body>\n" + "\n".join(body) + f"\n<script>{script}</script>\n"
        "</body></html>\n"
    )


def _alarms(deployment: Deployment, runs: Sequence[Run]) -> list[str]:
    alarms = []
    for impossible, labels in report.impossible_by_label(deployment, runs).items():
        headline, details = map(escape, impossible.sentences())
        where = f" <span class=soft>({escape(', '.join(labels))})</span>" if len(labels) < len(runs) else ""
        alarms.append(f'<div class="alarm"><b>{headline}</b>{details}{where}</div>')
    return alarms


def _section(plot: Plot) -> str:
    key = f'<p class="soft">{escape(plot.note)}</p>' if plot.note else ""
    if plot.light:  # heat maps have no legend
        colours = (("prefill", palette.PREFILL), ("decode", palette.DECODE))
        dots = "".join(
            f'<span><i class="dot" style="background:{colour}"></i>{name}</span>' for name, colour in colours
        )
        key = f'<p class="key soft">{dots}<span>grey: gone</span></p>'
    return f'<h2>{escape(plot.title)}</h2>{key}<div class="panel"><div id="{escape(plot.name)}"></div></div>'


def _table(table: Table, series: Sequence[int | None] = ()) -> str:
    """A table as HTML. series: for each column the number of the series whose colour it has."""
    left = [column.justify == "left" for column in table.columns]
    heads = []
    for at, column in enumerate(table.columns):
        number = series[at] if at < len(series) else None
        dot = "" if number is None else f'<i class="dot" style="background:{_series(number)}"></i>'
        heads.append(f"<th{_words(left[at])}>{dot}{_cell(column.header)}</th>")
    columns = [[*column.cells] for column in table.columns]
    rows = [
        "<tr>" + "".join(f"<td{_words(left[at])}>{_cell(cell)}</td>" for at, cell in enumerate(row)) + "</tr>"
        for row in zip(*columns, strict=True)
    ]
    return f'<div class="scroll"><table><tr>{"".join(heads)}</tr>{"".join(rows)}</table></div>'


def _series(number: int) -> str:
    return palette.SERIES[number % len(palette.SERIES)]


def _words(left: bool) -> str:
    return ' class="words"' if left else ""


def _cell(cell: object) -> str:
    return escape(cell.plain if isinstance(cell, Text) else str(cell)).replace("\n", "<br>")


def _style() -> str:
    grounds = {"light": palette.LIGHT, "dark": palette.DARK}
    values = {f"{name}_{part}": colour for name, ground in grounds.items() for part, colour in asdict(ground).items()}
    return Template((_HERE / "page.css").read_text()).substitute(values, bad=palette.BAD)


def _grounds() -> str:
    return json.dumps({"light": asdict(palette.LIGHT), "dark": asdict(palette.DARK)})


def _data(plots: Sequence[Plot]) -> str:
    """The plots as JavaScript; without `</`, which would end the script."""
    parts = [
        f'{{"name": {json.dumps(plot.name)}, "light": {json.dumps(plot.light)}, "dark": {json.dumps(plot.dark)}, '
        f'"figure": {plot.figure.to_json()}}}'
        for plot in plots
    ]
    return f"[{', '.join(parts)}]".replace("</", "<\\/")
