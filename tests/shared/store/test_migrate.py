import asyncio
import sys
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.store.database import open_engine
from shared.store.migrate import migrate
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


async def test_all_tables_are_there_and_a_second_run_changes_nothing(engine: AsyncEngine) -> None:
    await migrate(engine)
    await migrate(engine)
    assert await tables(engine) == {*metadata.tables, "alembic_version"}


async def test_the_migrations_lead_to_the_tables_of_the_code(engine: AsyncEngine) -> None:
    await migrate(engine)

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []


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
