"""What an instance tells of itself, whatever that is: figures in a line, lists as tables, units by their names."""

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard import frame, look, units
from dashboard.reads import Read

ROWS = 24  # of a table
_KNOWN = ("known", "instance_id", "started_s", "steps")  # told elsewhere on the page


def details(read: Read[dict[str, Any]], now_s: float) -> None:
    """All of it."""
    if read.value is None:
        st.html(look.empty(f"It tells nothing: {read.error}"))
        return
    told = {name: value for name, value in read.value.items() if name not in _KNOWN}
    plain = {name: value for name, value in told.items() if not isinstance(value, dict | list)}
    parts = [f"<div>{frame.aged(read, now_s)}</div>" if read.stale else "", _facts(plain)]
    for name, value in told.items():
        if isinstance(value, dict | list) and value:
            parts.append(look.below(f"<div>{look.strong(words(name))}</div>", section(value)))
    st.html(look.page(*parts, stale=read.stale))


def section(value: Any) -> str:
    """A dictionary or list as HTML."""
    if isinstance(value, Mapping):
        flat = {name: one for name, one in value.items() if isinstance(one, Mapping) and not _deep(one)}
        table = _table([{"": name, **one} for name, one in flat.items()]) if flat else ""
        plain = _facts({name: one for name, one in value.items() if not isinstance(one, dict | list)})
        below = (
            look.below(look.soft(words(name)), section(one))
            for name, one in value.items()
            if one and (_deep(one) or isinstance(one, list))
        )
        return plain + table + "".join(below)
    rows = [one for one in value if isinstance(one, Mapping)]
    if rows:
        return _table(rows)
    return f"<div>{look.text(', '.join(map(str, value[:ROWS])))}</div>"


def _deep(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, dict | list) for one in value.values())


def figure(name: str, value: Any) -> str:
    """A value in the unit that its name tells."""
    if value is None:
        return units.NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith(("bytes_per_s", "bandwidth")):
        return f"{units.size(value)}/s"
    if name.endswith("_per_s"):
        return f"{value:.3g}/s"
    if name.endswith("_s"):
        return units.span(value) if value >= 120 else units.duration(value)
    if name.endswith("_ms"):
        return units.duration(value / 1000)
    if name.endswith("bytes"):
        return units.size(value)
    if name.endswith(("share", "ratio", "rate")) and 0 <= value <= 1:
        return units.share(value)
    return units.count(value) if float(value).is_integer() else f"{value:.4g}"


def words(name: str) -> str:
    """A field's name for people, without its unit."""
    for unit in ("_bytes_per_s", "_per_s", "_bytes", "_ms", "_s"):
        name = name.removesuffix(unit)
    said = name.replace("_", " ")
    return said[:1].upper() + said[1:]


def _facts(pairs: Mapping[str, Any]) -> str:
    return look.facts([(words(name), figure(name, value)) for name, value in pairs.items()]) if pairs else ""


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(
        dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list))
    )
    heads = [words(name) if name else "" for name in names]
    made = [[look.text(figure(name, row.get(name))) for name in names] for row in rows[:ROWS]]
    more = look.soft(f"and {len(rows) - ROWS} more") if len(rows) > ROWS else ""
    return look.narrow(look.table(heads, made)) + more
