"""Searches on each kind of database."""

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.store.reading import Order, RequestSearch, query_of, search_requests
from shared.store.tables import requests
from shared.store.write_behind import WriteBehind
from shared.wire.api.scheduler import StoredRequest
from tests.shared.store.rows import request_row


@pytest.fixture
async def filled(engine: AsyncEngine) -> AsyncEngine:
    store = WriteBehind(engine, CollectorRegistry())
    await store._migrate()
    rows = [
        request_row(
            "a-1", arrived_s=1.0, caller="anna", ttft_s=0.5, tpot_s=0.1, slo_met=True, updated_s=9.0, longest_gap_s=0.2
        ),
        request_row("a-2", arrived_s=2.0, caller="bert", ttft_s=2.5, slo_met=False, updated_s=3.0),
        request_row(
            "b-1",
            arrived_s=3.0,
            caller="anna",
            decode_instance="d0",
            outcome="peer_lost",
            updated_s=3.0,
            longest_gap_s=2.0,
        ),
    ]
    for row in rows:
        store.put(requests, row)
    await store.flush()
    return engine


@pytest.mark.parametrize(
    ("search", "jobs"),
    [
        (RequestSearch(), ["b-1", "a-2", "a-1"]),
        (RequestSearch(job="a"), ["a-2", "a-1"]),
        (RequestSearch(caller="anna", since_s=2.0), ["b-1"]),
        (RequestSearch(until_s=2.0), ["a-1"]),
        (RequestSearch(instance="d0"), ["b-1"]),
        (RequestSearch(outcome="peer_lost"), ["b-1"]),
        (RequestSearch(missed=True), ["a-2"]),
        (RequestSearch(missed=False), ["a-1"]),
        (RequestSearch(order=Order.SLOWEST_TTFT), ["a-2", "a-1"]),
        (RequestSearch(order=Order.SLOWEST_TPOT), ["a-1"]),
        (RequestSearch(order=Order.LONGEST_GAP), ["b-1", "a-1"]),
        (RequestSearch(order=Order.LONGEST, limit=1), ["a-1"]),
    ],
    ids=str,
)
async def test_what_is_found(filled: AsyncEngine, search: RequestSearch, jobs: list[str]) -> None:
    rows, more = await search_requests(filled, StoredRequest, search)
    assert [row.job_id for row in rows] == jobs
    assert more == (search.limit == 1)


@pytest.mark.parametrize(
    "search",
    [
        RequestSearch(),
        RequestSearch(caller="anna"),
        RequestSearch(slo="chat"),
        RequestSearch(instance="d0"),
        RequestSearch(outcome="stop"),
        RequestSearch(phase="decode"),
        RequestSearch(job="a"),
        RequestSearch(order=Order.SLOWEST_TTFT),
        RequestSearch(order=Order.SLOWEST_TPOT),
        RequestSearch(order=Order.LONGEST_GAP),
        RequestSearch(order=Order.LONGEST),
    ],
    ids=str,
)
async def test_an_index_is_used(filled: AsyncEngine, search: RequestSearch) -> None:
    if filled.dialect.name != "sqlite":
        pytest.skip("PostgreSQL chooses by what a table holds: a small one it reads whole")
    query = str(query_of(search).compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
    async with filled.connect() as connection:
        plan = [row[-1] for row in await connection.execute(text(f"EXPLAIN QUERY PLAN {query}"))]
    assert any("USING INDEX" in step for step in plan), plan
