"""A paper's figures beside ours, as the result of `polyphase bench papers` and as the page `docs/papers.md`.

Signs and orders must be right; a claimed gain must be met within ±30 % of itself. The page is generated from the rows
and from the texts of `prose.yaml`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path

import msgspec

from benchmarks.results import Result
from shared.files.yaml_file import read_yaml

WITHIN = 0.30
PROSE = Path(__file__).with_name("prose.yaml")


class Check(StrEnum):
    """What an aim of a row judges."""

    SIGN = "sign"
    ORDER = "order"
    MAGNITUDE = "magnitude"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one paper. checks: what was judged and whether it held; none for a row that only informs.

    key: unique within its section. paper, ours: what the table shows; claimed, figure: the same as numbers. want: the
    range of the magnitude. note: why something was missed.
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

    def held(self, *kinds: Check) -> list[bool]:
        return [held for check, held in self.checks if check in kinds]


@dataclass(frozen=True, slots=True)
class Section:
    """One paper. setup, differs: texts of `prose.yaml`."""

    name: str
    title: str
    rows: tuple[Row, ...]
    setup: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


def gain(key: str, where: str, what: str, claimed: float, ours: float) -> Row:
    """A claimed change in percent, of either sign: sign right, and within ±30 % of the claim."""
    ours = _without_noise(ours)
    low, high = sorted((claimed * (1 - WITHIN), claimed * (1 + WITHIN)))
    checks = ((Check.SIGN, claimed * ours > 0), (Check.MAGNITUDE, low <= ours <= high))
    return Row(key, where, what, "%", f"{claimed:+.3g}", f"{ours:+.3g}", ours, claimed, checks, _range(low, high))


def ratio_gain(key: str, where: str, what: str, claimed: float, ours: float) -> Row:
    """A claimed ratio whose distance from 1 is the gain: on the right side of 1, and the gain within ±30 %."""
    low, high = sorted((1 + (claimed - 1) * (1 - WITHIN), 1 + (claimed - 1) * (1 + WITHIN)))
    checks = ((Check.SIGN, (claimed - 1) * (ours - 1) > 0), (Check.MAGNITUDE, low <= ours <= high))
    return Row(key, where, what, "x", f"{claimed:.3g}", f"{ours:.3g}", ours, claimed, checks, _range(low, high))


def factor(key: str, where: str, what: str, claimed: float, ours: float) -> Row:
    """A claimed slow-down, which is no gain: on the right side of 1 and within ±30 %."""
    row = value(key, where, what, "x", claimed, ours)
    return replace(row, checks=((Check.SIGN, (claimed - 1) * (ours - 1) > 0), *row.checks))


def value(key: str, where: str, what: str, unit: str, claimed: float, ours: float, within: float = WITHIN) -> Row:
    """An absolute figure, within a share of the paper's."""
    low, high = claimed * (1 - within), claimed * (1 + within)
    checks = ((Check.MAGNITUDE, low <= ours <= high),)
    return Row(key, where, what, unit, f"{claimed:.4g}", f"{ours:.4g}", ours, claimed, checks, _range(low, high))


def points(key: str, where: str, what: str, claimed: float, ours: float, within: float) -> Row:
    """A claimed change of about nothing, in percent: within that many points."""
    ours = _without_noise(ours)
    checks = ((Check.MAGNITUDE, abs(ours - claimed) <= within),)
    want = f"{claimed - within:+.3g} … {claimed + within:+.3g}"
    return Row(key, where, what, "%", f"~{claimed:g}", f"{ours:+.3g}", ours, claimed, checks, want)


def between(key: str, where: str, what: str, unit: str, low: float, high: float, ours: float, shown: str = "") -> Row:
    """A claim of a range or a bound (`high` infinite for "more than")."""
    text = shown or (f"{low:g}–{high:g}" if isfinite(high) else f"> {low:g}")
    return Row(key, where, what, unit, text, f"{ours:.4g}", ours, None, ((Check.MAGNITUDE, low <= ours <= high),), text)


def order(key: str, where: str, what: str, paper: str, ours: str, held: bool) -> Row:
    return Row(key, where, what, "", paper, ours, checks=((Check.ORDER, held),), want=paper)


def informative(key: str, where: str, what: str, unit: str, paper: str, ours: float) -> Row:
    """A figure without an aim."""
    return Row(key, where, what, unit, paper, f"{ours:.4g}", ours)


def _without_noise(percent: float) -> float:
    """Without the rounding error of a zero difference."""
    return round(percent, 9) + 0.0


def _range(low: float, high: float) -> str:
    return f"{low:.3g} … {high:.3g}"


_UNITS = {"%": "percent", "x": "ratio", "": "value", "req/s": "rps", "tokens/s": "tokens_s"}


