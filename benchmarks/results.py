"""Results of a bench in the form that `polyphase bench` prints: figures, aims, notes and tables."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from services.launcher import cli_common

Result = cli_common.Result
Aim = cli_common.Aim
Item = TypeVar("Item")


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


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """The items, starting with another one in each round, so that a drift of the machine favours none of them."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def progress(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)
