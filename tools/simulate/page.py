"""The report of a simulation as one HTML page: figures, plots of latency and load, instances.

The page needs no network access, and follows the light or dark theme of the browser: plots have no ground of their own
and colours that can be read on both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots
from rich.table import Table

from shared import palette
from shared.sim.outcomes import LoadTimeline, SimResult
from shared.sim.workload import Workload
from tools.simulate import report
from tools.simulate.deployment import Deployment
from tools.simulate.report import Run

NAME = "report.html"
_POINTS = 500  # of a distribution
_INTERVALS = 60  # of a run: percentiles are taken over each
_MIN_REQUESTS = 5  # of an interval that is shown
_STYLE = Path(__file__).with_name("page.css")
_LINE = "rgba(128,136,150,0.25)"  # of axes and grids, on any ground
_SLO_LINE = {"dash": "dash", "color": palette.BAD, "width": 1}


def write_page(folder: Path, deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> Path:
    """Write `report.html` into a folder, which is created if needed. Raises InvalidRequest."""
    with report.writing(folder):
        file = folder / NAME
        file.write_text(page(deployment, workload, runs), encoding="utf-8")
    return file


def page(deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> str:
    """The HTML document."""
    cluster, traffic = report.summary_lines(deployment, workload, runs)
    body = [
        f"<h1>{escape(deployment.name)}</h1>",
        f"<p>{escape(cluster)}</p><p class=soft>{escape(traffic)}</p>",
        *_alarms(deployment, runs),
        f"<h2>Figures</h2>{_table(report.figures_table(runs))}",
        *(
            f"<h2>{escape(title)}</h2>{figure.to_html(full_html=False, include_plotlyjs=False)}"
            for title, figure in figures_of(runs).items()
        ),
        *(f"<h2>Instances: {escape(run.label)}</h2>{_table(report.instances_table(run))}" for run in runs),
    ]
    grounds = {"light": palette.LIGHT, "dark": palette.DARK}
    colours = {f"{name}_{part}": colour for name, ground in grounds.items() for part, colour in asdict(ground).items()}
    style = Template(_STYLE.read_text()).substitute(colours, bad=palette.BAD)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(deployment.name)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{style}</style>\n<script>{get_plotlyjs()}</script></head>\n<body>\n" + "\n".join(body) + "\n"
        "</body></html>\n"
    )


def _alarms(deployment: Deployment, runs: Sequence[Run]) -> Iterator[str]:
    for impossible, labels in report.impossible_by_label(deployment, runs).items():
        headline, details = map(escape, impossible)
        where = f" <span class=soft>({escape(', '.join(labels))})</span>" if len(labels) < len(runs) else ""
        yield f'<div class="alarm"><b>{headline}</b>{details}{where}</div>'


def _table(table: Table) -> str:
    """A table as HTML, its two first columns to the left as all reports have them."""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    frame = pd.DataFrame(list(rows), columns=[str(column.header) for column in table.columns])
    return f'<div class="scroll">{frame.to_html(index=False, border=0)}</div>'


def figures_of(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """The plots by title, in the order of the page."""
    found = {
        "Latency: share of completed requests within a time": latency_figure(runs),
        "TTFT and TPOT by time of arrival": course_figure(runs),
    }
    if any(run.goodput is not None and run.goodput.tried for run in runs):
        found["Goodput: SLO attainment by rate"] = goodput_figure(runs)
    for run in runs:
        if run.result.timeline is not None and len(run.result.timeline.time_s):
            found[f"Load of each instance: {run.label}"] = load_figure(run.result, run.result.timeline)
    return found


def latency_figure(runs: Sequence[Run]) -> go.Figure:
    """Distribution functions of TTFT, TPOT and JCT of completed requests; the SLO as a dashed line."""
    figure = make_subplots(1, 3, subplot_titles=("TTFT (s)", "TPOT (s)", "JCT (s)"), shared_yaxes=True)
    for number, run in enumerate(runs):
        outcomes = run.result.outcomes
        for column, all_s in enumerate((outcomes.ttft_s, outcomes.tpot_s, outcomes.jct_s), 1):
            values_s = all_s[outcomes.completed & np.isfinite(all_s)]
            shares = np.linspace(0.0, 1.0, min(_POINTS, len(values_s)) + 1) if len(values_s) else np.empty(0)
            x = np.quantile(values_s, shares) if len(values_s) else values_s
            figure.add_scatter(x=x, y=shares, row=1, col=column, **_line(run, number, legend=column == 1))
    slo = runs[0].spec.slo
    for column, target in ((1, slo.ttft_s), (2, slo.tpot_s)):
        figure.add_vline(x=target, line=_SLO_LINE, row=1, col=column)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_xaxes(type="log", dtick="D2")
    return _framed(figure, 380, legend=len(runs) > 1)


def course_figure(runs: Sequence[Run]) -> go.Figure:
    """Median and 99th percentile (dotted) of TTFT and TPOT, by time of arrival; the SLO as a dashed line."""
    figure = make_subplots(1, 2, subplot_titles=("TTFT (s), dotted: p99", "TPOT (s), dotted: p99"))
    for number, run in enumerate(runs):
        outcomes = run.result.outcomes
        for column, values_s in enumerate((outcomes.ttft_s, outcomes.tpot_s), 1):
            middle_s, p50, p99 = _course(outcomes.arrival_s, values_s, outcomes.completed)
            figure.add_scatter(x=middle_s, y=p50, row=1, col=column, **_line(run, number, legend=column == 1))
            dotted = _line(run, number, legend=False, dash="dot")
            figure.add_scatter(x=middle_s, y=p99, row=1, col=column, **dotted)
    slo = runs[0].spec.slo
    for column, target in ((1, slo.ttft_s), (2, slo.tpot_s)):
        figure.add_hline(y=target, line=_SLO_LINE, row=1, col=column)
    figure.update_xaxes(title_text="seconds from the start")
    figure.update_yaxes(type="log", dtick="D2")
    return _framed(figure, 380, legend=len(runs) > 1)


def _course(
    arrival_s: NDArray[np.float64], values_s: NDArray[np.float64], completed: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The middle of each interval with enough requests, with their median and 99th percentile."""
    use = completed & np.isfinite(values_s)
    edges = np.linspace(arrival_s[0], arrival_s[-1], _INTERVALS + 1)
    at = np.clip(np.searchsorted(edges, arrival_s, side="right") - 1, 0, _INTERVALS - 1)
    rows = [
        ((edges[number] + edges[number + 1]) / 2, *np.quantile(values_s[chosen], (0.5, 0.99)))
        for number in range(_INTERVALS)
        if (chosen := use & (at == number)).sum() >= _MIN_REQUESTS
    ]
    middle_s, p50, p99 = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    return middle_s, p50, p99


