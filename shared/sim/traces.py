"""Recorded workloads from files: public traces in the forms that they come in, and a plain form of our own.

Every error names the file, the line and the key. Nothing is repaired in silence.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.sim.trace_columns import Table, dates_s, numbers, numbers_s, prefixes
from shared.sim.workload import Workload

_BLOCK_TOKENS = 512  # of a Mooncake hash id


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """The keys of one form of trace. arrival: "" where there are none, then all requests arrive at once.

    ticks: units of `arrival` in a second, 0 for dates. from_first: times count from the first request's, not from 0.
    prefixes: key of the prompt's block ids.
    """

    arrival: str
    prompt: str
    output: str
    lines: bool = False  # one JSON object a line instead of CSV
    ticks: float = 1.0
    from_first: bool = False
    prefixes: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Those that every row must have."""
        return tuple(key for key in (self.arrival, self.prompt, self.output) if key)


FORMATS: Mapping[str, TraceFormat] = {
    "azure": TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", ticks=0, from_first=True),
    "burstgpt": TraceFormat("Timestamp", "Request tokens", "Response tokens", from_first=True),
    "mooncake": TraceFormat(
        "timestamp", "input_length", "output_length", lines=True, ticks=1000.0, from_first=True, prefixes="hash_ids"
    ),
    "csv": TraceFormat("arrival_s", "prompt_tokens", "output_tokens"),
    "jsonl": TraceFormat("arrival_s", "prompt_tokens", "output_tokens", lines=True),
    "token_counts": TraceFormat("", "num_prefill_tokens", "num_decode_tokens"),
}


def read_trace(path: Path, format: str = "", *, sort: bool = False, skip_empty: bool = False) -> Workload:
    """The requests of a trace, in order of arrival; its name is the file's.

    format: a name of `FORMATS`; by default the one whose keys the file has. Further columns are ignored. Times of
    public traces are counted from their first request.
    sort: put requests whose times go backwards in order instead of refusing the file (rows of one time keep theirs).
    skip_empty: leave out requests without prompt or output tokens (BurstGPT logs failures so) instead of refusing
    the file; the name then says how many.
    Raises InvalidRequest that names file, line and key: a missing value, something that is not a number, a length
    that is not a whole number of at least 1, a time that goes backwards, a file that is empty or of no known form.
    """
    text = _Opened(path)
    chosen = _chosen(text, format)
    table = _read_lines(text, chosen) if chosen.lines else _read_csv(text, chosen)
    return _workload(table, chosen, sort, skip_empty)


def _workload(table: Table, form: TraceFormat, sort: bool, skip_empty: bool) -> Workload:
    prompt, output = numbers(table, form.prompt), numbers(table, form.output)
    arrival = _arrivals(table, form)
    ids = prefixes(table, form.prefixes) if form.prefixes in table.columns else None
    kept = (prompt > 0) & (output > 0) if skip_empty else np.ones(len(prompt), dtype=np.bool_)
    for key, lengths in ((form.prompt, prompt), (form.output, output)):
        table.refuse(kept & (lengths < 1), key, "is less than 1 (skip_empty leaves such requests out)")
    if not kept.any():
        raise InvalidRequest(f"{table.where}: all {len(kept)} requests are empty")
    backwards = np.concatenate(([False], np.diff(arrival) < 0))
    if not sort:
        table.refuse(backwards, form.arrival, "is earlier than the line before (sort puts them in order)")
    order = np.flatnonzero(kept)
    if backwards.any():
        order = order[np.argsort(arrival[order], kind="stable")]
    start = arrival[order[0]] if form.from_first else 0.0
    left_out = len(kept) - len(order)
    return Workload(
        name=Path(table.where).name + (f" ({left_out} empty requests left out)" if left_out else ""),
        arrival_s=arrival[order] - start,
        prompt_tokens=prompt[order],
        output_tokens=output[order],
        prefixes=None if ids is None else tuple(ids[at] for at in order.tolist()),
        prefix_block_tokens=_BLOCK_TOKENS,
    )


