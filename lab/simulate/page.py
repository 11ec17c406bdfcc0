"""One page that holds all of a simulation: figures, plots, instances; in light or dark, without a network."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs
from rich.table import Table
from rich.text import Text

from lab.simulate import impossible, report
from lab.simulate.deployment import Deployment
from lab.simulate.plots import Plot, plots_of
from lab.simulate.report import Run
from shared import palette
from shared.errors import InvalidRequest
from shared.sim.workload import Workload

NAME = "report.html"
_HERE = Path(__file__).parent


def write_page(folder: Path, deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> Path:
    """Write `report.html` into a folder, which is made. Raises InvalidRequest."""
    file = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(page(deployment, workload, runs), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return file


def page(deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> str:
    """The whole HTML document."""
    plots = plots_of(runs)
    cluster, traffic = report.in_words(deployment, workload, runs)
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
    told: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        if (found := impossible.found(run.result.outcomes, deployment.instances)) is not None:
            told.setdefault(found.sentences(), []).append(run.label)
    return [
        f'<div class="alarm"><b>{escape(loud)}</b>{escape(more)}{_of(labels, runs)}</div>'
        for (loud, more), labels in told.items()
    ]


def _of(labels: Sequence[str], runs: Sequence[Run]) -> str:
    return f" <span class=soft>({escape(', '.join(labels))})</span>" if len(labels) < len(runs) else ""


def _section(plot: Plot) -> str:
    key = f'<p class="soft">{escape(plot.note)}</p>' if plot.note else ""
    if plot.light:  # a heat map has no legend
        colours = (("prefill", palette.PREFILL), ("decode", palette.DECODE))
        dots = "".join(
            f'<span><i class="dot" style="background:{colour}"></i>{name}</span>' for name, colour in colours
        )
        key = f'<p class="key soft">{dots}<span>grey: gone</span></p>'
    return f'<h2>{escape(plot.title)}</h2>{key}<div class="panel"><div id="{escape(plot.name)}"></div></div>'


def _table(table: Table, series: Sequence[int | None] = ()) -> str:
    """A table as HTML. series: by column, as which of the series it is drawn."""
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
    """As a script may hold it: no `</` in it, which would end the script."""
    parts = [
        f'{{"name": {json.dumps(plot.name)}, "light": {json.dumps(plot.light)}, "dark": {json.dumps(plot.dark)}, '
        f'"figure": {plot.figure.to_json()}}}'
        for plot in plots
    ]
    return f"[{', '.join(parts)}]".replace("</", "<\\/")
