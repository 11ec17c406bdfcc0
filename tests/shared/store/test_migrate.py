import asyncio
import sqlite3
import sys
from pathlib import Path

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import Conflict
from shared.store.database import INITIAL, LAST_FORMER, open_engine, refused_file
from shared.store.migrate import _differences, migrate
from shared.store.tables import metadata

_MIGRATE = """
import asyncio, sys
from shared.store.database import open_engine
from shared.store.migrate import migrate
asyncio.run(migrate(open_engine(sys.argv[1])))
"""


async def tables(engine: AsyncEngine) -> set[str]:
    async with engine.connect() as connection:
        return set(await connection.run_sync(lambda c: inspect(c).get_table_names()))


async def execute(engine: AsyncEngine, *statements: str) -> None:
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))


async def revision(engine: AsyncEngine) -> object:
    async with engine.connect() as connection:
        return (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one()


async def test_all_tables_are_there_and_a_second_run_changes_nothing(engine: AsyncEngine) -> None:
    await migrate(engine)
    await migrate(engine)
    assert await tables(engine) == {*metadata.tables, "alembic_version"}
    async with engine.connect() as connection:
        assert await connection.run_sync(_differences) == []


@pytest.mark.parametrize("older", [LAST_FORMER, INITIAL])
async def test_an_older_revision_is_upgraded_and_keeps_its_rows(engine: AsyncEngine, older: str) -> None:
    """Operations get the origin that their reasons and actors show."""
    await migrate(engine)
    newest = await revision(engine)
    operations = {
        "by ann": ("ann", None),
        "idle": ("role_flip:idle", "idle"),
        "a loss": ("planner: proposal x", "loss"),
    }
    await execute(
        engine,
        *(f"ALTER TABLE {table} DROP COLUMN origin" for table in ("flips", "events")),
        *(f"ALTER TABLE flips DROP COLUMN {column}" for column in ("job_id", "to_instance")),
        *(f"ALTER TABLE requests DROP COLUMN predicted_{one}_s" for one in ("ttft", "tpot")),
        "DROP TABLE adapters",
        f"UPDATE alembic_version SET version_num = '{older}'",
        "INSERT INTO leases VALUES ('monitor', 'm', 'http://m', 1, 2, 3.0)",
    )
    insert = text(
        "INSERT INTO flips (operation_id, kind, instance_id, generation, from_role, to_role, who, started_s, result, "
        "error, why) VALUES (:id, 'flip', 'p0', 1, 'prefill', 'decode', :who, 1.0, 'succeeded', '', :why)"
    )
    event = text(
        "INSERT INTO events (event_id, time_s, kind, instance_id, role, text, operation_id) VALUES "
        "(:id, 1.0, 'policy_flip', 'p0', 'decode', 'text', :operation)"
    )
    async with engine.begin() as connection:
        for name, (who, why) in operations.items():
            await connection.execute(insert, {"id": name, "who": who, "why": why})
        for operation in ("idle", ""):
            await connection.execute(event, {"id": f"of {operation}", "operation": operation})
    await migrate(engine)
    assert await revision(engine) == newest
    async with engine.connect() as connection:
        assert await connection.run_sync(_differences) == []
        assert (await connection.execute(text("SELECT holder FROM leases"))).scalar_one() == "m"
        flips = await connection.execute(text("SELECT operation_id, origin FROM flips"))
        assert {tuple(row) for row in flips} == {("by ann", "operator"), ("idle", "policy"), ("a loss", "plan")}
        events = await connection.execute(text("SELECT event_id, origin FROM events"))
        assert {tuple(row) for row in events} == {("of idle", "policy"), ("of ", "")}


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        ("0007", "", f"schema revision 0007; .*upgrades {LAST_FORMER} and later .*polyphase migrate"),
        ("later", "", "schema revision later, of a newer version"),
        (LAST_FORMER, "ALTER TABLE flips DROP COLUMN why", "not those of its schema revision .*flips.*move it away"),
    ],
)
async def test_a_database_that_cannot_be_upgraded_is_refused_and_left_as_it_is(
    engine: AsyncEngine, number: str, change: str, message: str
) -> None:
    await migrate(engine)
    await execute(engine, f"UPDATE alembic_version SET version_num = '{number}'", *filter(None, [change]))
    with pytest.raises(Conflict, match=message) as caught:
        await migrate(engine)
    assert engine.url.render_as_string(hide_password=True) in caught.value.message
    assert await revision(engine) == number


@pytest.mark.parametrize(("number", "refused"), [("0009", True), (LAST_FORMER, False), (INITIAL, False)])
def test_a_file_of_an_older_revision_is_known_before_it_is_opened(tmp_path: Path, number: str, refused: bool) -> None:
    file = tmp_path / "store.db"
    assert refused_file(file) == ""
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        assert refused_file(file) == ""
        connection.execute("INSERT INTO alembic_version VALUES (?)", (number,))
    assert (f"{file} has schema revision {number}" in refused_file(file)) is refused


async def test_many_at_once_in_one_process(url: str) -> None:
    engines = [open_engine(url) for _ in range(4)]
    await asyncio.gather(*(migrate(engine) for engine in engines))
    assert "requests" in await tables(engines[0])
    for engine in engines:
        await engine.dispose()


async def test_many_processes_at_once(url: str, engine: AsyncEngine) -> None:
    root = Path(__file__).parents[3]
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", _MIGRATE, url, cwd=root, stderr=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    async with asyncio.timeout(60):
        outputs = await asyncio.gather(*(process.communicate() for process in running))
    failures = [errors.decode() for process, (_, errors) in zip(running, outputs, strict=True) if process.returncode]
    assert failures == []
    assert "requests" in await tables(engine)
