"""The searches that the planner holds in memory: all that have not ended, and the newest of those that have."""

import asyncio

from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.search_record import OPEN, SearchRecord, SearchState, recalled
from shared.errors import NotFound, Unavailable
from shared.runtime.logs import get_log
from shared.store.reading import read_plan, read_plans

log = get_log(__name__)
KEPT = 100  # searches that have ended; older ones are in the database
KEPT_CHARACTERS = 64 << 20  # of their requests
RECALL_S = 3.0  # for the database to answer after a start


class SearchMemory:
    """Searches by id. Until the database has answered once (`recall`) nothing is known of former lives."""

    def __init__(self) -> None:
        self._held: dict[str, SearchRecord] = {}  # the oldest first
        self._engine: AsyncEngine | None = None
        self._recalled = asyncio.Event()

    @property
    def open(self) -> int:
        """How many have not ended."""
        return sum(record.open for record in self._held.values())

    @property
    def running(self) -> list[SearchRecord]:
        """Those that run."""
        return [record for record in self._held.values() if record.state is SearchState.RUNNING]

    async def recall(self, engine: AsyncEngine) -> list[SearchRecord]:
        """Learn those of former lives; gives back which of them had not ended, the oldest first. Raises Unavailable."""
        rows = [*await read_plans(engine, KEPT), *await read_plans(engine, KEPT, OPEN)]
        known = {record.plan_id: record for row in rows if (record := _read(row)) and record.plan_id not in self._held}
        former = sorted(known.values(), key=lambda record: record.submitted_s)
        self._held = {record.plan_id: record for record in (*former, *self._held.values())}
        self._forget()
        self._engine = engine
        self._recalled.set()
        return [record for record in former if record.open]

    def add(self, record: SearchRecord) -> None:
        """The newest of all."""
        self._held[record.plan_id] = record
        self._forget()

    async def find(self, plan_id: str) -> SearchRecord:
        """One of them, however old. Raises NotFound, Unavailable."""
        found = self._held.get(plan_id)
        if found is not None:
            return found
        engine = await self._database()
        row = None if plan_id in self._held else await read_plan(engine, plan_id)
        found = self._held.get(plan_id) or (_read(row) if row else None)
        if found is None:
            raise NotFound(f"no search {plan_id!r}")
        return found

    async def newest(self, limit: int) -> list[SearchRecord]:
        """The newest that are held, newest first. Raises Unavailable."""
        await self._database()
        return list(reversed(self._held.values()))[:limit]

    def _forget(self) -> None:
        """Those that are the oldest of the ended ones, once there are too many."""
        ended = [record for record in self._held.values() if not record.open]
        characters = sum(len(record.request) for record in ended)
        for at, oldest in enumerate(ended):
            if len(ended) - at <= KEPT and characters <= KEPT_CHARACTERS:
                break
            characters -= len(oldest.request)
            del self._held[oldest.plan_id]

    async def _database(self) -> AsyncEngine:
        try:
            async with asyncio.timeout(RECALL_S):
                await self._recalled.wait()
        except TimeoutError as error:
            raise Unavailable("the database has not answered since the planner's start: try again") from error
        assert self._engine is not None
        return self._engine


def _read(row: dict[str, object]) -> SearchRecord | None:
    try:
        return recalled(row)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("search not understood", plan_id=row["plan_id"], error=f"{type(error).__name__}: {error}"[:300])
        return None
