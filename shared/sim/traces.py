"""Workloads from trace files: public traces in their own formats, and a plain format of ours.

Errors name the file, the line and the key. Faulty rows are refused unless the caller asks to sort or skip them.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.files.text import open_text, read_lines, read_records, shown
from shared.sim.workload import Lengths, Times, Workload

LONGEST_YEARS = 100  # of a trace
_LONGEST_S = LONGEST_YEARS * 365.25 * 86400.0
_LONGEST_TOKENS = 10**9
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
Column: TypeAlias = "pd.Series[Any]"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns as they were read, with the file and the line of each row. Whole columns are checked at once."""

    where: str
    columns: Mapping[str, Column]
    lines: NDArray[np.int64]

    def refuse(self, bad: NDArray[np.bool_], key: str, why: str) -> None:
        """Raise InvalidRequest that names the line, key and value of the first bad row, if any row is bad."""
        if bad.any():
            at = int(np.argmax(bad))
            value = self.columns[key].iloc[at]
            missing = value is None or (isinstance(value, float) and np.isnan(value))
            text = "" if missing else f" {shown(value.item() if isinstance(value, np.generic) else value)}"
            raise InvalidRequest(f"{self.where}:{int(self.lines[at])}: {key}{text} {why}")


def numbers_s(table: Table, key: str, ticks: float) -> Times:
    """Times in seconds, from numbers of which `ticks` make one."""
    return _floats(table, key) / ticks


def numbers(table: Table, key: str) -> Lengths:
    """Lengths in tokens: whole numbers of at least 0."""
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
    """Which times are further from the start, in either direction, than a trace may be long."""
    return np.asarray(np.abs(times_s - start_s) > _LONGEST_S)


def prefixes(table: Table, key: str) -> tuple[tuple[int, ...], ...]:
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
    """A number, also as text in decimals; NaN for anything else, infinity beyond what a float holds."""
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


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


