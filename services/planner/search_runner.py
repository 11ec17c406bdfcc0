"""Runs searches, the one that waits longest first, each in a process of its own."""

import asyncio
from collections.abc import Callable, Sequence

from services.planner.search_messages import Answer, Failed, Progress
from services.planner.search_process import SearchProcess
from services.planner.search_record import SearchRecord, SearchState

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
