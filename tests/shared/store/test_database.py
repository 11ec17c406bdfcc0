"""Errors of a database while it connects."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.exc import OperationalError

from shared.errors import Unavailable
from shared.store.database import open_engine
from shared.store.lease import LeaseStore
from shared.store.reading import read_events
from shared.wire.api import Event

_STARTS = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"
_ASKS_FOR_TLS = 8  # bytes of such a message


@pytest.fixture
async def starting() -> AsyncIterator[str]:
    """The URL of a PostgreSQL server that starts, and says so to whoever connects."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (size := int.from_bytes(await reader.readexactly(4), "big")) == _ASKS_FOR_TLS:
            await reader.readexactly(size - 4)
            writer.write(b"N")
        await reader.readexactly(size - 4)
        writer.write(b"E" + (len(_STARTS) + 4).to_bytes(4, "big") + _STARTS)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"postgresql://somebody:secret@127.0.0.1:{port}/polyphase"


async def test_a_server_that_starts_does_not_answer_a_reader(starting: str) -> None:
    engine = open_engine(starting)
    with pytest.raises(Unavailable, match="starting up"):
        await read_events(engine, Event, 1)
    await engine.dispose()


async def test_a_lease_meets_it_as_an_error_of_the_database(starting: str) -> None:
    store = LeaseStore(starting, "monitor", 1.0)
    with pytest.raises(OperationalError, match="starting up"):
        await store.read()
    await store.close()
