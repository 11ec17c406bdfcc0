"""A SQLite file that is removed under those who write to it is made again, and rows that wait are in the new one."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import Unavailable
from shared.store.database import identity, open_engine
from shared.store.migrate import migrate
from shared.store.reading import read_request, read_requests, tuples_of
from shared.store.tables import loads, requests
from shared.store.write_behind import WriteBehind
from shared.wire.api.scheduler import StoredRequest
from tests.shared.store.postgres_server import PostgresServer
from tests.shared.store.rows import load_row, request_row

Until = Callable[..., Any]


async def read_rows(engine: AsyncEngine, *, limit: int, phase: str | None = None) -> list[StoredRequest]:
    return await read_requests(engine, StoredRequest, phase=phase, limit=limit)


@asynccontextmanager
async def writer(engine: AsyncEngine, **options: Any) -> AsyncIterator[WriteBehind]:
    store = WriteBehind(engine, CollectorRegistry(), soon_s=0.01, **options)
    task = asyncio.get_running_loop().create_task(store.run())
    try:
        yield store
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_rows_arrive_and_the_newest_of_a_key_wins(engine: AsyncEngine, until: Until) -> None:
    async with writer(engine) as store:
        for number in range(1200):
            store.put(requests, request_row(f"j{number}", arrived_s=number))
        store.put(requests, request_row("j7", phase="decode", output_tokens=3))
        store.put(loads, load_row("d0", 5.0))
        await until(lambda: not store.queued, "all written")
        await until(lambda: store.ready.is_set(), "ready")
    row = await read_request(engine, StoredRequest, "j7")
    assert row is not None
    assert (row.phase, row.output_tokens) == ("decode", 3)
    assert len(await read_rows(engine, limit=5000)) == 1200
    assert [row.job_id for row in await read_rows(engine, phase="queued", limit=2)] == ["j1199", "j1198"]


async def test_a_final_phase_is_not_overwritten_by_an_older_report(engine: AsyncEngine, until: Until) -> None:
    async with writer(engine) as store:
        store.put(requests, request_row("j", phase="completed", final=True, slo_met=True))
        await until(lambda: not store.queued, "first written")
        store.put(requests, request_row("j", phase="prefill"))
        store.put(requests, request_row("k"))
        await until(lambda: not store.queued, "second written")
    row = await read_request(engine, StoredRequest, "j")
    assert row is not None
    assert (row.phase, row.slo_met) == ("completed", True)


async def test_that_a_job_is_lost_is_only_supposed(engine: AsyncEngine, until: Until) -> None:
    """A scheduler that heard nothing for long says so; whoever knows more has the last word, in any order."""
    lost = {"phase": "failed", "final": True, "outcome": "lost"}
    done = {"phase": "completed", "final": True, "outcome": "stop"}
    rows = [
        request_row("mine", phase="decode"),
        request_row("mine", **lost),
        request_row("taken over", phase="decode", scheduler_id="s1"),
        request_row("taken over", **lost),
        request_row("ended elsewhere", scheduler_id="s1", **done),
        request_row("ended elsewhere", **lost),
        request_row("came back", **lost),
        request_row("came back", scheduler_id="s1", phase="decode"),
        request_row("ended after all", **lost),
        request_row("ended after all", **done),
    ]
    async with writer(engine) as store:
        for row in rows:
            store.put(requests, row)
            await until(lambda: not store.queued and store.ready.is_set(), "written")
    found = {row.job_id: (row.phase, row.outcome) for row in await read_rows(engine, limit=9)}
    assert found == {
        "mine": ("failed", "lost"),
        "taken over": ("decode", ""),
        "ended elsewhere": ("completed", "stop"),
        "came back": ("decode", ""),
        "ended after all": ("completed", "stop"),
    }


async def test_what_is_queued_at_the_end_is_still_written(engine: AsyncEngine, until: Until) -> None:
    async with writer(engine) as store:
        await until(store.ready.is_set, "schema")
        for number in range(700):
            store.put(requests, request_row(f"j{number}"))
    assert len(await read_rows(engine, limit=5000)) == 700


async def test_a_row_that_the_database_refuses_does_not_block_the_others(engine: AsyncEngine, until: Until) -> None:
    async with writer(engine) as store:
        store.put(requests, request_row("good-1"))
        store.put(requests, request_row("bad", gateway_id=None))
        store.put(requests, request_row("good-2"))
        await until(lambda: not store.queued and store.dropped["refused"], "bad row dropped")
    assert store.dropped == {"refused": 1}
    assert {row.job_id for row in await read_rows(engine, limit=9)} == {"good-1", "good-2"}


async def test_a_refused_row_does_not_block_those_of_other_tables(engine: AsyncEngine, until: Until) -> None:
    async with writer(engine) as store:
        await until(store.ready.is_set, "ready")
        store.put(requests, request_row("good"))
        store.put(requests, request_row("bad", gateway_id=None))
        store.put(loads, load_row("d0", 5.0))
        await until(lambda: not store.queued and store.dropped["refused"], "bad row dropped")
    assert store.dropped == {"refused": 1}
    assert [row.job_id for row in await read_rows(engine, limit=9)] == ["good"]
    assert len(await tuples_of(engine, select(loads))) == 1
    assert [store._written.labels(table)._value.get() for table in ("requests", "loads")] == [1.0, 1.0]


async def test_rows_of_two_tables_take_three_turns_of_the_thread_of_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each table and one for the commit; each turn wakes the thread and the loop."""
    engine = open_engine(f"sqlite:///{tmp_path}/store.db")
    store = WriteBehind(engine, CollectorRegistry())
    await migrate(engine)
    store._file = identity(engine)
    turns: list[object] = []
    execute = aiosqlite.Connection._execute

    async def counted(connection: aiosqlite.Connection, function: Any, *args: Any) -> Any:
        turns.append(function)
        return await execute(connection, function, *args)

    await read_rows(engine, limit=1)  # connects
    monkeypatch.setattr(aiosqlite.Connection, "_execute", counted)
    for number in range(3):
        store.put(requests, request_row(f"j{number}"), within_s=3600.0)
        store.put(loads, load_row("d0", number), within_s=3600.0)
    await store.flush()
    assert len(turns) == 3
    turns.clear()
    assert len(await read_rows(engine, limit=5)) == 3
    assert len(turns) == 1  # a statement with its rows
    await engine.dispose()


