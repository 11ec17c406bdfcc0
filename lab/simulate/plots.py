"""Pages to look at: distributions of latency by policy, and load and roles of each instance over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from lab.simulate.report import Run, file_word
from shared.errors import InvalidRequest
from shared.sim.outcomes import LoadTimeline, SimResult

_POINTS = 500  # of a distribution
# Role of an instance: gone, prefill, decode.
_ROLES = [
    [0.0, "#d9d9d9"],
    [0.33, "#d9d9d9"],
    [0.33, "#e8853a"],
    [0.67, "#e8853a"],
    [0.67, "#3a7be8"],
    [1.0, "#3a7be8"],
]


def write_plots(folder: Path, runs: Sequence[Run]) -> None:
    """`latency.html`, and `load-POLICY.html` for each run; they need no network. Raises InvalidRequest."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(latency_figure(runs), folder / "latency.html")
        for run in runs:
            if run.result.timeline is not None and len(run.result.timeline.time_s):
                page = load_figure(run.result, run.result.timeline, run.label)
                _write(page, folder / f"load-{file_word(run.label)}.html")
    except OSError as error:
        raise InvalidRequest(f"cannot write {error.filename or folder}: {error.strerror}") from error


def latency_figure(runs: Sequence[Run]) -> go.Figure:
    """Shares of completed requests whose TTFT, TPOT and JCT do not exceed a time; the SLO as a dashed line."""
    kinds = ("ttft", "tpot", "jct")
    figure = make_subplots(rows=1, cols=3, subplot_titles=[f"{kind.upper()} (s)" for kind in kinds], shared_yaxes=True)
    colours = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf")
    for number, run in enumerate(runs):
        outcomes = run.result.outcomes
        for column, kind in enumerate(kinds, 1):
            values = getattr(outcomes, f"{kind}_s")[outcomes.completed]
            seconds, shares = _distribution(values[np.isfinite(values)])
            figure.add_trace(
                go.Scatter(
                    x=seconds,
                    y=shares,
                    name=run.label,
                    legendgroup=run.label,
                    showlegend=column == 1,
                    mode="lines",
                    line={"color": colours[number % len(colours)]},
                ),
                row=1,
                col=column,
            )
    slo = runs[0].spec.slo
    for column, target in ((1, slo.ttft_s), (2, slo.tpot_s)):
        figure.add_vline(x=target, line={"dash": "dash", "color": "#888"}, row=1, col=column)
    figure.update_yaxes(title_text="share of requests", row=1, col=1)
    figure.update_xaxes(type="log")
    figure.update_layout(title=runs[0].result.workload, legend={"orientation": "h", "y": -0.15})
    return figure


def load_figure(result: SimResult, timeline: LoadTimeline, label: str) -> go.Figure:
    """Role, requests in decode, queued prefill tokens and KV of every instance over time."""
    names = [use.instance_id for use in result.instances]
    rows: tuple[tuple[str, NDArray[np.generic], object, float | None], ...] = (
        (
            "role (orange: prefill, blue: decode, grey: gone)",
            np.where(timeline.role < 0, -1, timeline.role),
            _ROLES,
            1.0,
        ),
        ("requests in decode", timeline.decoding, "Blues", None),
        ("prefill tokens that wait", timeline.queued_prefill_tokens, "Oranges", None),
        ("share of KV in use", timeline.kv_share, "Greens", 1.0),
    )
    figure = make_subplots(
        rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.05, subplot_titles=[row[0] for row in rows]
    )
    gone = timeline.role < 0
    for number, (title, values, colours, most) in enumerate(rows, 1):
        known = np.asarray(values, dtype=np.float64) if number == 1 else np.where(gone, np.nan, values)
        figure.add_trace(
            go.Heatmap(
                x=timeline.time_s,
                y=names,
                z=known.T,
                colorscale=colours,
                zmin=-1.0 if number == 1 else 0.0,
                zmax=most,
                showscale=False,
                hovertemplate=f"%{{y}} at %{{x:.2f}} s<br>{title}: %{{z}}<extra></extra>",
            ),
            row=number,
            col=1,
        )
    figure.update_xaxes(title_text="seconds", row=len(rows), col=1)
    figure.update_layout(title=label, height=4 * (110 + 18 * len(names)))
    return figure


def _distribution(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not len(values):
        return np.empty(0), np.empty(0)
    shares = np.linspace(0.0, 1.0, min(_POINTS, len(values)) + 1)
    return np.asarray(np.quantile(values, shares), dtype=np.float64), shares


def _write(figure: go.Figure, path: Path) -> None:
    figure.write_html(path, include_plotlyjs="directory")  # plotly.min.js beside it, once for all pages
