"""The history in the database: samples of instances and requests, and the two pages that are made of them.

`History` writes instances when they change, their loads, and steps of time with sums over loads and ended requests.
`history` and `instances_over_time` answer `GET /history` and `GET /history/instances`, point by point.
"""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor import load_history, request_stats
from services.cluster_monitor.load_history import FIGURES, LoadBook, LoadStep, Totals
from services.cluster_monitor.registry import Record, Registry
from services.cluster_monitor.request_stats import KEPT_S, Ended, Served, ServedBook, Slot, quantile
from shared.domain.instance import InstanceLoad, Role
from shared.domain.verdict import Stage
from shared.errors import NotFound
from shared.runtime.tasks import until_next
from shared.store.reading import tuples_of
from shared.store.tables import instances, load_steps, loads
from shared.store.tables import served as served_table
from shared.store.write_behind import Row, WriteBehind
from shared.wire.api import Event, Operation, OperationKind, OperationResult
from shared.wire.api.monitor import Column, Mark
from shared.wire.api.monitor import History as HistoryAnswer

LOADS_S = 5.0  # samples that share a transaction
SERVED_S = 1.0  # between two looks at what was served, whose rows are written in the same wake-up
OPEN_EVERY = 10  # samples between two writes of the steps that are under way
_LOAD_COLUMNS = sorted({column.name for column in loads.columns} & set(InstanceLoad.__struct_fields__) - {"time_s"})
_load_values = attrgetter(*_LOAD_COLUMNS)
_SERVED_COLUMNS = {column.name for column in served_table.columns} & set(Served.__struct_fields__)


class History:
    """Writes the history; the last few seconds may be lost with the process.

    Each monitor process has rows of its own (`life`), so that two in the same step add up.
    """

    def __init__(self, registry: Registry, store: WriteBehind, served_s: float = KEPT_S) -> None:
        self._registry = registry
        self._store = store
        self._life = uuid.uuid4().hex[:12]
        self._loads = LoadBook()
        self._samples = 0
        self.served = ServedBook(served_s)
        registry.on_change(lambda record, _: self._write(record, record.state))
        registry.on_gone(lambda record, how, _: self._write(record, how))

    def ended(self, ended: Ended) -> None:
        self.served.add(ended, time.time())

    def sample(self) -> None:
        """Queue one load of every live instance, and the steps that have ended."""
        now = time.time()
        records = list(self._registry.all())
        for record in records:
            if record.alive:
                load = dict(zip(_LOAD_COLUMNS, _load_values(record.load), strict=True))
                row = {"instance_id": record.instance_id, "time_s": now, "role": record.role.value}
                row["state"] = record.state.value
                self._store.put(loads, row | load, within_s=until_next(LOADS_S))
        self._keep(self._loads.sample((record.view() for record in records), now))
        self._samples += 1
        if self._samples % OPEN_EVERY == 0:
            self._keep(self._loads.open())

    def sample_served(self) -> None:
        """Queue the steps in which requests have ended since the last time."""
        for slot, served in self.served.changed(time.time()):
            self._store.put(served_table, _served_row(slot, served, self._life), within_s=0.0)

    def close(self) -> None:
        """Queue the steps that are under way."""
        self._keep(self._loads.open())
        self.sample_served()

    def _keep(self, steps: list[LoadStep]) -> None:
        for seen in steps:
            self._store.put(load_steps, _step_row(seen, self._life), within_s=until_next(LOADS_S))

    def _write(self, record: Record, state: StrEnum) -> None:
        self._store.put(
            instances,
            {
                "instance_id": record.instance_id,
                "generation": record.info.generation,
                "role": record.role.value,
                "state": state.value,
                "registered_s": record.registered_s,
                "updated_s": time.time(),
                "info": msgspec.json.encode(record.info).decode(),
            },
        )


