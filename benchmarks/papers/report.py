"""Report of `polyphase bench papers`: a paper's figures beside ours, charts as SVG, and `docs/papers.md`, which is
generated from the sections and the texts of `prose.yaml`.

Signs and orders must be right; a claimed gain must be met within ±30 % of itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from html import escape
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any

import msgspec

from shared.files.yaml_file import read_yaml

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 46, 58
_COLOURS = ("#8b97a8", "#1f77b4", "#e28743", "#4c9f70", "#a05195", "#c0504d")


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars in groups: `series` maps a name to one value for each of `groups`. `name` is the file's stem."""

    name: str
    title: str
    unit: str
    groups: tuple[str, ...]
    series: Mapping[str, Sequence[float]]

    def svg(self) -> str:
        """The drawing; the same input gives the same text."""
        values = [v for bars in self.series.values() for v in bars]
        low, high, step = _axis(min(0.0, *values), max(0.0, *values))
        parts = [_OPEN, _text(_LEFT, 20, f"{self.title} [{self.unit}]", "title")]
        parts += self._legend()
        tick = low
        while tick <= high + step / 2:
            y = _y(tick, low, high)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "tick"))
            tick = round(tick + step, 10)
        parts += self._bars(low, high)
        return "\n".join([*parts, "</svg>\n"])

    def _legend(self) -> list[str]:
        parts, x = [], float(_LEFT)
        for name, colour in zip(self.series, _COLOURS, strict=False):
            parts.append(f'<rect x="{x:.0f}" y="28" width="10" height="10" fill="{colour}"/>')
            parts.append(_text(x + 14, 37, name, "name"))
            x += 30 + 7 * len(name)
        return parts

    def _bars(self, low: float, high: float) -> list[str]:
        parts = []
        room = (_WIDTH - _LEFT - _RIGHT) / len(self.groups)
        width = room * 0.8 / len(self.series)
        zero = _y(0.0, low, high)
        for at, group in enumerate(self.groups):
            begin = _LEFT + at * room + room * 0.1
            for which, (bars, colour) in enumerate(zip(self.series.values(), _COLOURS, strict=False)):
                x, y = begin + which * width, _y(bars[at], low, high)
                top, tall = min(y, zero), max(abs(y - zero), 0.5)
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{width * 0.94:.1f}" height="{tall:.1f}" fill="{colour}">'
                    f"<title>{bars[at]:.4g}</title></rect>"
                )
            for line, words in enumerate(_wrapped(group, max(6, int(room / 6.5)))):
                parts.append(_text(begin + room * 0.4, _HEIGHT - _BOTTOM + 16 + 13 * line, words, "group"))
        return parts


_OPEN = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
    'font-family="sans-serif" font-size="11">\n'
    "<style>.title{font-size:13px;font-weight:bold}.tick{text-anchor:end;fill:#666}.group{text-anchor:middle}"
    ".grid{stroke:#ddd}</style>\n"
    f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
)


