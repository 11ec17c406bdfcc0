"""`GET /history`: what was served and how full the cluster was, point by point."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.domain.instance import Role
from shared.domain.verdict import Stage
from shared.policy import load_history, served
from shared.policy.load_history import Totals
from shared.policy.log_histogram import quantile
from shared.policy.served import Served
from shared.store.reading import tuples_of
from shared.store.tables import load_steps
from shared.store.tables import served as served_table

LEAST_S = 10  # of a point
FINE_MINUTES = 120  # over more than that points are a minute long at least
Column = list[float | None]
Columns = dict[str, Column]


class Grid(NamedTuple):
    """Points of equal length, of which the last one holds `now`. Unix seconds."""

    from_s: int
    to_s: int
    step_s: int
    now: float

    @classmethod
    def of(cls, minutes: int, points: int, now: float) -> "Grid":
        """About so many points over so many minutes: whole steps of the finest rows that are not finer than they."""
        wanted = minutes * 60 / points
        unit_s = 60 if minutes > FINE_MINUTES or wanted > 60 else LEAST_S
        step_s = max(1, ceil(wanted / unit_s)) * unit_s
        to_s = (int(now) // step_s + 1) * step_s
        return cls(to_s - max(1, minutes * 60 // step_s) * step_s, to_s, step_s, now)

    @property
    def times(self) -> list[int]:
        """Where each point begins."""
        return list(range(self.from_s, self.to_s, self.step_s))

    def at(self, time_s: float) -> int:
        """The point of a moment within it."""
        return int(time_s - self.from_s) // self.step_s

    def lasted_s(self, start_s: int) -> float:
        """Of a point, as much as has passed."""
        return max(1.0, min(start_s + self.step_s, self.now) - start_s)

    def level(self, steps_s: Sequence[int]) -> int:
        """Of rows: the longest that are not longer than a point."""
        return max(step_s for step_s in steps_s if step_s <= self.step_s)

    def describe(self) -> dict[str, Any]:
        """What every answer begins with."""
        return {"from_s": self.from_s, "to_s": self.to_s, "step_s": self.step_s, "time_s": self.times}


async def history(engine: AsyncEngine, grid: Grid, marks: list[dict[str, Any]]) -> bytes:
    """The page as JSON. Raises Unavailable when the database fails."""
    ended = await tuples_of(engine, _rows(served_table, grid, served.STEPS_S, "slo", "content"))
    loads = await tuples_of(engine, _rows(load_steps, grid, load_history.STEPS_S, "samples", "totals"))
    return await asyncio.to_thread(_page, grid, ended, loads, marks)  # some 10 ms, which the loop is spared


def _rows(table: Any, grid: Grid, steps_s: Sequence[int], *names: str) -> Any:
    columns = (table.c.time_s, *(table.c[name] for name in names))
    level = grid.level(steps_s)
    wanted = (table.c.step_s == level, table.c.time_s >= grid.from_s, table.c.time_s < grid.to_s)
    return select(*columns).where(*wanted).order_by(table.c.time_s)


def _page(
    grid: Grid, ended: Sequence[tuple[Any, ...]], loads: Sequence[tuple[Any, ...]], marks: list[dict[str, Any]]
) -> bytes:
    decode = msgspec.json.Decoder(Served).decode
    by_class: dict[str, dict[int, list[Served]]] = defaultdict(lambda: defaultdict(list))
    for time_s, slo, content in ended:
        by_class[slo][grid.at(time_s)].append(decode(content))
    classes = {
        slo: [served.total(parts.get(at, ())) for at in range(len(grid.times))] for slo, parts in by_class.items()
    }
    whole = (
        [served.total(one) for one in zip(*classes.values(), strict=True)]
        if classes
        else [Served() for _ in grid.times]
    )
    seen = {grid.at(time_s) for time_s, *_ in (*ended, *loads)} | {len(grid.times) - 1}
    targets = {slo: _targets(points) for slo, points in classes.items()}
    busiest = max(classes, key=lambda slo: sum(one.judged for one in classes[slo]), default="")
    return msgspec.json.encode(
        {
            **grid.describe(),
            "series": served_columns(grid, whole, seen) | load_columns(grid, loads),
            "targets": targets.get(busiest, _targets(())),
            "classes": {slo: served_columns(grid, points, seen) for slo, points in sorted(classes.items())},
            "class_targets": targets,
            "marks": marks,
        }
    )


def _targets(points: Sequence[Served]) -> dict[str, float | None]:
    last = next((one for one in reversed(points) if one.ttft_target_s), None)
    if last is None:
        return {"ttft_s": None, "tpot_s": None, "itl_s": None}
    return {"ttft_s": last.ttft_target_s, "tpot_s": last.tpot_target_s, "itl_s": last.itl_target_s or None}


def served_columns(grid: Grid, points: Sequence[Served], seen: Collection[int]) -> Columns:
    """Of what was served: rates, latencies, attainment, where the time went; None in points that no monitor saw."""
    found: Columns = defaultdict(list)
    for at, (start_s, one) in enumerate(zip(grid.times, points, strict=True)):
        for name, value in _served_figures(one, grid.lasted_s(start_s)):
            found[name].append(value if at in seen else None)
    return dict(found)


def _served_figures(one: Served, lasted_s: float) -> Iterable[tuple[str, float | None]]:
    ended = one.completed + one.failed + one.cancelled + one.refused
    for name, number in (
        ("requests", ended),
        ("failed", one.failed),
        ("cancelled", one.cancelled),
        ("refused", one.refused),
        ("prompt_tokens", one.prompt_tokens),
        ("output_tokens", one.output_tokens),
    ):
        yield f"{name}_per_s", round(number / lasted_s, 4)
    for name, histogram in (("ttft", one.ttft), ("tpot", one.tpot)):
        for share in (50, 99):
            yield f"{name}_p{share}_s", quantile(histogram, share / 100)
    for share in (50, 90, 99):
        yield f"gap_p{share}_s", quantile(one.longest_gap, share / 100)
    yield "itl_attainment", one.itl_met / one.judged if one.judged and one.itl_target_s else None
    for name, met in (("attainment", one.met), ("ttft_attainment", one.ttft_met), ("tpot_attainment", one.tpot_met)):
        yield name, met / one.judged if one.judged else None
    for stage in Stage:
        yield f"stage_{stage.value}_s", one.seconds.get(stage.value, 0.0) / one.timed if one.timed else None


def load_columns(grid: Grid, rows: Iterable[tuple[Any, ...]]) -> Columns:
    """Of what instances did: means over the samples of each point; None where there is none."""
    decode = msgspec.json.Decoder(Totals).decode
    sums: dict[int, Totals] = {}
    samples: dict[int, int] = defaultdict(int)
    for time_s, number, totals in rows:
        at, one = grid.at(time_s), decode(totals)
        samples[at] += number
        into = sums.setdefault(at, Totals())
        for name in Totals.__struct_fields__:
            setattr(into, name, getattr(into, name) + getattr(one, name))
    points = [(sums.get(at, Totals()), samples[at]) for at in range(len(grid.times))]
    found = {name: [_mean(getattr(one, name), number) for one, number in points] for name in _SUMMED}
    for role in Role:
        used, known = f"kv_used_{role.value}", f"kv_samples_{role.value}"
        found[used] = [_mean(getattr(one, used), getattr(one, known)) for one, _ in points]
    return found


_SUMMED = ("running", "waiting", "queued_prefill_tokens", "ready_prefill", "ready_decode")


def _mean(total: float, number: int) -> float | None:
    return round(total / number, 4) if number else None


def marks_of(
    grid: Grid, events: Iterable[Mapping[str, Any]], flips: Iterable[Mapping[str, Any]], most: int = 500
) -> list[dict[str, Any]]:
    """What to draw across the pictures: events of the kinds that are given, and flips that succeeded; newest first."""
    found = [
        {"time_s": one["time_s"], "kind": one["kind"], "instance_id": one["instance_id"], "text": one["text"]}
        for one in events
        if one["time_s"] >= grid.from_s
    ]
    for one in flips:
        if one["kind"] == "flip" and one["result"] == "succeeded" and one["started_s"] >= grid.from_s:
            text = f"{one['from_role']} → {one['to_role']} by {one['who']}" + (f": {one['why']}" if one["why"] else "")
            at_s = one["started_s"] + (one["total_s"] or 0.0)
            found.append({"time_s": at_s, "kind": "flip", "instance_id": one["instance_id"], "text": text})
    return sorted(found, key=lambda one: -float(one["time_s"]))[:most]
