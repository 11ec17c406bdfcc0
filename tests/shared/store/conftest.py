import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.store.database import open_engine
from tests.shared.store.postgres_server import PostgresServer, postgres_server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that the machine pauses is not what is tested."""
    monkeypatch.setattr("shared.store.database.CONNECT_S", 30)
    monkeypatch.setattr("shared.store.database.STATEMENT_S", 60)


@pytest.fixture(scope="session")
def running_postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
async def postgres(running_postgres: PostgresServer) -> PostgresServer:
    """A server whose database is empty."""
    admin = open_engine(running_postgres.url)
    async with admin.begin() as connection:  # much faster than a new database for each test
        await connection.execute(text("DROP SCHEMA public CASCADE"))
        await connection.execute(text("CREATE SCHEMA public"))
    await admin.dispose()
    return running_postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    opened = open_engine(url)
    yield opened
    await opened.dispose()


@pytest.fixture
def until() -> Callable[[Callable[[], object], str], object]:
    async def poll(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            assert loop.time() < deadline, f"not within {timeout_s} s: {what}"
            await asyncio.sleep(0.005)

    return poll