def _axis(low: float, high: float) -> tuple[float, float, float]:
    """Round ends and spacing of some five ticks."""
    span = (high - low) or 1.0
    power = 10.0 ** floor(log10(span / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span / 5)
    return floor(low / step) * step, ceil(high / step) * step, step


def _y(number: float, low: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - (number - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines[:3]


WITHIN = 0.30


class Check(StrEnum):
    """What an aim of a row judges."""

    SIGN = "sign"
    ORDER = "order"
    MAGNITUDE = "magnitude"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one paper. `checks`: what was judged and whether it held; none for a row that only informs.

    key: unique within its section, for the JSON's names. paper, ours: what the table shows. figure, claimed: the same
    as numbers, where they are. want: what the magnitude has to be. note: why, where something was missed.
    """

    key: str
    where: str
    what: str
    unit: str
    paper: str
    ours: str
    figure: float | None = None
    claimed: float | None = None
    checks: tuple[tuple[Check, bool], ...] = ()
    want: str = ""
    note: str = ""

    @property
    def met(self) -> bool:
        return all(held for _, held in self.checks)


@dataclass(frozen=True, slots=True)
class Section:
    """One paper: its rows, its charts, how it was set up here, and what of it is otherwise or not here."""

    name: str  # short, for names in the JSON and in `prose.yaml`
    title: str
    rows: tuple[Row, ...]
    charts: tuple[Chart, ...] = ()
    setup: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


def _rounded(percent: float) -> float:
    """Without the rounding error of a zero difference."""
    return round(percent, 9) + 0.0


def gain(key: str, where: str, what: str, claimed: float, ours: float, unit: str = "%") -> Row:
    """A claimed change in percent, of either sign: sign right, and within ±30 % of the claim."""
    ours = _rounded(ours)
    low, high = sorted((claimed * (1 - WITHIN), claimed * (1 + WITHIN)))
    checks = ((Check.SIGN, claimed * ours > 0), (Check.MAGNITUDE, low <= ours <= high))
    return Row(
        key, where, what, unit, f"{claimed:+.3g}", f"{ours:+.3g}", ours, claimed, checks, f"{low:.3g} … {high:.3g}"
    )


def ratio_gain(key: str, where: str, what: str, claimed: float, ours: float) -> Row:
    """A claimed ratio whose distance from 1 is the gain: on the right side of 1, and the gain within ±30 %."""
    low, high = sorted((1 + (claimed - 1) * (1 - WITHIN), 1 + (claimed - 1) * (1 + WITHIN)))
    checks = ((Check.SIGN, (claimed - 1) * (ours - 1) > 0), (Check.MAGNITUDE, low <= ours <= high))
    return Row(key, where, what, "x", f"{claimed:.3g}", f"{ours:.3g}", ours, claimed, checks, f"{low:.3g} … {high:.3g}")


def factor(key: str, where: str, what: str, claimed: float, ours: float, unit: str = "x") -> Row:
    """A claimed slow-down or share, which is no gain: on the right side of 1 (for "x") and within ±30 %."""
    low, high = claimed * (1 - WITHIN), claimed * (1 + WITHIN)
    checks: tuple[tuple[Check, bool], ...] = ((Check.MAGNITUDE, low <= ours <= high),)
    if unit == "x":
        checks = ((Check.SIGN, (claimed - 1) * (ours - 1) > 0), *checks)
    return Row(
        key, where, what, unit, f"{claimed:.4g}", f"{ours:.4g}", ours, claimed, checks, f"{low:.3g} … {high:.3g}"
    )


def value(key: str, where: str, what: str, unit: str, claimed: float, ours: float, within: float = WITHIN) -> Row:
    """An absolute figure, within a share of the paper's."""
    low, high = claimed * (1 - within), claimed * (1 + within)
    checks = ((Check.MAGNITUDE, low <= ours <= high),)
    return Row(
        key, where, what, unit, f"{claimed:.4g}", f"{ours:.4g}", ours, claimed, checks, f"{low:.3g} … {high:.3g}"
    )


def points(key: str, where: str, what: str, claimed: float, ours: float, within: float) -> Row:
    """A claimed change of about nothing, in percent: within that many points."""
    ours = _rounded(ours)
    checks = ((Check.MAGNITUDE, abs(ours - claimed) <= within),)
    want = f"{claimed - within:+.3g} … {claimed + within:+.3g}"
    return Row(key, where, what, "%", f"~{claimed:g}", f"{ours:+.3g}", ours, claimed, checks, want)


def between(key: str, where: str, what: str, unit: str, low: float, high: float, ours: float, shown: str = "") -> Row:
    """A claim of a range or a bound (`high` infinite for "more than")."""
    text = shown or (f"{low:g}–{high:g}" if isfinite(high) else f"> {low:g}")
    checks = ((Check.MAGNITUDE, low <= ours <= high),)
    return Row(key, where, what, unit, text, f"{ours:.4g}", ours, None, checks, text)


def order(key: str, where: str, what: str, paper: str, ours: str, held: bool) -> Row:
    return Row(key, where, what, "", paper, ours, None, None, ((Check.ORDER, held),), paper)


def informative(key: str, where: str, what: str, unit: str, paper: str, ours: float) -> Row:
    """A figure without an aim."""
    return Row(key, where, what, unit, paper, f"{ours:.4g}", ours)


def as_result(sections: Iterable[Section]) -> dict[str, Any]:
    """Figures, aims and notes of a measuring command."""
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    for section in sections:
        for row in section.rows:
            name = f"{section.name}_{row.key}"
            unit = _UNITS.get(row.unit, row.unit)
            if row.figure is not None:
                result["figures"][f"{name}_{unit}"] = round(row.figure, 4)
            if row.claimed is not None:
                result["figures"][f"{name}_paper_{unit}"] = row.claimed
            for check, held in row.checks:
                result["aims"][f"{name}_{check}"] = _aim(row, check, held)
            if row.note and not row.met:
                result["notes"].append(f"{section.title}, {row.where}, {row.what}: {row.note}")
    return result


_UNITS = {"%": "percent", "x": "ratio", "": "value", "req/s": "rps", "tokens/s": "tokens_s"}


def _aim(row: Row, check: Check, held: bool) -> dict[str, Any]:
    want = {Check.MAGNITUDE: row.want, Check.ORDER: row.paper}.get(check, f"{check} of {row.paper}")
    aim: dict[str, Any] = {"want": want, "got": row.ours, "met": held}
    if row.note and not held:
        aim["note"] = row.note
    return aim


# Texts of the page, from `prose.yaml`.

PROSE = Path(__file__).with_name("prose.yaml")


class Prose(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One paper's. misses: why, by pattern of row keys. differs: what the product does otherwise, or does not have."""

    setup: tuple[str, ...]
    misses: Mapping[str, str]
    differs: tuple[str, ...]


def told_in_words(section: Section) -> Section:
    """The section with its set-up, what differs, and a note on each row that misses something."""
    prose = msgspec.convert(read_yaml(PROSE)[section.name], Prose)
    rows = tuple(_noted(row, prose.misses) for row in section.rows)
    return replace(section, setup=prose.setup, differs=prose.differs, rows=rows)


def _noted(row: Row, misses: Mapping[str, str]) -> Row:
    if row.met:
        return row
    note = next((note for pattern, note in misses.items() if fnmatchcase(row.key, pattern)), "")
    return replace(row, note=note)


# `docs/papers.md` and its charts, generated from the sections and never edited by hand.

_HEAD = """# The papers, and what we get

Written by `polyphase bench papers --write-docs docs`; edit the bench, not this page.

Each row is a figure that a paper prints, beside what the policies and the cost model of this product give for the
same experiment in the simulator (`shared/sim`), or in the step model alone where no cluster is needed. Charts have the
paper in grey.

- **sign, order**: whether the change has the sign, or the choices have the order, that the paper reports.
- **±30 %**: whether the claimed gain is met within ±30 % of itself (Cronus, Table 2: within 15 % of the figure). The
  gain of a ratio is its distance from 1. Slow-downs, shares and times are compared as they are.
- **–**: nothing is asked of the row.

A row that misses stays here as missed, with a paragraph below its table that says why. The last list of each section
names what the product does otherwise than the paper, and what of the paper is not here.
"""


def write_docs(folder: Path, sections: Sequence[Section], coefficients: str) -> tuple[Path, ...]:
    """Write `papers.md` and `papers/*.svg` below `folder`; what was written."""
    charts = folder / "papers"
    charts.mkdir(parents=True, exist_ok=True)
    written = []
    for section in sections:
        for chart in section.charts:
            path = charts / f"{chart.name}.svg"
            path.write_text(chart.svg(), encoding="utf-8")
            written.append(path)
    page = folder / "papers.md"
    page.write_text(page_text(sections, coefficients), encoding="utf-8")
    return (page, *written)


def page_text(sections: Sequence[Section], coefficients: str) -> str:
    """The page. `coefficients`: the file of them, shown as it is."""
    parts = [_HEAD, _overview(sections), _coefficients(coefficients)]
    parts += [_section(section) for section in sections]
    return "\n".join(parts).rstrip() + "\n"


def _overview(sections: Iterable[Section]) -> str:
    lines = ["| paper | rows | sign and order | magnitude |", "|---|---|---|---|"]
    for section in sections:
        shape = [held for row in section.rows for check, held in row.checks if check is not Check.MAGNITUDE]
        size = [held for row in section.rows for check, held in row.checks if check is Check.MAGNITUDE]
        name = section.title.split(":")[0]
        lines.append(f"| [{name}](#{_anchor(section.title)}) | {len(section.rows)} | {_of(shape)} | {_of(size)} |")
    return "\n".join([*lines, ""])


def _coefficients(text: str) -> str:
    return f"## One set of coefficients\n\n```yaml\n{text.strip()}\n```\n"


def _section(section: Section) -> str:
    lines = [f"## {section.title}", ""]
    lines += [f"- {line}" for line in section.setup]
    lines += ["", "| source | figure | paper | ours | sign, order | ±30 % |", "|---|---|---|---|---|---|"]
    lines += [_row(row) for row in section.rows]
    lines.append("")
    lines += [f"![{chart.title}](papers/{chart.name}.svg)\n" for chart in section.charts]
    missed = _missed(section.rows)
    if missed:
        lines += ["### Missed, and why", "", *missed, ""]
    if section.differs:
        lines += ["### Otherwise, or not here", "", *(f"- {line}" for line in section.differs), ""]
    return "\n".join(lines)


def _row(row: Row) -> str:
    unit = f" {row.unit}" if row.unit else ""
    shape = [held for check, held in row.checks if check is not Check.MAGNITUDE]
    size = [held for check, held in row.checks if check is Check.MAGNITUDE]
    paper = row.paper if row.paper == "–" else f"{row.paper}{unit}"
    return f"| {row.where} | {row.what} | {paper} | {row.ours}{unit} | {_mark(shape)} | {_mark(size)} |"


def _missed(rows: Iterable[Row]) -> list[str]:
    """One paragraph for each note, with the rows that it speaks for."""
    by_note: dict[str, list[str]] = {}
    for row in rows:
        if not row.met:
            by_note.setdefault(row.note or "no explanation yet", []).append(f"{row.where}, {row.what}")
    return [f"- **{'; '.join(which)}**: {note}." for note, which in by_note.items()]


def _mark(held: Sequence[bool]) -> str:
    return "–" if not held else "✔" if all(held) else "✘"


def _of(held: Sequence[bool]) -> str:
    return f"{sum(held)} of {len(held)}" if held else "–"


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