def _arrivals(table: Table, form: TraceFormat) -> NDArray[np.float64]:
    if not form.arrival:
        return np.zeros(len(table.lines))
    if not form.ticks:
        return dates_s(table, form.arrival)
    times = numbers_s(table, form.arrival, form.ticks)
    if not form.from_first:
        table.refuse(times < 0, form.arrival, "is less than 0")
    return times


class _Opened:
    """A trace file before its form is known: its first line that holds something."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first, self.first_at = "", 0
        try:
            with path.open(encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self.first, self.first_at = line.strip(), number
                        break
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{path}: not text in UTF-8: {error.reason}") from error
        if not self.first:
            raise InvalidRequest(f"{path}: the file is empty")

    @property
    def in_lines(self) -> bool:
        """Whether it holds one JSON object a line."""
        return self.first.startswith("{")

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the CSV header, or of the first JSON object."""
        if self.in_lines:
            return tuple(_object(self.first, f"{self.path}:{self.first_at}"))
        return tuple(key.strip().strip('"') for key in self.first.split(","))


def _chosen(text: _Opened, format: str) -> TraceFormat:
    if format:
        if format not in FORMATS:
            raise InvalidRequest(f"unknown trace format {format!r}; known: {', '.join(FORMATS)}")
        form = FORMATS[format]
        if form.lines is not text.in_lines:
            wants = "one JSON object a line" if form.lines else "CSV with a header"
            raise InvalidRequest(f"{text.path}:{text.first_at}: format {format!r} is {wants}")
        missing = [key for key in form.keys if key not in text.keys]
        if missing:
            raise InvalidRequest(f"{text.path}:{text.first_at}: key {missing[0]!r} of format {format!r} is missing")
        return form
    for form in FORMATS.values():
        if form.lines is text.in_lines and set(form.keys) <= set(text.keys):
            return form
    known = "; ".join(f"{name} ({', '.join(form.keys)})" for name, form in FORMATS.items())
    raise InvalidRequest(
        f"{text.path}:{text.first_at}: the keys {', '.join(text.keys)} are of no known format; known: {known}"
    )


def _read_csv(text: _Opened, form: TraceFormat) -> Table:
    if len(set(text.keys)) < len(text.keys):
        raise InvalidRequest(f"{text.path}:{text.first_at}: a column is named twice")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                text.path,
                index_col=False,
                skiprows=text.first_at - 1,
                skip_blank_lines=False,
                low_memory=False,
                skipinitialspace=True,
                encoding="utf-8-sig",
                dtype={form.arrival: str} if not form.ticks else None,
            )
    except pd.errors.ParserWarning as error:
        raise InvalidRequest(f"{text.path}: rows have more fields than the header") from error
    except (ValueError, OSError) as error:  # pandas' errors of parsing, and of decoding
        raise InvalidRequest(f"{text.path}: {str(error).strip()}") from error
    frame.columns = pd.Index([str(key).strip() for key in frame.columns])
    filled = np.flatnonzero(frame.notna().any(axis=1).to_numpy())
    if not len(filled):
        raise InvalidRequest(f"{text.path}: no requests")
    frame = frame.iloc[: filled[-1] + 1]  # blank lines at the end are no rows; others are gaps
    lines = np.arange(len(frame)) + text.first_at + 1
    return Table(str(text.path), {key: frame[key] for key in form.keys}, lines)


def _read_lines(text: _Opened, form: TraceFormat) -> Table:
    keys = (*form.keys, *([form.prefixes] if form.prefixes in text.keys else ()))
    values: dict[str, list[object]] = {key: [] for key in keys}
    lines = []
    try:
        with text.path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = _object(line, f"{text.path}:{number}")
                lines.append(number)
                for key, column in values.items():
                    column.append(row.get(key))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{text.path}: not text in UTF-8: {error.reason}") from error
    columns = {
        key: pd.Series(column, dtype=object) if key == form.prefixes else pd.Series(column)
        for key, column in values.items()
    }
    return Table(str(text.path), columns, np.asarray(lines))


def _object(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidRequest(f"{where}: not a JSON object")
    return row