async def test_who_waits_for_a_row_hears_when_the_database_has_it(engine: AsyncEngine) -> None:
    async with writer(engine) as store:
        await store.written(requests, request_row("j", output_tokens=3), 20.0)
        row = await read_request(engine, StoredRequest, "j")
        assert row is not None
        assert row.output_tokens == 3


async def test_who_waits_for_a_row_hears_that_the_database_refuses_it(engine: AsyncEngine) -> None:
    async with writer(engine) as store:
        with pytest.raises(Unavailable, match="the database refuses it: IntegrityError"):
            await store.written(requests, request_row("bad", phase=None), 20.0)
        await store.written(requests, request_row("good"), 20.0)


async def test_a_row_that_another_one_replaced_was_never_written(engine: AsyncEngine) -> None:
    store = WriteBehind(engine, CollectorRegistry())
    waiting = asyncio.create_task(store.written(requests, request_row("j", output_tokens=1), 0.2))
    await asyncio.sleep(0)
    store.put(requests, request_row("j", output_tokens=2))
    await migrate(engine)
    store._file = identity(engine)
    await store.flush()
    with pytest.raises(Unavailable, match="did not take it within"):
        await waiting
    row = await read_request(engine, StoredRequest, "j")
    assert row is not None
    assert row.output_tokens == 2


async def test_with_a_database_that_cannot_be_opened_nothing_blocks_and_drops_are_counted(
    tmp_path: Path, until: Until
) -> None:
    blocked = tmp_path / "folder-instead-of-a-file.db"
    blocked.mkdir()
    engine = open_engine(f"sqlite:///{blocked}")
    registry = CollectorRegistry()
    store = WriteBehind(engine, registry, capacity=10, soon_s=0.01)
    task = asyncio.get_running_loop().create_task(store.run())
    try:
        started = asyncio.get_running_loop().time()
        for number in range(1000):
            store.put(requests, request_row(f"j{number}"))
        assert asyncio.get_running_loop().time() - started < 1.0
        assert (store.queued, store.dropped["queue_full"]) == (10, 990)
        await until(lambda: b"polyphase_store_failures_total 0.0" not in generate_latest(registry), "a retry")
        assert not task.done()
        assert b'polyphase_store_dropped_total{cause="queue_full"} 990.0' in generate_latest(registry)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.dispose()


async def test_a_postgresql_that_dies_and_returns(postgres: PostgresServer, until: Until) -> None:
    engine = open_engine(postgres.url)
    try:
        await migrate(engine)
        async with writer(engine) as store:
            store.put(requests, request_row("before"))
            await until(lambda: not store.queued, "written")
            postgres.stop()
            store.put(requests, request_row("meanwhile"))
            await until(lambda: store._failures._value.get() > 0, "a failure")
            assert store.queued == 1  # kept for the next attempt
            postgres.start()
            await until(lambda: not store.queued, "written after its return", timeout_s=20.0)
        found = {row.job_id for row in await read_rows(engine, limit=9)}
        assert found == {"before", "meanwhile"}
        assert not store.dropped
    finally:
        await engine.dispose()


