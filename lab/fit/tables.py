"""Operator tables in memory: rows of measured times of one operator on one accelerator, from one profiler."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from lab.fit.rows import Floats, Rows
from shared.cost.catalogue import Accelerator
from shared.errors import InvalidRequest
from shared.files.text import open_text


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one operator on one accelerator, from one profiler."""

    accelerator: Accelerator
    operator: str  # gemm, experts, decode, prefill, mixed, elementwise, all_reduce, mlp
    origin: str  # the profiler, and what distinguishes its tables of one operator
    rows: Rows
    rejected: int = 0  # rows that cannot be measurements
    cached: bool = False  # weights may have come from the cache
    quantised: bool = False  # times include quantising activations
    blocks: bool = False  # they are scaled block by block


def read_csv(path: Path) -> pd.DataFrame:
    """A profiler's CSV, plain or gzip. Raises InvalidRequest that names the file."""
    with open_text(path) as file:
        try:
            return pd.read_csv(file)
        except ValueError as error:  # pandas' errors of parsing
            raise InvalidRequest(f"{path}: not CSV: {str(error).strip()}") from error


def merged(tables: Iterable[Table]) -> tuple[Table, ...]:
    """One table for each accelerator, operator and origin: several files of the same kind are one measurement."""
    groups: dict[tuple[str, str, str], list[Table]] = {}
    for table in tables:
        groups.setdefault((table.accelerator.name, table.operator, table.origin), []).append(table)
    return tuple(_concatenated(group) for group in groups.values())


def _concatenated(group: Sequence[Table]) -> Table:
    first = group[0]
    if len(group) == 1:
        return first
    values = {}
    for name in first.rows.__dataclass_fields__:
        parts = [getattr(table.rows, name) for table in group]
        values[name] = np.concatenate(parts) if isinstance(parts[0], np.ndarray) else parts[0]
    rows = type(first.rows)(**values)
    return replace(first, rows=rows, rejected=sum(table.rejected for table in group))


def column(frame: pd.DataFrame, name: str) -> Floats:
    """One column of numbers. Raises InvalidRequest when there is none of that name."""
    if name not in frame.columns:
        raise InvalidRequest(f"the table lacks the column {name!r}; it has {', '.join(map(str, frame.columns))}")
    return frame[name].to_numpy(dtype=np.float64)
