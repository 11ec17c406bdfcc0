"""Results of the demo's checks, and its report: sections with ticks and figures, and a summary at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table

FindingTable = tuple[tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `want` and `got` are for people."""

    name: str
    met: bool
    want: str = ""
    got: str = ""


@dataclass(slots=True)
class Section:
    """A part of the report: checks, figures (`name_unit` → number), and a table or lines to read."""

    title: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    table: FindingTable | None = None
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return all(check.met for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.met]

    def check(self, name: str, met: bool, want: Any = "", got: Any = "") -> bool:
        self.checks.append(Check(name, bool(met), str(want), str(got)))
        return bool(met)

    def equal(self, name: str, want: Any, got: Any) -> bool:
        """Check that two values are equal."""
        return self.check(name, want == got, want, got)

    def at_most(self, name: str, bound: float, got: float, unit: str = "s") -> bool:
        """Check that a figure keeps a bound."""
        return self.check(name, got <= bound, f"at most {bound:g} {unit}", f"{got:.3g} {unit}")


def show_section(console: Console, number: int, section: Section) -> None:
    mark = "[green]✔[/]" if section.ok else "[red]✘[/]"
    title = f"{mark} [bold]{number}. {escape(section.title)}[/]  [dim]{section.took_s:.1f} s[/]"
    console.print(Rule(title, align="left", style="dim"))
    if section.table is not None:
        console.print(_table(*section.table, terse=len(section.table[1]) > 10))
    for line in section.lines:
        console.print(f"  [dim]{escape(line)}[/]")
    terse = section.table is not None and len(section.checks) > 10
    for check in section.failures if terse else section.checks:
        console.print(_check(check))
    if terse and section.ok:
        console.print(f"  [green]✔[/] all {len(section.checks)} as they should be")
    console.print()


def show_summary(console: Console, sections: Sequence[Section], figures: dict[str, float]) -> None:
    """All sections in one table, the figures, and whether everything held."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for number, section in enumerate(sections, 1):
        held = sum(check.met for check in section.checks)
        table.add_row(
            "[green]✔[/]" if section.ok else "[red]✘[/]", f"{number}. {section.title}", f"{held}/{len(section.checks)}"
        )
    good = all(section.ok for section in sections)
    style, verdict = ("green", "Everything held.") if good else ("red", "Something did not hold: see above.")
    console.print(Panel(table, title="What was shown", title_align="left", border_style=style, expand=False))
    console.print(_figures(figures))
    console.print(f"[bold {style}]{verdict}[/]  {figures.get('total_s', 0):.0f} s in all.")


def as_result(sections: Sequence[Section], figures: dict[str, float]) -> dict[str, Any]:
    aims = {
        f"{section.title}: {check.name}": {"want": check.want, "got": check.got, "met": check.met}
        for section in sections
        for check in section.checks
    }
    return {"figures": {key: round(value, 6) for key, value in figures.items()}, "aims": aims}


def _check(check: Check) -> str:
    mark = "[green]✔[/]" if check.met else "[red]✘[/]"
    got = f"  [cyan]{escape(check.got)}[/]" if check.got else ""
    want = f"  [red](wanted {escape(check.want)})[/]" if not check.met else ""
    return f"  {mark} {escape(check.name)}{got}{want}"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]], terse: bool) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", expand=terse)
    for index, column in enumerate(columns):
        if terse and index < len(columns) - 1:  # a long list has one line per row, and only the last column shrinks
            table.add_column(column, width=max(len(column), *(len(row[index]) for row in rows)))
        else:
            share = 1 if terse else None
            table.add_column(column, overflow="ellipsis" if terse else "fold", no_wrap=terse, ratio=share)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def _figures(figures: dict[str, float]) -> Table:
    """Two figures per row; bytes are shown in MiB."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(style="bold", justify="right", no_wrap=True, min_width=9)
    pairs = [_readable(name, value) for name, value in figures.items()]
    for start in range(0, len(pairs), 2):
        table.add_row(*(text for pair in pairs[start : start + 2] for text in pair))
    return table


def _readable(name: str, value: float) -> tuple[str, str]:
    name, _, unit = name.rpartition("_")
    if unit == "bytes":
        value, unit = value / 2**20, "MiB"
    known = unit in ("s", "ms", "MiB", "gib", "tokens")
    words = name.replace("_", " ") if known else f"{name}_{unit}".strip("_").replace("_", " ")
    digits = f"{value:,.0f}" if float(value).is_integer() or value >= 1000 else f"{value:.3g}"
    return words, f"{digits} {unit.replace('gib', 'GiB')}" if known and unit != "tokens" else digits