BLOCK_TOKENS = 512  # of a Mooncake hash id
TIME_UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1000.0}  # of which so many make a second
_DATES_S = (1e9, 1e10)  # the years 2001 to 2286, in seconds since 1970
_FASTEST_PER_S = 1000.0  # requests, of a trace whose times are milliseconds


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """The keys of one trace format. arrival: empty where there are no times: then all requests arrive at once.

    ticks: units of `arrival` in a second, 0 for dates. from_first: times count from the first request's, not from 0.
    prefixes: key of the prompt's block ids.
    """

    arrival: str
    prompt: str
    output: str
    records: bool = False  # of JSON, one a line or in a list, instead of CSV
    ticks: float = 1.0
    unit_named: bool = False  # by the user, whatever the times look like
    from_first: bool = False
    prefixes: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that each record must have."""
        return tuple(key for key in (self.arrival, self.prompt, self.output) if key)


FORMATS: Mapping[str, TraceFormat] = {
    "azure": TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", ticks=0, from_first=True),
    "burstgpt": TraceFormat("Timestamp", "Request tokens", "Response tokens", from_first=True),
    "mooncake": TraceFormat(
        "timestamp", "input_length", "output_length", records=True, ticks=1000.0, from_first=True, prefixes="hash_ids"
    ),
    "csv": TraceFormat("arrival_s", "prompt_tokens", "output_tokens"),
    "jsonl": TraceFormat("arrival_s", "prompt_tokens", "output_tokens", records=True),
    "token_counts": TraceFormat("", "num_prefill_tokens", "num_decode_tokens"),
}


def read_trace(
    path: Path,
    format: str = "",
    *,
    sort: bool = False,
    skip_empty: bool = False,
    time_unit: str = "",
    block_tokens: int = BLOCK_TOKENS,
) -> Workload:
    """The requests of a trace, plain or gzip, in order of arrival; its name is the file's.

    format: a name of `FORMATS`; by default the one whose keys the file has. Further columns are ignored. Times of
    public traces are counted from their first request. sort: put requests whose times go backwards in order instead of
    refusing the file. skip_empty: leave out requests without prompt or output tokens (BurstGPT's failures) instead of
    refusing the file; the name then says how many. time_unit: "s" or "ms", of times that are numbers; by default the
    format's, and a trace of milliseconds whose times look like seconds is refused. block_tokens: tokens of a block that
    `hash_ids` names. Raises InvalidRequest that names file, line and key for a missing value, a value that is not a
    number, a length that is not a whole number of at least 1, a time that goes backwards, an empty or unknown file.
    """
    text = _Opened(path)
    chosen = _in_unit(_chosen(text, format), time_unit)
    table = _read_records(text, chosen) if chosen.records else _read_csv(text, chosen)
    return _workload(table, chosen, sort, skip_empty, block_tokens)


def _in_unit(form: TraceFormat, time_unit: str) -> TraceFormat:
    if not time_unit:
        return form
    if time_unit not in TIME_UNITS:
        raise InvalidRequest(f"time_unit must be one of {', '.join(TIME_UNITS)}, not {time_unit!r}")
    if not (form.arrival and form.ticks):
        raise InvalidRequest("time_unit is for traces whose times are numbers, and this one has none")
    return replace(form, ticks=TIME_UNITS[time_unit], unit_named=True)


def _workload(table: Table, form: TraceFormat, sort: bool, skip_empty: bool, block_tokens: int) -> Workload:
    prompt, output = numbers(table, form.prompt), numbers(table, form.output)
    arrival = _arrivals(table, form)
    ids = prefixes(table, form.prefixes) if form.prefixes in table.columns else None
    kept = (prompt > 0) & (output > 0) if skip_empty else np.ones(len(prompt), dtype=np.bool_)
    for key, lengths in ((form.prompt, prompt), (form.output, output)):
        table.refuse(kept & (lengths < 1), key, "is less than 1 (skip_empty leaves such requests out)")
    if ids is not None:
        blocks = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        many = kept & (blocks > -(-prompt // block_tokens))
        table.refuse(
            many,
            form.prefixes,
            f"has more blocks of {block_tokens} tokens than the prompt (block_tokens, --block-tokens, is their size)",
        )
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
    found = Workload(
        name=Path(table.where).name + (f" ({left_out} empty requests left out)" if left_out else ""),
        arrival_s=arrival[order] - start,
        prompt_tokens=prompt[order],
        output_tokens=output[order],
        prefix_block_tokens=block_tokens,
    )
    return found if ids is None else with_prefixes(found, tuple(ids[at] for at in order.tolist()), block_tokens)


def with_prefixes(workload: Workload, prompts: tuple[tuple[int, ...], ...], block_tokens: int) -> Workload:
    """The requests with the ids of their prompts' blocks, and with the answers and sessions that follow from these."""
    answers = answers_of(prompts, workload.prompt_tokens, workload.output_tokens, block_tokens)
    sessions = sessions_of(prompts, answers, workload.prompt_tokens, block_tokens)
    return replace(workload, prefixes=prompts, prefix_block_tokens=block_tokens, answers=answers, sessions=sessions)


def answers_of(
    prompts: Sequence[tuple[int, ...]], prompt_tokens: Lengths, output_tokens: Lengths, block_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The ids of the blocks that the answer of each request fills, as far as later prompts tell.

    A trace names the blocks of prompts alone. But the next turn of a chat repeats the prompt and the answer, so the
    blocks that follow a prompt's whole ones in later prompts hold its answer. Where later prompts go on in several
    ways, as questions about one document do, it is not known which of them repeats the answer, and none is taken to.
    """
    wholes = (prompt_tokens // block_tokens).tolist()
    following: dict[int, int | None] = {}  # by block the only one that follows it; None: there are several
    first: dict[int, int] = {}  # the first request with a block
    for row, ids in enumerate(prompts):
        whole = ids[: wholes[row]]
        for block in whole:
            first.setdefault(block, row)
        for block, after in pairwise(whole):
            if following.setdefault(block, after) != after:
                following[block] = None
    filled = ((prompt_tokens + output_tokens - 1) // block_tokens).tolist()  # the last token's KV is not computed
    found = []
    for row, ids in enumerate(prompts):
        answer: list[int] = []
        last = ids[wholes[row] - 1] if 0 < wholes[row] <= len(ids) else None
        while last is not None and len(answer) < filled[row] - wholes[row]:
            last = following.get(last)
            if last is None or first[last] <= row:
                break
            answer.append(last)
        found.append(tuple(answer))
    return tuple(found)


def sessions_of(
    prompts: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]], prompt_tokens: Lengths, block_tokens: int
) -> tuple[str, ...]:
    """The conversation of which each request is a turn, as far as the answers tell: a prompt that repeats an earlier
    answer is the next turn after it. "" where there is only one turn.
    """
    wholes = (prompt_tokens // block_tokens).tolist()
    turn_of = {answer[-1]: row for row, answer in enumerate(answers) if answer}  # by the last block of its answer
    names, firsts = [""] * len(prompts), list(range(len(prompts)))
    for row, ids in enumerate(prompts):
        before = next((turn_of[at] for at in reversed(ids[: wholes[row]]) if at in turn_of), row)
        if before < row:
            firsts[row] = firsts[before]
            names[row] = names[firsts[row]] = f"chat-{firsts[row]}"
    return tuple(names)


def _arrivals(table: Table, form: TraceFormat) -> NDArray[np.float64]:
    if not form.arrival:
        return np.zeros(len(table.lines))
    if not form.ticks:
        return dates_s(table, form.arrival)
    times = numbers_s(table, form.arrival, form.ticks)
    if form.ticks == TIME_UNITS["ms"] and not form.unit_named:
        _require_ms(table, form.arrival)
    if not form.from_first:
        table.refuse(times < 0, form.arrival, "is less than 0")
    start = times[0] if form.from_first else 0.0
    table.refuse(too_long_after(times, start), form.arrival, f"is more than {LONGEST_YEARS} years after the start")
    return times


def _require_ms(table: Table, key: str) -> None:
    """Refuse times that look like seconds."""
    which = "the times look like seconds: time_unit (--time-unit s or ms) says which they are"
    ms = numbers_s(table, key, 1.0)
    table.refuse(ms != np.floor(ms), key, f"is no whole millisecond; {which}")
    table.refuse((ms >= _DATES_S[0]) & (ms < _DATES_S[1]), key, f"is a date in seconds; {which}")
    span_ms = float(ms.max() - ms.min())
    if len(ms) >= 10 and 0.0 < span_ms < len(ms) * 1000.0 / _FASTEST_PER_S:
        raise InvalidRequest(f"{table.where}: {key}: {len(ms)} requests within {span_ms:g} milliseconds; {which}")


class _Opened:
    """A trace file before its format is known: its first line that is not empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first_at, self.first = next(read_lines(path), (0, ""))
        if not self.first:
            raise InvalidRequest(f"{path}: the file is empty")
        self.in_records = self.first.lstrip().startswith(("{", "["))  # of JSON: one a line, or a list of them

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the CSV header, or of the first JSON object."""
        if not self.in_records:
            return tuple(key.strip().strip('"') for key in self.first.split(","))
        for line, record in read_records(self.path):
            return tuple(_object(record, f"{self.path}:{line}"))
        raise InvalidRequest(f"{self.path}:{self.first_at}: no requests")


def _chosen(text: _Opened, format: str) -> TraceFormat:
    if format:
        if format not in FORMATS:
            raise InvalidRequest(f"unknown trace format {format!r}; known: {', '.join(FORMATS)}")
        form = FORMATS[format]
        if form.records is not text.in_records:
            wants = "JSON, one object a line or a list of them," if form.records else "CSV with a header"
            raise InvalidRequest(f"{text.path}:{text.first_at}: format {format!r} is {wants}")
        missing = [key for key in form.keys if key not in text.keys]
        if missing:
            raise InvalidRequest(f"{text.path}:{text.first_at}: key {missing[0]!r} of format {format!r} is missing")
        return form
    for form in FORMATS.values():
        if form.records is text.in_records and set(form.keys) <= set(text.keys):
            return form
    known = "; ".join(f"{name} ({', '.join(form.keys)})" for name, form in FORMATS.items())
    raise InvalidRequest(
        f"{text.path}:{text.first_at}: the keys {', '.join(text.keys)} are of no known format; known: {known}"
    )


def _read_csv(text: _Opened, form: TraceFormat) -> Table:
    if len(set(text.keys)) < len(text.keys):
        raise InvalidRequest(f"{text.path}:{text.first_at}: a column is named twice")
    try:
        with warnings.catch_warnings(), open_text(text.path) as file:
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                file,
                index_col=False,
                skiprows=text.first_at - 1,
                skip_blank_lines=False,
                low_memory=False,
                skipinitialspace=True,
                dtype={form.arrival: str} if not form.ticks else None,
            )
    except pd.errors.ParserWarning as error:
        raise InvalidRequest(f"{text.path}: rows have more fields than the header") from error
    except ValueError as error:  # pandas' errors of parsing
        raise InvalidRequest(f"{text.path}: {str(error).strip()}") from error
    frame.columns = pd.Index([str(key).strip() for key in frame.columns])
    filled = np.flatnonzero(frame.notna().any(axis=1).to_numpy())
    if not len(filled):
        raise InvalidRequest(f"{text.path}: no requests")
    frame = frame.iloc[: filled[-1] + 1]  # blank lines at the end are no rows; others are gaps
    lines = np.arange(len(frame)) + text.first_at + 1
    return Table(str(text.path), {key: frame[key] for key in form.keys}, lines)


def _read_records(text: _Opened, form: TraceFormat) -> Table:
    """Prefixes are read where any record has them: then all records must have them."""
    keys = (*form.keys, *([form.prefixes] if form.prefixes else ()))
    values: dict[str, list[object]] = {key: [] for key in keys}
    lines = []
    with_prefixes = False
    for line, record in read_records(text.path):
        row = _object(record, f"{text.path}:{line}")
        with_prefixes = with_prefixes or form.prefixes in row
        lines.append(line)
        for key, column in values.items():
            column.append(row.get(key))
    columns = {
        key: pd.Series(column, dtype=object)  # pandas itself fails at integers beyond any float
        for key, column in values.items()
        if key != form.prefixes or with_prefixes
    }
    return Table(str(text.path), columns, np.asarray(lines))


def _object(record: object, where: str) -> dict[str, object]:
    if not isinstance(record, dict):
        raise InvalidRequest(f"{where}: not a JSON object")
    return record
