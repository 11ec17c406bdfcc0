"""What checks find: single verdicts, gathered in sections of the report."""

from dataclasses import dataclass, field
from typing import Any

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Check:
    """One verdict. `want` and `got` are for people."""

    name: str
    met: bool
    want: str = ""
    got: str = ""


@dataclass(slots=True)
class Section:
    """One part of the report: verdicts, figures (`name_unit` → number), and a table or lines to read."""

    title: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    table: Table | None = None
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(check.met for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """The checks that did not hold."""
        return [check for check in self.checks if not check.met]

    def check(self, name: str, met: bool, want: Any = "", got: Any = "") -> bool:
        """Add a verdict."""
        self.checks.append(Check(name, bool(met), str(want), str(got)))
        return bool(met)

    def equal(self, name: str, want: Any, got: Any) -> bool:
        """Add the verdict that two things are equal."""
        return self.check(name, want == got, want, got)

    def at_most(self, name: str, bound: float, got: float, unit: str = "s") -> bool:
        """Add the verdict that a figure keeps a bound."""
        return self.check(name, got <= bound, f"at most {bound:g} {unit}", f"{got:.3g} {unit}")