def as_result(sections: Iterable[Section]) -> Result:
    result: Result = {"figures": {}, "aims": {}, "notes": []}
    for section in sections:
        for row in section.rows:
            name = f"{section.name}_{row.key}"
            unit = _UNITS.get(row.unit, row.unit)
            if row.figure is not None:
                result["figures"][f"{name}_{unit}"] = round(row.figure, 4)
            if row.claimed is not None:
                result["figures"][f"{name}_paper_{unit}"] = row.claimed
            for check, held in row.checks:
                want = f"sign of {row.paper}" if check is Check.SIGN else row.want
                note = {"note": row.note} if row.note and not held else {}
                result["aims"][f"{name}_{check}"] = {"want": want, "got": row.ours, "met": held, **note}
            if row.note and not row.met:
                result["notes"].append(f"{section.title}, {row.where}, {row.what}: {row.note}")
    return result


class Prose(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts on one paper. misses: the reason of a miss, by pattern of row keys. differs: what the product lacks."""

    setup: tuple[str, ...]
    misses: Mapping[str, str]
    differs: tuple[str, ...]


def with_prose(section: Section) -> Section:
    """The section with its texts, and a note on each row that misses something."""
    prose = msgspec.convert(read_yaml(PROSE)[section.name], Prose)

    def noted(row: Row) -> Row:
        fitting = (note for pattern, note in prose.misses.items() if fnmatchcase(row.key, pattern))
        return row if row.met else replace(row, note=next(fitting, ""))

    return replace(section, setup=prose.setup, differs=prose.differs, rows=tuple(map(noted, section.rows)))


_HEAD = """# The papers, and what we get

Written by `polyphase bench papers --write-docs docs`; edit the bench, not this page.

Each row is a figure that a paper prints, beside what the policies and the cost model of this product give for the
same experiment in the simulator (`shared/sim`), or in the step model alone where no cluster is needed.

- **sign, order**: whether the change has the sign, or the choices have the order, that the paper reports.
- **±30 %**: whether the claimed gain is met within ±30 % of itself (Cronus, Table 2: within 15 % of the figure). The
  gain of a ratio is its distance from 1. Slow-downs, shares and times are compared as they are.
- **–**: the row has no aim.

A row that misses stays here as missed, with a paragraph below its table that says why. The last list of each section
names what the product does otherwise than the paper, and what of the paper is not here.
"""


def page_text(sections: Sequence[Section], coefficients: str) -> str:
    """The page `docs/papers.md`. coefficients: the text of their file, which the page shows."""
    overview = ["| paper | rows | sign and order | magnitude |", "|---|---|---|---|"]
    for section in sections:
        shape, size = ([held for row in section.rows for held in row.held(*kinds)] for kinds in _COLUMNS)
        name, anchor = section.title.split(":")[0], section.title.lower().replace(" ", "-")
        anchor = "".join(c for c in anchor if c.isalnum() or c in "-_")
        overview.append(f"| [{name}](#{anchor}) | {len(section.rows)} | {_count(shape)} | {_count(size)} |")
    shown = f"## One set of coefficients\n\n```yaml\n{coefficients.strip()}\n```\n"
    parts = [_HEAD, "\n".join([*overview, ""]), shown, *map(_section_text, sections)]
    return "\n".join(parts).rstrip() + "\n"


_COLUMNS = (Check.SIGN, Check.ORDER), (Check.MAGNITUDE,)


def _section_text(section: Section) -> str:
    lines = [f"## {section.title}", "", *(f"- {line}" for line in section.setup)]
    lines += ["", "| source | figure | paper | ours | sign, order | ±30 % |", "|---|---|---|---|---|---|"]
    missed: dict[str, list[str]] = {}  # rows by their note
    for row in section.rows:
        unit = f" {row.unit}" if row.unit else ""
        paper = row.paper if row.paper == "–" else f"{row.paper}{unit}"
        marks = " | ".join(_mark(row.held(*kinds)) for kinds in _COLUMNS)
        lines.append(f"| {row.where} | {row.what} | {paper} | {row.ours}{unit} | {marks} |")
        if not row.met:
            missed.setdefault(row.note or "no explanation yet", []).append(f"{row.where}, {row.what}")
    if missed:
        lines += ["", "### Missed, and why", ""]
        lines += [f"- **{'; '.join(which)}**: {note}." for note, which in missed.items()]
    lines += ["", "### Otherwise, or not here", "", *(f"- {line}" for line in section.differs), ""]
    return "\n".join(lines)


def _mark(held: Sequence[bool]) -> str:
    return "–" if not held else "✔" if all(held) else "✘"


def _count(held: Sequence[bool]) -> str:
    return f"{sum(held)} of {len(held)}" if held else "–"
