"""Searches for plans: a queue, a few that run at once, each in a process of its own, and those that have ended."""

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.edge import SearchIn
from services.planner.search_process import COMMAND, Answer, Failed, Progress, SearchProcess
from services.planner.settings import PlannerSettings
from shared.cost.library import Library
from shared.errors import Conflict, InvalidRequest, NotFound, Overloaded, Unavailable
from shared.plan.find import PlanGoals
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.store.reading import PlanRow, read_plan, read_plans
from shared.store.tables import plans
from shared.store.write_behind import Row, WriteBehind
from shared.wire.api.planner import PlanSearch, SearchProgress, SearchResult, SearchState

log = get_log(__name__)
KEPT = 100  # ended searches in memory; older ones are in the database
KEPT_CHARACTERS = 64 << 20  # of their requests
RECALL_S = 3.0  # for the database to answer after a start
RETRY_AFTER_S = 10.0  # of a search that was refused because too many wait
ATTEMPTS = 3  # processes for one search: a search during which the planner ends each time may be the cause
_WRITE_S = 1.0  # between two writes of a running search
_WRITE_CHARACTERS_S = 200_000  # a long request is written less often: at most so many characters a second


OPEN = (SearchState.WAITING, SearchState.RUNNING)


@dataclass(slots=True)
class SearchRecord:
    """A search in memory. request: JSON of `edge.SearchIn`. Times are unix seconds.

    attempts: how many processes were started for it; begun_s: when the last one was. cancelled_by: the caller who
    cancelled it; "" if no caller did. result: see `search_answer.result`.
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
    result: SearchResult | None = None
    error: str = ""
    summary: dict[str, object] = field(init=False)  # the request without what may be long

    def __post_init__(self) -> None:
        request = json.loads(self.request)
        workload = request["workload"]
        short = f"{len(workload)} requests" if isinstance(workload, list) else workload
        self.summary = {key: value for key, value in {**request, "workload": short}.items() if key != "inventory"}

    @classmethod
    def from_row(cls, row: PlanRow) -> "SearchRecord":
        """Raises ValueError, KeyError or TypeError for a row of another version."""
        progress = msgspec.json.decode(row.progress, type=_StoredProgress)
        return cls(
            plan_id=row.plan_id,
            who=row.who,
            submitted_s=row.submitted_s,
            request=row.request,
            state=SearchState(row.state),
            ended_s=row.ended_s,
            progress=Progress(progress.what, progress.best_goodput),
            begun_s=progress.begun_s,
            attempts=progress.attempts,
            cancelled_by=progress.cancelled_by,
            result=None if row.result is None else msgspec.json.decode(row.result, type=SearchResult),
            error=row.error,
        )

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN

    def begin(self) -> None:
        """A process is started for it."""
        self.state, self.progress = SearchState.RUNNING, Progress("begun")
        self.begun_s, self.attempts = time.time(), self.attempts + 1

    def end(self, state: SearchState, error: str = "") -> None:
        self.state, self.error, self.ended_s = state, error, time.time()

    def wait_again(self) -> None:
        """The planner ended before the search did."""
        self.state, self.progress, self.begun_s = SearchState.WAITING, Progress("waiting to begin again"), None

    def brief(self) -> PlanSearch:
        """For lists."""
        result = self.result and msgspec.structs.replace(self.result, cluster_file="")
        return self._answer(self.summary, result)

    def full(self) -> PlanSearch:
        return self._answer(json.loads(self.request), self.result)

    def _answer(self, request: dict[str, object], result: SearchResult | None) -> PlanSearch:
        return PlanSearch(
            state=self.state,
            plan_id=self.plan_id,
            who=self.who,
            submitted_s=self.submitted_s,
            ended_s=self.ended_s,
            error=self.error,
            progress=SearchProgress(self.progress.what, self.progress.best_goodput, self._elapsed_s()),
            request=request,
            result=result,
        )

    def row(self) -> Row:
        """For the table `plans`."""
        progress = _StoredProgress(
            what=self.progress.what,
            best_goodput=self.progress.best_goodput,
            elapsed_s=self._elapsed_s(),
            begun_s=self.begun_s,
            attempts=self.attempts,
            cancelled_by=self.cancelled_by,
        )
        return {
            "state": self.state.value,
            "plan_id": self.plan_id,
            "who": self.who,
            "submitted_s": self.submitted_s,
            "ended_s": self.ended_s,
            "error": self.error,
            "progress": msgspec.json.encode(progress).decode(),
            "request": self.request,
            "result": None if self.result is None else msgspec.json.encode(self.result).decode(),
        }

    def _elapsed_s(self) -> float:
        until_s = time.time() if self.ended_s is None else self.ended_s
        return 0.0 if self.begun_s is None else max(0.0, until_s - self.begun_s)


class _StoredProgress(SearchProgress, frozen=True, kw_only=True):
    """The column `progress`: what the answers show, and what only the planner needs."""

    begun_s: float | None
    attempts: int
    cancelled_by: str


class Searches:
    """`settings.searches` run at once, the one that waits longest first. `command` starts a search's process.

    A search is written to the database soon after it was submitted, about every second while it runs, and at its end;
    no request waits for that. Until the database has answered once (`recall`) earlier searches are unknown.
    """

    def __init__(
        self, settings: PlannerSettings, store: WriteBehind, tasks: Background, command: Sequence[str] = COMMAND
    ) -> None:
        self._settings = settings
        self._store = store
        self._command = command
        self._library = Library.built_in()
        self._held: dict[str, SearchRecord] = {}  # by plan id, the oldest first: all open ones, the newest ended ones
        self._queue: asyncio.Queue[SearchRecord] = asyncio.Queue()
        self._processes: dict[str, SearchProcess] = {}  # by plan id
        self._engine: AsyncEngine | None = None
        self._recalled = asyncio.Event()
        for number in range(settings.searches):
            tasks.start(f"searches {number}", self._work())

    async def recall(self, engine: AsyncEngine) -> None:
        """Read the searches of earlier planner processes; those that had not ended begin again. Raises Unavailable."""
        rows = [*await read_plans(engine, KEPT), *await read_plans(engine, KEPT, OPEN)]
        known = {record.plan_id: record for row in rows if (record := _read(row)) and record.plan_id not in self._held}
        former = sorted(known.values(), key=lambda record: record.submitted_s)
        unfinished = [record for record in former if record.open]
        self._held = {record.plan_id: record for record in (*former, *self._held.values())}
        self._forget()
        self._engine = engine
        self._recalled.set()
        for record in unfinished:
            if record.cancelled_by:
                record.end(SearchState.CANCELLED, "the planner ended before it did")
                self._write(record)
            else:
                record.wait_again()
                self._queue.put_nowait(record)
            log.info("earlier search", plan_id=record.plan_id, state=record.state, attempts=record.attempts)

    async def submit(self, wanted: SearchIn, who: str) -> SearchRecord:
        """Queue a search. Raises InvalidRequest that names the key, Overloaded when too many wait."""
        self._require_room()
        limit_s = self._settings.search_s
        if wanted.seconds is not None and wanted.seconds > limit_s:
            raise InvalidRequest(f"seconds: at most {limit_s:g}, not {wanted.seconds:g}")
        wanted = wanted.model_copy(update={"seconds": wanted.seconds or min(PlanGoals().seconds, limit_s)})
        await asyncio.to_thread(wanted.resolved, self._library, limit_s)  # so that faults are reported at once
        self._require_room()  # other searches came meanwhile
        record = SearchRecord(uuid.uuid4().hex, who, time.time(), wanted.model_dump_json())
        self._held[record.plan_id] = record
        self._forget()
        self._queue.put_nowait(record)
        self._write(record)
        return record

    async def find(self, plan_id: str) -> SearchRecord:
        """A search, however old. Raises NotFound, Unavailable."""
        if (found := self._held.get(plan_id)) is not None:
            return found
        engine = await self._database()
        row = None if plan_id in self._held else await read_plan(engine, plan_id)
        found = self._held.get(plan_id) or (_read(row) if row else None)
        if found is None:
            raise NotFound(f"no search {plan_id!r}")
        return found

    async def newest(self, limit: int) -> list[SearchRecord]:
        """Searches in memory, newest first. Raises Unavailable."""
        await self._database()
        return list(reversed(self._held.values()))[:limit]

    async def cancel(self, plan_id: str, who: str) -> SearchRecord:
        """End a search; a running one ends soon, with its best so far. Raises NotFound, Unavailable, Conflict."""
        record = await self.find(plan_id)
        if not record.open:
            raise Conflict(f"search {plan_id} has ended: it is {record.state.value}")
        record.cancelled_by = record.cancelled_by or who
        if (process := self._processes.get(plan_id)) is not None:
            process.stop()
        else:
            record.end(SearchState.CANCELLED, "cancelled before it was begun")
        self._write(record)
        return record

    def close(self) -> None:
        """To be called before the tasks end: running searches have not failed, and begin again after a restart."""
        for record in self._held.values():
            if record.state is SearchState.RUNNING:
                record.attempts -= 1
                self._write(record)

    async def _work(self) -> None:
        """Run one search after the other."""
        while True:
            record = await self._queue.get()
            if record.state is not SearchState.WAITING:
                continue
            if record.attempts < ATTEMPTS:
                await self._run(record)
            else:
                error = f"it was begun {record.attempts} times, and each time the planner ended before it did"
                record.end(SearchState.FAILED, error)
            self._write(record)

    async def _run(self, record: SearchRecord) -> None:
        loop = asyncio.get_running_loop()
        pause_s = max(_WRITE_S, len(record.request) / _WRITE_CHARACTERS_S)
        written_mono = loop.time()

        def on_progress(progress: Progress) -> None:
            nonlocal written_mono
            record.progress = progress
            if loop.time() - written_mono >= pause_s:
                written_mono = loop.time()
                self._write(record)

        record.begin()
        self._write(record)
        process = SearchProcess(record.request, self._settings.search_s, on_progress)
        self._processes[record.plan_id] = process
        try:
            ended = await process.run(self._command)
        finally:
            del self._processes[record.plan_id]
        match ended:
            case Answer(result=result):
                record.result = result
                record.end(SearchState.CANCELLED if record.cancelled_by else SearchState.DONE)
            case Failed(error=error, stopped=stopped):
                cancelled = record.cancelled_by and stopped
                record.end(SearchState.CANCELLED if cancelled else SearchState.FAILED, error)

    def _require_room(self) -> None:
        limit = self._settings.searches + self._settings.waiting
        if sum(record.open for record in self._held.values()) >= limit:
            raise Overloaded(f"{limit} searches run or wait already", cause="searches", retry_after_s=RETRY_AFTER_S)

    def _forget(self) -> None:
        """Drop the oldest ended searches once there are too many."""
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

    def _write(self, record: SearchRecord) -> None:
        if not record.open:
            log.info("search ended", plan_id=record.plan_id, state=record.state, error=record.error)
        self._store.put(plans, record.row())


def _read(row: PlanRow) -> SearchRecord | None:
    try:
        return SearchRecord.from_row(row)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        log.warning("a search in the database was not understood", plan_id=row.plan_id, error=reason)
        return None
