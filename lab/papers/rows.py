"""A paper's figure beside ours, and how near it came.

Signs and orders have to be right; a claimed gain has to be met within ±30 % of itself. What is missed stays missed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any

from lab.papers.chart import Chart

WITHIN = 0.30


class Check(StrEnum):
    """What an aim of a row says."""

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
        """Whether all that was judged held."""
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
    """Without what sums in another order leave of a difference that is none."""
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
    """A claim about an order or a choice."""
    return Row(key, where, what, "", paper, ours, None, None, ((Check.ORDER, held),), paper)


def told(key: str, where: str, what: str, unit: str, paper: str, ours: float) -> Row:
    """A figure beside the paper's that nothing is asked of."""
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
