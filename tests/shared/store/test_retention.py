import asyncio
from pathlib import Path

import pytest
from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import InvalidRequest, Unavailable
from shared.store.database import open_engine
from shared.store.migrate import migrate
from shared.store.reading import read_request
from shared.store.retention import Retention, prune, prune_fine
from shared.store.tables import load_steps, loads, requests
from tests.shared.store.rows import load_row, request_row


async def test_rows_older_than_their_age_go(engine: AsyncEngine) -> None:
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.execute(insert(loads), [load_row("a", float(t)) for t in range(10)])
        await connection.execute(insert(requests), [request_row("old", arrived_s=1), request_row("new")])
    assert await prune(engine, {"loads": 5.0, "requests": 100.0}, now=10.0) == {"loads": 5, "requests": 0}
    assert await prune(engine, {"requests": 100.0}, now=150.0) == {"requests": 1}
    async with engine.connect() as connection:
        left = (await connection.execute(select(loads.c.time_s).order_by(loads.c.time_s))).scalars().all()
    assert left == [5.0, 6.0, 7.0, 8.0, 9.0]
    assert await read_request(engine, "old") is None


async def test_fine_steps_go_before_longer_ones(engine: AsyncEngine) -> None:
    await migrate(engine)
    rows = [
        {
            "step_s": step_s,
            "time_s": time_s,
            "life": "a",
            "samples": 1,
            "totals": "{}",
            "instances": "[]",
            "figures": b"",
        }
        for step_s in (10, 60)
        for time_s in (0, 600)
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(load_steps), rows)
    assert await prune_fine(engine, 500.0, now=1_000.0) == 1
    async with engine.connect() as connection:
        left = [tuple(row) for row in await connection.execute(select(load_steps.c.step_s, load_steps.c.time_s))]
    assert sorted(left) == [(10, 600), (60, 0), (60, 600)]


async def test_housekeeping_survives_a_database_that_fails(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/empty.db")
    ready = asyncio.Event()
    retention = Retention(engine, {"loads": 1.0}, ready)
    await retention.step()  # not ready: nothing is tried
    ready.set()
    await retention.step()  # no such table: logged
    with pytest.raises(Unavailable, match="database does not answer"):
        await read_request(engine, "j")
    await engine.dispose()


def test_only_known_databases() -> None:
    with pytest.raises(InvalidRequest, match="sqlite: or postgresql:"):
        open_engine("mysql://localhost/x")
