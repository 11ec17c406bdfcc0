"""Checks on a running suite and their report: sections with ticks and figures, and a summary at the end.

The demo and the deployment checks share it: a check is an async function of the suite that it checks and of the section
that it fills.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table

from shared.errors import PolyphaseError

_BREAKS = (PolyphaseError, AssertionError, OSError, TimeoutError, LookupError, ValueError, httpx.HTTPError)
Checked = TypeVar("Checked")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one comparison. `want` and `got` are for people. timed: it depends on the speed of the machine."""

    name: str
    met: bool
    want: str = ""
    got: str = ""
    timed: bool = False


@dataclass(slots=True)
class Section:
    """A part of the report: findings, figures (`name_unit` → number), and a table or lines to read."""

    title: str
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    columns: Sequence[str] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.met]

    def check(self, name: str, met: bool, want: Any = "", got: Any = "", *, timed: bool = False) -> None:
        self.findings.append(Finding(name, bool(met), str(want), str(got), timed))

    def equal(self, name: str, want: Any, got: Any) -> None:
        self.check(name, want == got, want, got)

    def all_of(self, name: str, total: int, count: int) -> None:
        self.equal(name, f"{total}/{total}", f"{count}/{total}")

    def at_most(self, name: str, bound: float, got: float, unit: str = "s") -> None:
        """Check a duration."""
        self.check(name, got <= bound, f"at most {bound:g} {unit}", f"{got:.3g} {unit}", timed=True)


Check = Callable[[Checked, Section], Awaitable[None]]


class Report:
    """Runs checks one after the other, and shows the section of each when it has ended."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.sections: list[Section] = []
        self.figures: dict[str, float] = {}
        self._began = time.monotonic()

    @property
    def ok(self) -> bool:
        return all(section.ok for section in self.sections)

    async def run(self, checks: Mapping[str, Check[Checked]], checked: Checked, *, stop: bool = False) -> None:
        """Run checks by their titles; with `stop` none after one that has failed."""
        for title, check in checks.items():
            section, began = Section(title), time.monotonic()
            self.sections.append(section)
            try:
                with self.console.status(f"{len(self.sections)} …"):
                    await check(checked, section)
            except (*_BREAKS, ExceptionGroup) as error:
                cause: BaseException = error
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                if not isinstance(cause, _BREAKS):
                    raise
                section.check("the check could be made", False, "yes", f"{type(cause).__name__}: {cause}"[:1000])
            section.took_s = time.monotonic() - began
            self.figures.update(section.figures)
            self._show(section)
            if stop and not section.ok:
                return

    def _show(self, section: Section) -> None:
        mark = "[green]✔[/]" if section.ok else "[red]✘[/]"
        title = f"{mark} [bold]{len(self.sections)}. {escape(section.title)}[/]  [dim]{section.took_s:.1f} s[/]"
        self.console.print(Rule(title, align="left", style="dim"))
        if section.rows:
            self.console.print(_table(section.columns, section.rows, terse=len(section.rows) > 10))
        for line in section.lines:
            self.console.print(f"  [dim]{escape(line)}[/]")
        terse = bool(section.rows) and len(section.findings) > 10
        for finding in section.failures if terse else section.findings:
            sign = "[green]✔[/]" if finding.met else "[red]✘[/]"
            got = f"  [cyan]{escape(finding.got)}[/]" if finding.got else ""
            want = f"  [red](wanted {escape(finding.want)})[/]" if not finding.met else ""
            self.console.print(f"  {sign} {escape(finding.name)}{got}{want}")
        if terse and section.ok:
            self.console.print(f"  [green]✔[/] all {len(section.findings)} as they should be")
        self.console.print()

    def summarise(self) -> None:
        """Show all sections in one table, the figures, and whether everything held."""
        self.figures["total_s"] = time.monotonic() - self._began
        table = Table(box=None, padding=(0, 2), show_header=False)
        for number, section in enumerate(self.sections, 1):
            held = len(section.findings) - len(section.failures)
            mark = "[green]✔[/]" if section.ok else "[red]✘[/]"
            table.add_row(mark, f"{number}. {section.title}", f"{held}/{len(section.findings)}")
        style, verdict = ("green", "Everything held.") if self.ok else ("red", "Something did not hold: see above.")
        panel = Panel(table, title="What was shown", title_align="left", border_style=style, expand=False)
        self.console.print(panel)
        self.console.print(_figures(self.figures))
        self.console.print(f"[bold {style}]{verdict}[/]  {self.figures['total_s']:.0f} s in all.")

    def as_result(self, *, finished: bool = True) -> dict[str, object]:
        """Figures and aims of the JSON line."""
        aims = {
            f"{section.title}: {each.name}": {"want": each.want, "got": each.got, "met": each.met}
            for section in self.sections
            for each in section.findings
        }
        if not finished:
            aims["the demo ran to its end"] = {"want": "yes", "got": "interrupted", "met": False}
        return {"figures": {key: round(value, 6) for key, value in self.figures.items()}, "aims": aims}


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], terse: bool) -> Table:
    """terse: one line per row, in which only the last column shrinks."""
    table = Table(box=None, padding=(0, 2), header_style="dim", expand=terse)
    for index, column in enumerate(columns):
        if terse and index < len(columns) - 1:
            table.add_column(column, width=max(len(column), *(len(row[index]) for row in rows)))
        else:
            share = 1 if terse else None
            table.add_column(column, overflow="ellipsis" if terse else "fold", no_wrap=terse, ratio=share)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _figures(figures: Mapping[str, float]) -> Table:
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
