"""The planner's searches behind HTTP, as in its service: a real database, real processes."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from services.planner.routes import router
from services.planner.search_process import COMMAND
from services.planner.searches import Searches
from services.planner.settings import PlannerSettings
from shared.runtime.http import service_app
from shared.runtime.tasks import background
from shared.store.database import open_engine
from shared.store.write_behind import WriteBehind
from shared.wire.api.planner import PlanSearch
from shared.wire.clients.planner import PlannerClient
from tests.services.control_plane import running, sqlite, until

STOCK = """
name: mine
nodes:
  - {name: fast, accelerator: A100-SXM-80, count: 1}
  - {name: slow, accelerator: A10, count: 1}
network: {between: {gbps: 25}}
"""
MORE = """
nodes:
  - {name: fast, accelerator: A100-SXM-80, count: 2}
  - {name: slow, accelerator: A10, count: 3}
network: {between: {gbps: 25}}
"""
QUICK = {
    "inventory": STOCK,
    "model": "Llama-3-8B",
    "workload": "prompt=600,output=40,longest=2000",
    "requests": 100,
    "method": "coupled",
    "compare": False,
}
SLOW = {"workload": "prompt=3000,output=200,longest=6000", "slo": {"ttft_s": 3}}
LONG = {**QUICK, **SLOW, "inventory": MORE, "method": "bruteforce", "seconds": 300}  # a first plan comes soon


@dataclass
class State:
    searches: Searches


@dataclass
class Planner:
    client: PlannerClient
    transport: httpx.ASGITransport
    store: WriteBehind

    async def state(self, plan_id: str, *states: str, timeout_s: float = 60.0) -> PlanSearch:
        """The search once it is in one of these states."""

        async def reached() -> PlanSearch | None:
            found = await self.client.plan(plan_id)
            return found if found.state in states else None

        found: PlanSearch = await until(reached, f"{plan_id} {states}", timeout_s)
        return found

    async def best(self, plan_id: str) -> None:
        """Wait until it has a plan."""

        async def known() -> bool:
            found = await self.client.plan(plan_id)
            assert found.state in ("waiting", "running")
            return found.progress.best_goodput is not None

        await until(known, f"{plan_id} has a plan", 60.0)


def saying(code: str) -> tuple[str, ...]:
    """A command that takes its order and does that."""
    head = "import json, os, sys, time\norder = sys.stdin.readline()\nsay = lambda what: print(what, flush=True)\n"
    return (sys.executable, "-c", head + code)


@asynccontextmanager
async def planner(
    folder: Path, command: Sequence[str] = COMMAND, recalls: bool = True, **settings: Any
) -> AsyncIterator[Planner]:
    wanted = PlannerSettings(database_url=sqlite(folder), **settings)
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = open_engine(wanted.database_url)
        store = WriteBehind(engine, registry, soon_s=0.01)
        async with background() as tasks:
            tasks.start("write-behind", store.run())
            searches = Searches(wanted, store, tasks, command)
            app.state.planner, app.state.store = State(searches), store
            await store.ready.wait()
            if recalls:
                await searches.recall(engine)
            yield
            searches.close()
        await engine.dispose()

    app = service_app("planner", lifespan, registry, token="open")
    app.include_router(router)
    async with running(app) as transport, PlannerClient("http://planner", transport=transport) as client:
        yield Planner(client, transport, app.state.store)
