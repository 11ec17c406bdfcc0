"""A SQLite file that is removed under those who write to it is made again, and rows that wait are in the new one."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shared.store.database import open_engine
from shared.store.tables import requests
from tests.shared.store.rows import request_row
from tests.shared.store.test_write_behind import writer

ROOT = Path(__file__).parents[3]
Until = Callable[..., Any]


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
