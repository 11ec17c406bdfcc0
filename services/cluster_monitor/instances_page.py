"""`GET /history/instances`: role, state and load of each instance, point by point."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.history_page import Grid
from shared.errors import NotFound
from shared.policy.load_history import FIGURES, STEPS_S
from shared.store.reading import tuples_of
from shared.store.tables import load_steps

Who = list[tuple[str, str, str]]
DIGITS = {"kv_used": 4, "staged_bytes": 0}  # after the point; of other figures 2


async def instances(engine: AsyncEngine, grid: Grid, instance_id: str = "") -> bytes:
    """The page as JSON, of one instance if it is named. Raises NotFound, Unavailable when the database fails."""
    of = load_steps.c
    wanted = (of.step_s == grid.level(STEPS_S), of.time_s >= grid.from_s, of.time_s < grid.to_s)
    query = select(of.time_s, of.samples, of.instances, of.figures).where(*wanted).order_by(of.time_s)
    rows = await tuples_of(engine, query)
    return await asyncio.to_thread(_page, grid, rows, instance_id)


def _page(grid: Grid, rows: Sequence[tuple[Any, ...]], instance_id: str) -> bytes:
    decode = msgspec.json.Decoder(Who).decode
    steps = [(grid.at(time_s), samples, decode(who), _array(figures)) for time_s, samples, who, figures in rows]
    names = sorted({name for _, _, who, _ in steps for name, _, _ in who})
    if instance_id:
        if instance_id not in names:
            raise NotFound(f"nothing is known of an instance {instance_id!r} in that time")
        names = [instance_id]
    means, roles, states = _gathered(steps, names, len(grid.times))
    found = {name: _encoded(means[at], roles[at], states[at]) for at, name in enumerate(names)}
    return msgspec.json.encode({**grid.describe(), "instances": found})


def _encoded(means: NDArray[np.float64], roles: list[str | None], states: list[str | None]) -> msgspec.Raw:
    """One instance by itself: encoding all at once would keep the interpreter, and the loop, for too long."""
    figures = {figure: means[:, column].tolist() for column, figure in enumerate(FIGURES)}  # NaN becomes null
    return msgspec.Raw(msgspec.json.encode({"role": roles, "state": states, **figures}))


def _array(figures: bytes) -> NDArray[np.float32]:
    return np.frombuffer(figures, np.float32).reshape(-1, len(FIGURES))


def _gathered(
    steps: Sequence[tuple[int, int, Who, NDArray[np.float32]]], names: Sequence[str], points: int
) -> tuple[NDArray[np.float64], list[list[str | None]], list[list[str | None]]]:
    """Means [instances, points, FIGURES] over samples, and what each was last in a point."""
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
