"""Results of a bench in the form that `polyphase bench` prints, and the rounds of measurements that they come from."""

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import product
from math import nan
from statistics import median
from typing import Any, TypeVar

from shared.errors import InvalidRequest

Result = dict[str, Any]  # "figures": {name_unit: number}, "aims": {name: Aim}, "notes": [str], "tables": {title: rows}
Aim = dict[str, Any]  # "want", "got", "met"
Figures = dict[str, float]
Arm = TypeVar("Arm")
Measured = TypeVar("Measured")


def result(figures: Mapping[str, Any], aims: Mapping[str, Aim] | None = None, notes: Iterable[str] = ()) -> Result:
    return {"figures": dict(figures), "aims": dict(aims or {}), "notes": list(notes)}


def merged(*parts: Mapping[str, Any]) -> Result:
    """One result of several: later figures and aims replace earlier ones of the same name, rows of a table add up."""
    whole = result({})
    for part in parts:
        whole["notes"] += part.get("notes", ())
        for name in ("figures", "aims"):
            whole[name] |= part.get(name, {})
        for title, rows in part.get("tables", {}).items():
            whole.setdefault("tables", {}).setdefault(title, []).extend(rows)
    return whole


def run_parts(parts: Mapping[str, Callable[[], Result]], names: Sequence[str]) -> Result:
    """The parts of these names one after the other, all without any. Raises InvalidRequest for an unknown name."""
    if unknown := [name for name in names if name not in parts]:
        raise InvalidRequest(f"no part {', '.join(unknown)}; known: {', '.join(parts)}")
    return merged(*(parts[name]() for name in names or parts))


def at_most(want: float, got: float | None, digits: int = 3) -> Aim:
    """An aim that is missed where nothing was measured (None)."""
    return _bound("<=", want, got, digits, got is not None and got <= want)


def at_least(want: float, got: float | None, digits: int = 3) -> Aim:
    """An aim that is missed where nothing was measured (None)."""
    return _bound(">=", want, got, digits, got is not None and got >= want)


def aim(want: object, got: object, met: bool) -> Aim:
    return {"want": want, "got": got, "met": bool(met)}


def _bound(sign: str, want: float, got: float | None, digits: int, met: bool) -> Aim:
    return aim(f"{sign} {want:.4g}", "not measured" if got is None else round(got, digits), met)


async def in_turns(
    arms: Iterable[Arm], rounds: int, measure: Callable[[int, Arm], Awaitable[Measured]]
) -> list[dict[Arm, Measured]]:
    """The measurements of each round, by arm. Rounds begin with another arm in turn, so that drifts favour none."""
    arms, found = list(arms), []
    for number in range(rounds):
        first = number % len(arms)
        by_arm = {arm: await measure(number, arm) for arm in (*arms[first:], *arms[:first])}
        found.append({arm: by_arm[arm] for arm in arms})
    return found


def medians(rounds: Iterable[Mapping[str, float]]) -> Figures:
    """The median of each figure over the rounds."""
    rows = list(rounds)
    return {name: median(row[name] for row in rows) for name in rows[0]}


def arm_medians(
    name: str, rounds: Sequence[Mapping[str, Mapping[str, float]]], compared: Sequence[str] = ()
) -> Figures:
    """Medians of each arm's figures, and of those `compared` over the first arm's of the same round (NaN over 0)."""
    figures: Figures = {}
    first, *others = rounds[0]
    for arm in rounds[0]:
        row = medians(by_arm[arm] for by_arm in rounds)
        figures |= {f"{name}_{arm}_{field}": round(value, 4) for field, value in row.items()}
    for arm, field in product(others, compared):
        pairs = [(by_arm[arm][field], by_arm[first][field]) for by_arm in rounds]
        stem = field.removesuffix("_per_s").removesuffix("_ms").removesuffix("_s")
        figures[f"{name}_{arm}_{stem}_over_{first}"] = round(median(a / b if b else nan for a, b in pairs), 4)
    return figures


def progress(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)
