"""The book of searches: those that wait, those that run, a few at once, and those that have ended."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.edge import SearchIn
from services.planner.search_process import COMMAND, Answer, Failed, Progress, SearchProcess
from services.planner.settings import PlannerSettings
from shared.cost.library import Library
from shared.errors import Conflict, InvalidRequest, NotFound, Overloaded, Unavailable
from shared.plan.answer import Wanted
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.store.reading import read_plan, read_plans
from shared.store.tables import plans
from shared.store.write_behind import WriteBehind

# MERGED search_record.py
# One search as it is remembered: by the book, in the database, and for who asks.


class SearchState(StrEnum):
    """Where a search is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


OPEN = (SearchState.WAITING, SearchState.RUNNING)


@dataclass(slots=True)
class SearchRecord:
    """request: JSON of `edge.SearchIn`. Times are unix seconds.

    attempts: how often a process was started for it; begun_s: when it was last. cancelled_by: who wants it to end; ""
    if nobody. result: see `search_answer.result`.
    """

    plan_id: str
    who: str
    submitted_s: float
    request: str
    state: SearchState = SearchState.WAITING
    ended_s: float | None = None
    progress: Progress = field(default_factory=lambda: Progress("waiting"))
    begun_s: float | None = None
    attempts: int = 0
    cancelled_by: str = ""
    result: dict[str, Any] | None = None
    error: str = ""
    summary: dict[str, Any] = field(init=False)  # of the request

    def __post_init__(self) -> None:
        self.summary = _summary(json.loads(self.request))

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN

    def begin(self) -> None:
        """A process is started for it."""
        self.state, self.progress = SearchState.RUNNING, Progress("begun")
        self.begun_s, self.attempts = time.time(), self.attempts + 1

    def end(self, state: SearchState, error: str = "") -> None:
        """That is how it ended."""
        self.state, self.error, self.ended_s = state, error, time.time()

    def wait_again(self) -> None:
        """The planner ended before it did."""
        self.state, self.progress, self.begun_s = SearchState.WAITING, Progress("waiting to begin again"), None

    def brief(self) -> dict[str, Any]:
        """As lists tell it."""
        result = self.result and {key: value for key, value in self.result.items() if key != "cluster_file"}
        return {**self._told(), "request": self.summary, "result": result}

    def full(self) -> dict[str, Any]:
        """All of it."""
        return {**self._told(), "request": json.loads(self.request), "result": self.result}

    def _told(self) -> dict[str, Any]:
        return {
            "plan_id": self.plan_id,
            "state": self.state.value,
            "who": self.who,
            "submitted_s": self.submitted_s,
            "ended_s": self.ended_s,
            "progress": self._progress(),
            "error": self.error,
        }

    def _progress(self) -> dict[str, Any]:
        until_s = time.time() if self.ended_s is None else self.ended_s
        return {
            "what": self.progress.what,
            "best_goodput": self.progress.best_goodput,
            "elapsed_s": 0.0 if self.begun_s is None else max(0.0, until_s - self.begun_s),
        }

    def row(self) -> dict[str, Any]:
        """For the table `plans`; with the progress what nobody but us asks for."""
        kept = {"begun_s": self.begun_s, "attempts": self.attempts, "cancelled_by": self.cancelled_by}
        return {
            "plan_id": self.plan_id,
            "state": self.state.value,
            "who": self.who,
            "submitted_s": self.submitted_s,
            "ended_s": self.ended_s,
            "request": self.request,
            "progress": json.dumps({**self._progress(), **kept}),
            "result": None if self.result is None else json.dumps(self.result),
            "error": self.error,
        }


def _summary(request: dict[str, Any]) -> dict[str, Any]:
    """A request without what may be long."""
    workload = request["workload"]
    given = isinstance(workload, list)
    short = {**request, "workload": f"{len(workload)} requests" if given else workload}
    return {key: value for key, value in short.items() if key != "inventory"}


def recalled(row: dict[str, Any]) -> SearchRecord:
    """A row again. Raises ValueError, KeyError or TypeError for what we never wrote."""
    kept = json.loads(row["progress"])
    return SearchRecord(
        row["plan_id"],
        row["who"],
        row["submitted_s"],
        row["request"],
        SearchState(row["state"]),
        row["ended_s"],
        Progress(kept["what"], kept["best_goodput"]),
        kept["begun_s"],
        kept["attempts"],
        kept["cancelled_by"],
        None if row["result"] is None else json.loads(row["result"]),
        row["error"],
    )


# MERGED search_memory.py
# The searches that the planner holds in memory: all that have not ended, and the newest of those that have.

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


# MERGED search_runner.py
# Runs searches, the one that waits longest first, each in a process of its own.


ATTEMPTS = 3  # processes for one search: what ends with the planner each time may be what ends it
_KEEP_S = 1.0  # between two times that a search which runs is kept
_KEEP_CHARACTERS_S = 200_000  # and no more than so many a second: its request is kept with it each time


class SearchRunner:
    """seconds: the longest that a search may take. keep: told of a search each time that there is news to be kept.

    Each task that does `work` runs one search at a time.
    """

    def __init__(self, command: Sequence[str], seconds: float, keep: Callable[[SearchRecord], None]) -> None:
        self._command = command
        self._seconds = seconds
        self._keep = keep
        self._queue: asyncio.Queue[SearchRecord] = asyncio.Queue()
        self._processes: dict[str, SearchProcess] = {}

    def put(self, record: SearchRecord) -> None:
        """It is to be run, unless it has ended until it is its turn."""
        self._queue.put_nowait(record)

    def stop(self, plan_id: str) -> bool:
        """Have it end soon, with the best so far; whether it runs at all."""
        process = self._processes.get(plan_id)
        if process is not None:
            process.stop()
        return process is not None

    async def work(self) -> None:
        """Run one after the other, for ever."""
        while True:
            record = await self._queue.get()
            if record.state is not SearchState.WAITING:
                continue
            if record.attempts < ATTEMPTS:
                _take(record, await self._run(record))
            else:
                told = f"it was begun {record.attempts} times, and each time the planner ended before it did"
                record.end(SearchState.FAILED, told)
            self._keep(record)

    async def _run(self, record: SearchRecord) -> Answer | Failed:
        loop = asyncio.get_running_loop()
        pause_s = max(_KEEP_S, len(record.request) / _KEEP_CHARACTERS_S)
        kept = loop.time()

        def tell(progress: Progress) -> None:
            nonlocal kept
            record.progress = progress
            if loop.time() - kept >= pause_s:
                kept = loop.time()
                self._keep(record)

        record.begin()
        self._keep(record)
        process = self._processes[record.plan_id] = SearchProcess(record.request, self._seconds, tell)
        try:
            return await process.run(self._command)
        finally:
            del self._processes[record.plan_id]


def _take(record: SearchRecord, ended: Answer | Failed) -> None:
    if isinstance(ended, Answer):
        record.result = ended.result
        record.end(SearchState.CANCELLED if record.cancelled_by else SearchState.DONE)
    else:
        cancelled = record.cancelled_by and ended.stopped
        record.end(SearchState.CANCELLED if cancelled else SearchState.FAILED, ended.error)


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
