"""Columns of a trace as arrays: checked all at once, and an error names the first line at fault."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.files.text import shown
from shared.sim.workload import Lengths, Times

LONGEST_YEARS = 100  # of a trace
_LONGEST_S = LONGEST_YEARS * 365.25 * 86400.0
_LONGEST_TOKENS = 10**9
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
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
            said = "" if _missing(value) else f" {shown(value.item() if isinstance(value, np.generic) else value)}"
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
    """Times in seconds since the first row's, from dates in ISO 8601 between the years 1678 and 2261."""
    column = table.columns[key]
    table.refuse(_gaps(column), key, "is missing")
    dates = pd.to_datetime(column, format="ISO8601", errors="coerce", utc=True)
    table.refuse(dates.isna().to_numpy(), key, "is not a date and time of the years 1678 to 2261")
    ns = dates.dt.as_unit("ns").to_numpy(dtype="datetime64[ns]").astype(np.int64)
    far = too_long_after(ns / 1e9, ns[0] / 1e9)  # more than 292 years have no difference in 64 bits
    table.refuse(far, key, f"is more than {LONGEST_YEARS} years from the first")
    return np.asarray((ns - ns[0]) / 1e9, dtype=np.float64)


def too_long_after(times_s: Times, start_s: float) -> NDArray[np.bool_]:
    """Which times are further from the start, in either direction, than any trace is long."""
    return np.asarray(np.abs(times_s - start_s) > _LONGEST_S)


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
        values = np.fromiter(map(_float, column), dtype=np.float64, count=len(column))
        table.refuse(np.isnan(values), key, "is not a number")
    else:
        values = np.asarray(column, dtype=np.float64)
    table.refuse(~np.isfinite(values), key, "is not a finite number")
    return values


def _float(value: object) -> float:
    """A number, or text that is one in plain decimals; NaN for anything else, infinity beyond what a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return np.nan
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        return np.nan
    try:
        return float(value)
    except OverflowError:
        return np.inf


def _gaps(column: Column) -> NDArray[np.bool_]:
    gaps: NDArray[np.bool_] = column.isna().to_numpy(dtype=np.bool_)
    return gaps


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
