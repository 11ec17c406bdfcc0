"""The book of searches: those that wait, those that run, a few at once, and those that have ended."""

import asyncio
import time
import uuid
from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.edge import SearchIn
from services.planner.search_memory import SearchMemory
from services.planner.search_process import COMMAND
from services.planner.search_record import SearchRecord, SearchState
from services.planner.search_runner import SearchRunner
from services.planner.settings import PlannerSettings
from shared.cost.library import Library
from shared.errors import Conflict, InvalidRequest, Overloaded
from shared.plan.asked import Wanted
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.store.tables import plans
from shared.store.write_behind import WriteBehind

log = get_log(__name__)
_AGAIN_S = 10.0  # after which who was refused may ask again


class Searches:
    """`settings.searches` run at once, each in a process of its own. `command` starts one; see `search_messages`.

    Nobody waits for the database: a search is written in a fraction of a second after it was taken, about every second
    that it tells of progress, and when it has ended. After a restart (`recall`) those that had not ended begin again.
    """

    def __init__(
        self, settings: PlannerSettings, store: WriteBehind, tasks: Background, command: Sequence[str] = COMMAND
    ) -> None:
        self._settings = settings
        self._store = store
        self._library = Library.built_in()
        self._memory = SearchMemory()
        self._runner = SearchRunner(command, settings.search_s, self._keep)
        for number in range(settings.searches):
            tasks.start(f"searches {number}", self._runner.work())

    async def recall(self, engine: AsyncEngine) -> None:
        """Take over from the planner's former life. Raises Unavailable."""
        for record in await self._memory.recall(engine):
            if record.cancelled_by:
                record.end(SearchState.CANCELLED, "the planner ended before it did")
                self._keep(record)
            else:
                record.wait_again()
                self._runner.put(record)
            log.info("search of a former life", plan_id=record.plan_id, state=record.state, attempts=record.attempts)

    async def submit(self, wanted: SearchIn, who: str) -> SearchRecord:
        """Take a search. Raises InvalidRequest that names the key, Overloaded when too many wait."""
        self._require_room()
        wanted = self._bounded(wanted)
        await asyncio.to_thread(wanted.asked, self._library, self._settings.search_s)  # faults are told at once
        self._require_room()  # others came meanwhile
        record = SearchRecord(uuid.uuid4().hex, who, time.time(), wanted.model_dump_json())
        self._memory.add(record)
        self._runner.put(record)
        self._keep(record)
        return record

    async def find(self, plan_id: str) -> SearchRecord:
        """One of them. Raises NotFound, Unavailable."""
        return await self._memory.find(plan_id)

    async def newest(self, limit: int) -> list[SearchRecord]:
        """The newest first. Raises Unavailable."""
        return await self._memory.newest(limit)

    async def cancel(self, plan_id: str, who: str) -> SearchRecord:
        """End it; one that runs soon has its best so far as its result. Raises NotFound, Unavailable, Conflict."""
        record = await self._memory.find(plan_id)
        if not record.open:
            raise Conflict(f"search {plan_id} has ended: it is {record.state.value}")
        record.cancelled_by = record.cancelled_by or who
        if not self._runner.stop(plan_id):
            record.end(SearchState.CANCELLED, "cancelled before it was begun")
        self._keep(record)
        return record

    def close(self) -> None:
        """Before the tasks are ended: what runs has not failed, and begins again in the planner's next life."""
        for record in self._memory.running:
            record.attempts -= 1
            self._keep(record)

    def _bounded(self, wanted: SearchIn) -> SearchIn:
        """With the seconds that it has."""
        most = self._settings.search_s
        if wanted.seconds is not None and wanted.seconds > most:
            raise InvalidRequest(f"seconds: at most {most:g}, not {wanted.seconds:g}")
        return wanted.model_copy(update={"seconds": wanted.seconds or min(Wanted().seconds, most)})

    def _require_room(self) -> None:
        most = self._settings.searches + self._settings.waiting
        if self._memory.open >= most:
            raise Overloaded(f"{most} searches run or wait already", cause="searches", retry_after_s=_AGAIN_S)

    def _keep(self, record: SearchRecord) -> None:
        if not record.open:
            log.info("search ended", plan_id=record.plan_id, state=record.state, error=record.error)
        self._store.put(plans, record.row())
