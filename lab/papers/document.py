"""`docs/papers.md` and its charts, written from the bench's sections: the page is never edited by hand."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.papers.rows import Check, Row, Section

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