async def test_what_has_time_waits_for_what_has_not_and_goes_with_it(engine: AsyncEngine, until: Until) -> None:
    async with writer(engine) as store:
        await until(store.ready.is_set, "ready")
        store.put(loads, load_row("d0", 5.0), within_s=3600.0)
        for number in range(3):
            store.put(loads, load_row("d0", 6.0 + number), within_s=3600.0)
            await asyncio.sleep(0.02)  # twice as long as any other row would wait
        assert store.queued == 4
        store.put(requests, request_row("j"))
        await until(lambda: not store.queued, "all written")
    assert await read_request(engine, StoredRequest, "j") is not None


async def test_a_queue_that_is_half_full_is_written_though_its_rows_have_time(
    engine: AsyncEngine, until: Until
) -> None:
    async with writer(engine, capacity=10) as store:
        await until(store.ready.is_set, "ready")
        for number in range(5):
            store.put(requests, request_row(f"j{number}"), within_s=3600.0)
        await until(lambda: not store.queued, "all written")
    assert len(await read_rows(engine, limit=10)) == 5


# A SQLite file that is removed under those who write to it is made again, and rows that wait are in the new one
ROOT = Path(__file__).parents[3]


def remove(file: Path, what: str) -> None:
    file.unlink()
    if what == "all":
        for ending in ("-wal", "-shm"):
            file.with_name(file.name + ending).unlink(missing_ok=True)


def rows(file: Path) -> set[str]:
    if not file.exists():
        return set()
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        try:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            return {job_id for (job_id,) in connection.execute("SELECT job_id FROM requests")}
        except sqlite3.OperationalError:  # locked, or made and not migrated yet
            return set()


@pytest.mark.parametrize("what", ["the file", "all"])
async def test_a_removed_file_is_made_again(tmp_path: Path, until: Until, what: str) -> None:
    file = tmp_path / "store.db"
    engine = open_engine(f"sqlite:///{file}")
    async with writer(engine) as store:
        for number in range(50):
            store.put(requests, request_row(f"before-{number}"))
        await until(lambda: not store.queued, "written")
        remove(file, what)
        for number in range(700):  # more than a batch
            store.put(requests, request_row(f"after-{number}"))
        await until(lambda: not store.queued, "written again")
        assert rows(file) == {f"after-{n}" for n in range(700)}
        assert not store.dropped
        remove(file, what)
        store.put(requests, request_row("once more"))
        await until(lambda: not store.queued, "and again")
    assert rows(file) == {"once more"}
    await engine.dispose()


async def test_what_is_being_written_when_the_file_goes_is_in_the_new_one(tmp_path: Path, until: Until) -> None:
    file = tmp_path / "store.db"
    engine = open_engine(f"sqlite:///{file}")
    async with writer(engine) as store:
        await until(store.ready.is_set, "schema")
        write, removed = store._write, False

        async def write_and_lose(taken: Any) -> None:
            nonlocal removed
            await write(taken)
            if not removed:
                removed = True
                remove(file, "the file")

        store._write = write_and_lose  # type: ignore[method-assign]
        store.put(requests, request_row("unlucky"))
        await until(lambda: not store.queued, "written twice")
        assert removed
    assert rows(file) == {"unlucky"}
    await engine.dispose()


async def test_several_processes_find_the_same_new_file(tmp_path: Path, until: Until) -> None:
    """Each holds connections to the removed file; none of them may hurt the log of the new one."""
    file = tmp_path / "store.db"
    names = ("a", "b", "c")
    script = str(Path(__file__).with_name("write_process.py"))
    pipe = asyncio.subprocess.PIPE
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            script,
            f"sqlite:///{file}",
            name,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
        for name in names
    ]
    try:
        for round_ in range(3):
            await until(lambda: {one.split("-")[0] for one in rows(file)} == set(names), "all write", timeout_s=60)
            highest = {name: _highest(rows(file), name) for name in names}
            remove(file, "the file" if round_ % 2 else "all")

            def goes_on(highest: dict[str, int] = highest) -> bool:
                found = rows(file)
                return all(_highest(found, name) > highest[name] for name in names)

            await until(goes_on, "all write to the new file", timeout_s=60)
        before_the_end = {name: _highest(rows(file), name) for name in names}
    finally:
        ends = await asyncio.gather(*(process.communicate(b"") for process in running))
    found = rows(file)
    for name, process, (out, errors) in zip(names, running, ends, strict=True):
        assert process.returncode == 0, errors.decode()[-2000:]
        first = before_the_end[name]
        assert {f"{name}-{number}" for number in range(first, int(out.split()[-1]))} <= found  # not one lost since


def _highest(found: set[str], name: str) -> int:
    return max((int(one.split("-")[1]) for one in found if one.startswith(f"{name}-")), default=-1)
