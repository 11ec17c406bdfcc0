"""A paper's figures beside ours, as the result of `polyphase bench papers` and as the page `docs/papers.md`.

`claims.yaml` has what each paper claims, `prose.yaml` the texts about it. Signs and orders must be right; a claimed
gain must be met within ±30 % of itself. The page is generated from both files and the figures of a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path

import msgspec

from benchmarks.results import Result, result
from shared.files.yaml_file import read_yaml

WITHIN = 0.30
CLAIMS, PROSE = (Path(__file__).with_name(name) for name in ("claims.yaml", "prose.yaml"))
Figure = float | tuple[str, bool]  # of an order: what was found, and whether it is the paper's


class Check(StrEnum):
    """What an aim of a row judges."""

    SIGN = "sign"
    ORDER = "order"
    MAGNITUDE = "magnitude"


class ClaimKind(StrEnum):
    """What a paper claims of a figure."""

    GAIN = "gain"  # a change in percent, of either sign: the sign right, and within ±30 % of the claim
    RATIO = "ratio"  # the distance from 1 is the gain: on the right side of 1, and the gain within ±30 %
    SLOWDOWN = "slowdown"  # no gain: on the right side of 1 and within ±30 %
    VALUE = "value"  # within a share of the paper's
    ABOUT = "about"  # a change of about nothing, in percent: within so many points
    RANGE = "range"
    ORDER = "order"
    NONE = "none"  # a figure without an aim


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One claim. claimed: of a range its bounds (no upper one for "more than"). shown: text for the table instead.

    what: may name other figures of the section in braces. within: a share; of `ABOUT`, points.
    """

    where: str
    what: str
    kind: ClaimKind
    claimed: float | tuple[float, ...] = 0.0
    unit: str = "%"
    within: float = WITHIN
    shown: str = ""

    def bounds(self) -> tuple[float, float]:
        """Of the magnitude."""
        if isinstance(self.claimed, tuple):
            return self.claimed[0], self.claimed[1] if self.claimed[1:] else inf
        if self.kind is ClaimKind.ABOUT:
            return self.claimed - self.within, self.claimed + self.within
        zero = 1.0 if self.kind is ClaimKind.RATIO else 0.0
        low, high = sorted(zero + (self.claimed - zero) * (1 + share) for share in (-self.within, self.within))
        return low, high

    def right_sign(self, ours: float) -> bool:
        assert isinstance(self.claimed, float)
        zero = 0.0 if self.kind is ClaimKind.GAIN else 1.0
        return (self.claimed - zero) * (ours - zero) > 0

    @property
    def paper(self) -> str:
        """The claim in the table."""
        if self.shown or self.kind in (ClaimKind.ORDER, ClaimKind.NONE):
            return self.shown
        if isinstance(self.claimed, tuple):
            return "–".join(f"{bound:g}" for bound in self.claimed) if self.claimed[1:] else f"> {self.claimed[0]:g}"
        return f"~{self.claimed:g}" if self.kind is ClaimKind.ABOUT else self.text_of(self.claimed)

    def text_of(self, figure: float) -> str:
        match self.kind:
            case ClaimKind.GAIN | ClaimKind.ABOUT:
                return f"{figure:+.3g}"
            case ClaimKind.RATIO:
                return f"{figure:.3g}"
        return f"{figure:.4g}"


SIGNED = (ClaimKind.GAIN, ClaimKind.RATIO, ClaimKind.SLOWDOWN)


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


def row_of(key: str, claim: Claim, figure: Figure) -> Row:
    """The claim beside the figure of a run."""
    paper = claim.paper
    if isinstance(figure, tuple):
        ours, held = figure
        return Row(key, claim.where, claim.what, "", paper, ours, checks=((Check.ORDER, held),), want=paper)
    if claim.kind in (ClaimKind.GAIN, ClaimKind.ABOUT):
        figure = round(figure, 9) + 0.0  # without the rounding error of a zero difference
    row = Row(key, claim.where, claim.what, claim.unit, paper, claim.text_of(figure), figure)
    if claim.kind is ClaimKind.NONE:
        return row
    low, high = claim.bounds()
    checks = (
        [(Check.SIGN, claim.right_sign(figure))]
        if claim.kind in (ClaimKind.GAIN, ClaimKind.RATIO, ClaimKind.SLOWDOWN)
        else []
    )
    checks.append((Check.MAGNITUDE, low <= figure <= high))
    if isinstance(claim.claimed, tuple):
        return replace(row, checks=tuple(checks), want=paper)
    form = "{:+.3g} … {:+.3g}" if claim.kind is ClaimKind.ABOUT else "{:.3g} … {:.3g}"
    return replace(row, checks=tuple(checks), want=form.format(low, high), claimed=claim.claimed)


@dataclass(frozen=True, slots=True)
class Section:
    """One paper. setup, differs: texts of `prose.yaml`."""

    name: str
    title: str
    rows: tuple[Row, ...]
    setup: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


def claims_of(name: str) -> dict[str, Claim]:
    return msgspec.convert(read_yaml(CLAIMS)[name], dict[str, Claim], strict=False)


def section_of(
    name: str, title: str, figures: Mapping[str, Figure], more: Mapping[str, Claim] | None = None
) -> Section:
    """A row for each claim on the paper, those in `more` first, with its texts and a note on each row that misses.

    Raises KeyError for a claim without a figure.
    """
    claims = {**(more or {}), **claims_of(name)}
    rows = []
    for key, claim in claims.items():
        named = msgspec.structs.replace(claim, what=claim.what.format_map(figures))
        rows.append(row_of(key, named, figures[key]))
    return with_prose(Section(name, title, tuple(rows)))


_UNITS = {"%": "percent", "x": "ratio", "": "value", "req/s": "rps", "tokens/s": "tokens_s"}


def as_result(sections: Iterable[Section]) -> Result:
    found = result({})
    for section in sections:
        for row in section.rows:
            name = f"{section.name}_{row.key}"
            unit = _UNITS.get(row.unit, row.unit)
            if row.figure is not None:
                found["figures"][f"{name}_{unit}"] = round(row.figure, 4)
            if row.claimed is not None:
                found["figures"][f"{name}_paper_{unit}"] = row.claimed
            for check, held in row.checks:
                want = f"sign of {row.paper}" if check is Check.SIGN else row.want
                note = {"note": row.note} if row.note and not held else {}
                found["aims"][f"{name}_{check}"] = {"want": want, "got": row.ours, "met": held, **note}
            if row.note and not row.met:
                found["notes"].append(f"{section.title}, {row.where}, {row.what}: {row.note}")
    return found


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
