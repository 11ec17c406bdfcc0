"""Columns of a trace as arrays: checked all at once, and an error names the first line at fault."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.sim.workload import Lengths, Times

_LONGEST_TOKENS = 10**9
Column: TypeAlias = "pd.Series[Any]"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns as they were read, with the file and the line of each row."""

    where: str
    columns: Mapping[str, Column]
    lines: NDArray[np.int64]

    def refuse(self, bad: NDArray[np.bool_], key: str, why: str) -> None:
        """Raise InvalidRequest that names the first bad row's line, key and value; nothing if none is bad."""
        if bad.any():
            at = int(np.argmax(bad))
            value = self.columns[key].iloc[at]
            said = "" if _missing(value) else f" {value!r}" if isinstance(value, str) else f" {value}"
            raise InvalidRequest(f"{self.where}:{int(self.lines[at])}: {key}{said} {why}")


def numbers_s(table: Table, key: str, ticks: float) -> Times:
    """Times in seconds, from numbers of which `ticks` make one."""
    return _floats(table, key) / ticks


def numbers(table: Table, key: str) -> Lengths:
    """Lengths in tokens: whole numbers, not negative."""
    column = table.columns[key]
    if column.dtype == np.int64:
        whole = np.asarray(column, dtype=np.int64)
    else:
        values = _floats(table, key)
        table.refuse(values != np.floor(values), key, "is not a whole number")
        table.refuse(np.abs(values) > _LONGEST_TOKENS, key, f"is more than {_LONGEST_TOKENS}")
        whole = values.astype(np.int64)
    table.refuse(whole < 0, key, "is negative")
    table.refuse(whole > _LONGEST_TOKENS, key, f"is more than {_LONGEST_TOKENS}")
    return whole


def dates_s(table: Table, key: str) -> Times:
    """Times in seconds since the first row's, from dates in ISO 8601."""
    column = table.columns[key]
    table.refuse(_gaps(column), key, "is missing")
    dates = pd.to_datetime(column, format="ISO8601", errors="coerce", utc=True)
    table.refuse(dates.isna().to_numpy(), key, "is not a date and time")
    return np.asarray((dates - dates.iloc[0]) / pd.Timedelta(seconds=1), dtype=np.float64)


def prefixes(table: Table, key: str) -> tuple[tuple[int, ...], ...]:
    """The ids of each prompt's blocks."""
    column = table.columns[key]
    table.refuse(_gaps(column), key, "is missing")
    bad = np.fromiter((not _is_ids(value) for value in column), dtype=np.bool_, count=len(column))
    table.refuse(bad, key, "is not a list of whole numbers")
    return tuple(tuple(ids) for ids in column)


def _floats(table: Table, key: str) -> NDArray[np.float64]:
    column = table.columns[key]
    table.refuse(_gaps(column), key, "is missing")
    if column.dtype == np.bool_ or column.dtype == object:
        plain = column.map(lambda value: value if isinstance(value, int | float | str) else str(value))
        truths = column.map(lambda value: isinstance(value, bool)).to_numpy(dtype=np.bool_)
        values = np.asarray(pd.to_numeric(plain, errors="coerce"), dtype=np.float64)
        table.refuse(truths | np.isnan(values), key, "is not a number")
    else:
        values = np.asarray(column, dtype=np.float64)
    table.refuse(~np.isfinite(values), key, "is not a finite number")
    return values


def _gaps(column: Column) -> NDArray[np.bool_]:
    gaps: NDArray[np.bool_] = column.isna().to_numpy(dtype=np.bool_)
    return gaps


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