def _step_row(seen: LoadStep, life: str) -> Row:
    return {
        "step_s": seen.step_s,
        "time_s": seen.start_s,
        "life": life,
        "samples": seen.samples,
        "totals": msgspec.json.encode(seen.totals).decode(),
        "instances": msgspec.json.encode(seen.who).decode(),
        "figures": seen.means.tobytes(),
    }


def _served_row(slot: Slot, served: Served, life: str) -> Row:
    step_s, start_s, slo = slot
    content = msgspec.json.encode(msgspec.structs.replace(served, stages={})).decode()
    row = {"step_s": step_s, "time_s": start_s, "slo": slo, "life": life, "content": content}
    return row | {name: getattr(served, name) for name in _SERVED_COLUMNS}


LEAST_S = 10  # of a point
FINE_MINUTES = 120  # a history longer than this has points of a minute at least
Columns = dict[str, Column]


class Grid(NamedTuple):
    """Points of equal length, of which the last one holds `now`. Unix seconds."""

    from_s: int
    to_s: int
    step_s: int
    now: float

    @classmethod
    def up_to(cls, now: float, minutes: int, points: int) -> "Grid":
        """About `points` points over so many minutes, each a whole number of the finest rows that suit them."""
        wanted = minutes * 60 / points
        unit_s = 60 if minutes > FINE_MINUTES or wanted > 60 else LEAST_S
        step_s = max(1, ceil(wanted / unit_s)) * unit_s
        to_s = (int(now) // step_s + 1) * step_s
        return cls(to_s - max(1, minutes * 60 // step_s) * step_s, to_s, step_s, now)

    @property
    def times(self) -> list[int]:
        """The beginning of each point."""
        return list(range(self.from_s, self.to_s, self.step_s))

    def at(self, time_s: float) -> int:
        """The position of the point that a moment lies in."""
        return int(time_s - self.from_s) // self.step_s

    def lasted_s(self, start_s: int) -> float:
        """The length of a point, or how much of it has passed."""
        return max(1.0, min(start_s + self.step_s, self.now) - start_s)

    def level(self, steps_s: Sequence[int]) -> int:
        """The longest of these rows that are not longer than a point."""
        return max(step_s for step_s in steps_s if step_s <= self.step_s)


async def history(engine: AsyncEngine, grid: Grid, marks: list[Mark]) -> bytes:
    """`GET /history` as JSON. Raises Unavailable when the database fails."""
    ended = await tuples_of(engine, _rows(served_table, grid, request_stats.STEPS_S, "slo", "content"))
    loads = await tuples_of(engine, _rows(load_steps, grid, load_history.STEPS_S, "samples", "totals"))
    return await asyncio.to_thread(_page, grid, ended, loads, marks)  # takes some 10 ms


def _rows(table: Any, grid: Grid, steps_s: Sequence[int], *names: str) -> Any:
    """Selects the time and these columns of the rows that a grid is made of."""
    columns = (table.c.time_s, *(table.c[name] for name in names))
    level = grid.level(steps_s)
    wanted = (table.c.step_s == level, table.c.time_s >= grid.from_s, table.c.time_s < grid.to_s)
    return select(*columns).where(*wanted).order_by(table.c.time_s)


def _page(grid: Grid, ended: Sequence[tuple[Any, ...]], loads: Sequence[tuple[Any, ...]], marks: list[Mark]) -> bytes:
    decode = msgspec.json.Decoder(Served).decode
    by_class: dict[str, dict[int, list[Served]]] = defaultdict(lambda: defaultdict(list))
    for time_s, slo, content in ended:
        by_class[slo][grid.at(time_s)].append(decode(content))
    classes = {
        slo: [request_stats.total(parts.get(at, ())) for at in range(len(grid.times))]
        for slo, parts in by_class.items()
    }
    whole = (
        [request_stats.total(served) for served in zip(*classes.values(), strict=True)]
        if classes
        else [Served() for _ in grid.times]
    )
    recorded = {grid.at(time_s) for time_s, *_ in (*ended, *loads)} | {len(grid.times) - 1}
    targets = {slo: _targets(points) for slo, points in classes.items()}
    busiest = max(classes, key=lambda slo: sum(served.judged for served in classes[slo]), default="")
    page = HistoryAnswer(
        from_s=grid.from_s,
        to_s=grid.to_s,
        step_s=grid.step_s,
        time_s=grid.times,
        series=served_columns(grid, whole, recorded) | load_columns(grid, loads),
        targets=targets.get(busiest, _targets(())),
        classes={slo: served_columns(grid, points, recorded) for slo, points in sorted(classes.items())},
        class_targets=targets,
        marks=marks,
    )
    return msgspec.json.encode(page)


def _targets(points: Sequence[Served]) -> dict[str, float | None]:
    last = next((served for served in reversed(points) if served.ttft_target_s), None)
    if last is None:
        return {"ttft_s": None, "tpot_s": None, "itl_s": None}
    return {"ttft_s": last.ttft_target_s, "tpot_s": last.tpot_target_s, "itl_s": last.itl_target_s or None}


def served_columns(grid: Grid, points: Sequence[Served], recorded: Collection[int]) -> Columns:
    """Rates, latencies, attainment and where the time went; None in points at which no monitor ran."""
    found: Columns = defaultdict(list)
    for at, (start_s, served) in enumerate(zip(grid.times, points, strict=True)):
        for name, value in _served_figures(served, grid.lasted_s(start_s)):
            found[name].append(value if at in recorded else None)
    return dict(found)


def _served_figures(served: Served, lasted_s: float) -> Iterable[tuple[str, float | None]]:
    ended = served.completed + served.failed + served.cancelled + served.refused
    for name, number in (
        ("requests", ended),
        ("failed", served.failed),
        ("cancelled", served.cancelled),
        ("refused", served.refused),
        ("prompt_tokens", served.prompt_tokens),
        ("output_tokens", served.output_tokens),
    ):
        yield f"{name}_per_s", round(number / lasted_s, 4)
    for name, histogram in (("ttft", served.ttft), ("tpot", served.tpot)):
        for share in (50, 99):
            yield f"{name}_p{share}_s", quantile(histogram, share / 100)
    for share in (50, 90, 99):
        yield f"gap_p{share}_s", quantile(served.longest_gap, share / 100)
    yield "itl_attainment", served.itl_met / served.judged if served.judged and served.itl_target_s else None
    for name, met in (
        ("attainment", served.met),
        ("ttft_attainment", served.ttft_met),
        ("tpot_attainment", served.tpot_met),
    ):
        yield name, met / served.judged if served.judged else None
    for stage in Stage:
        yield f"stage_{stage.value}_s", served.seconds.get(stage.value, 0.0) / served.timed if served.timed else None


def load_columns(grid: Grid, rows: Iterable[tuple[Any, ...]]) -> Columns:
    """Means over the samples of each point; None where there is no sample."""
    decode = msgspec.json.Decoder(Totals).decode
    sums: dict[int, Totals] = {}
    samples: dict[int, int] = defaultdict(int)
    for time_s, number, content in rows:
        at, added = grid.at(time_s), decode(content)
        samples[at] += number
        into = sums.setdefault(at, Totals())
        for name in Totals.__struct_fields__:
            setattr(into, name, getattr(into, name) + getattr(added, name))
    points = [(sums.get(at, Totals()), samples[at]) for at in range(len(grid.times))]
    names = ("running", "waiting", "queued_prefill_tokens", "ready_prefill", "ready_decode")
    found = {name: [_mean(getattr(totals, name), number) for totals, number in points] for name in names}
    for role in Role:
        used, known = f"kv_used_{role.value}", f"kv_samples_{role.value}"
        found[used] = [_mean(getattr(totals, used), getattr(totals, known)) for totals, _ in points]
    return found


def _mean(total: float, number: int) -> float | None:
    return round(total / number, 4) if number else None


def marks_of(grid: Grid, events: Iterable[Event], operations: Iterable[Operation], limit: int = 500) -> list[Mark]:
    """These events, and the flips that succeeded, newest first."""
    found = [
        Mark(event.time_s, event.kind, event.instance_id, event.text) for event in events if event.time_s >= grid.from_s
    ]
    for operation in operations:
        succeeded = operation.kind is OperationKind.FLIP and operation.result is OperationResult.SUCCEEDED
        if succeeded and operation.started_s >= grid.from_s:
            reasons = f": {operation.why}" if operation.why else ""
            text = f"{operation.from_role} → {operation.to_role} by {operation.who}{reasons}"
            found.append(Mark(operation.started_s + (operation.total_s or 0.0), "flip", operation.instance_id, text))
    return sorted(found, key=lambda mark: -mark.time_s)[:limit]


Who = list[tuple[str, str, str]]  # instance id, role, state
DIGITS = {"kv_used": 4, "staged_bytes": 0}  # after the point; of other figures 2


async def instances_over_time(engine: AsyncEngine, grid: Grid, instance_id: str = "") -> bytes:
    """`GET /history/instances` as JSON, of one instance if it is named.

    Raises NotFound; Unavailable when the database fails.
    """
    rows = await tuples_of(engine, _rows(load_steps, grid, load_history.STEPS_S, "samples", "instances", "figures"))
    return await asyncio.to_thread(_instances_page, grid, rows, instance_id)


def _instances_page(grid: Grid, rows: Sequence[tuple[Any, ...]], instance_id: str) -> bytes:
    decode = msgspec.json.Decoder(Who).decode
    steps = [
        (grid.at(time_s), samples, decode(who), np.frombuffer(figures, np.float32).reshape(-1, len(FIGURES)))
        for time_s, samples, who, figures in rows
    ]
    names = sorted({name for _, _, who, _ in steps for name, _, _ in who})
    if instance_id:
        if instance_id not in names:
            raise NotFound(f"nothing is known of an instance {instance_id!r} in that time")
        names = [instance_id]
    means, roles, states = _gathered(steps, names, len(grid.times))
    found = {name: _encoded(means[at], roles[at], states[at]) for at, name in enumerate(names)}
    head = {"from_s": grid.from_s, "to_s": grid.to_s, "step_s": grid.step_s, "time_s": grid.times}
    return msgspec.json.encode({**head, "instances": found})  # an InstanceHistory


def _encoded(means: NDArray[np.float64], roles: list[str | None], states: list[str | None]) -> msgspec.Raw:
    """Encodes one instance by itself: encoding all at once would hold the interpreter's lock for too long."""
    figures = {figure: means[:, column].tolist() for column, figure in enumerate(FIGURES)}  # NaN becomes null
    return msgspec.Raw(msgspec.json.encode({"role": roles, "state": states, **figures}))


def _gathered(
    steps: Sequence[tuple[int, int, Who, NDArray[np.float32]]], names: Sequence[str], points: int
) -> tuple[NDArray[np.float64], list[list[str | None]], list[list[str | None]]]:
    """Means [instances, points, FIGURES] over samples, and the last role and state of each instance in each point."""
    rows = {name: row for row, name in enumerate(names)}
    sums = np.zeros((len(names), points, len(FIGURES)))
    counts = np.zeros_like(sums)
    roles: list[list[str | None]] = [[None] * points for _ in names]
    states: list[list[str | None]] = [[None] * points for _ in names]
    for at, samples, who, figures in steps:
        there = [(number, rows[name]) for number, (name, _, _) in enumerate(who) if name in rows]
        if not there:
            continue
        numbers, into = (np.array(side, np.intp) for side in zip(*there, strict=True))
        values = figures[numbers].astype(np.float64)
        known = ~np.isnan(values)
        sums[into, at] += np.where(known, values, 0.0) * samples
        counts[into, at] += known * samples
        for number, row in there:
            _, roles[row][at], states[row][at] = who[number]
    with np.errstate(invalid="ignore"):
        means = sums / counts
    for column, figure in enumerate(FIGURES):
        means[:, :, column] = np.round(means[:, :, column], DIGITS.get(figure, 2))
    return means, roles, states