def goodput_figure(runs: Sequence[Run]) -> go.Figure:
    """SLO attainment at each rate that the search tried."""
    figure = go.Figure()
    for number, run in enumerate(runs):
        tried = np.array(sorted(run.goodput.tried) if run.goodput is not None else []).reshape(-1, 2)
        figure.add_scatter(x=tried[:, 0], y=tried[:, 1], **_line(run, number, legend=True, mode="lines+markers"))
    figure.update_xaxes(title_text="requests/s")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return _framed(figure, 340, legend=len(runs) > 1)


def _line(run: Run, number: int, *, legend: bool, dash: str = "solid", mode: str = "lines") -> dict[str, object]:
    """The common look of the lines of a run."""
    colour = palette.SERIES[number % len(palette.SERIES)]
    line = {"color": colour, "dash": dash, "width": 2}
    return {"mode": mode, "name": run.label, "legendgroup": run.label, "showlegend": legend, "line": line}


def load_figure(result: SimResult, timeline: LoadTimeline) -> go.Figure:
    """Role, requests in decode, queued prefill tokens and KV of each instance over time."""
    names = [use.instance_id for use in result.instances]
    gone = timeline.role < 0

    def present(values: NDArray[np.generic]) -> NDArray[np.float64]:
        return np.asarray(np.where(gone, np.nan, values), dtype=np.float64)

    roles = np.where(gone, -1.0, timeline.role)
    rows: tuple[tuple[str, NDArray[np.float64], palette.Scale, float, float | None], ...] = (
        ("role: prefill blue, decode green, gone grey", roles, palette.ROLES, -1.0, 1.0),
        ("requests in decode", present(timeline.decoding), palette.fading(palette.DECODE), 0.0, None),
        ("queued prefill tokens", present(timeline.queued_prefill_tokens), palette.fading(palette.PREFILL), 0.0, None),
        ("share of KV in use", present(timeline.kv_share), palette.fading(palette.TRANSFER), 0.0, 1.0),
    )
    titles = [title for title, *_ in rows]
    figure = make_subplots(rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=titles)
    for number, (title, values, scale, low, high) in enumerate(rows, 1):
        heat = go.Heatmap(
            x=timeline.time_s, y=names, z=values.T, zmin=low, zmax=high, colorscale=scale, showscale=False
        )
        heat.hovertemplate = f"%{{y}} at %{{x:.2f}} s<br>{title}: %{{z}}<extra></extra>"
        figure.add_trace(heat, row=number, col=1)
    figure.update_xaxes(title_text="seconds from the start", row=len(rows), col=1)
    figure.update_yaxes(autorange="reversed")
    return _framed(figure, len(rows) * (70 + min(18, max(6, 900 // len(names))) * len(names)), legend=False)


def _framed(figure: go.Figure, height: int, legend: bool) -> go.Figure:
    """The common layout, on no ground."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 8, "t": 36, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": palette.IDLE, "size": 12},
        showlegend=legend,
        legend={"orientation": "h", "y": -0.2},
    )
    figure.update_xaxes(automargin=True, gridcolor=_LINE, zerolinecolor=_LINE, linecolor=_LINE)
    figure.update_yaxes(automargin=True, gridcolor=_LINE, zerolinecolor=_LINE, linecolor=_LINE)
    return figure
