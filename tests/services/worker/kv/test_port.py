"""How the events of all ranks become one report."""

import asyncio
import os
import signal
from typing import Any, cast

import pytest
import structlog

from services.worker.kv.control import KvControl
from services.worker.kv.events import KvEvents, PullEnded, StagedChunk, ThreadEnded, TransferEnded
from services.worker.kv.ledger import ExportLedger
from services.worker.kv.port import ConnectorPort
from shared.domain.kv import KvHandle, TransferOutcome
from shared.runtime.tasks import background


class Events:
    """A queue in the place of the socket."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, event: Any) -> None:
        self._queue.put_nowait(event)

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> Any:
        return await self._queue.get()


class Control:
    def __init__(self) -> None:
        self.released: list[str] = []

    async def stats(self) -> tuple[Any, ...]:
        return ()

    async def release(self, transfer_id: str) -> None:
        self.released.append(transfer_id)


def pull(rank: int, *, ok: bool = True, tokens: int = 10, error: str = "") -> PullEnded:
    return PullEnded("t", rank, ok, error, tokens, 100, 1.0 + rank, 2.0 + rank, False)


def port(events: Events, ranks: int) -> ConnectorPort:
    endpoints = tuple(f"tcp://127.0.0.1:{rank}" for rank in range(ranks))
    template = KvHandle("", "d0", 1, "f", endpoints, 0, "bfloat16")
    return ConnectorPort(cast(KvControl, Control()), cast(KvEvents, events), template, ExportLedger(1000, ranks), 10)


async def report_of(events: list[PullEnded], ranks: int, late: int = 0) -> Any:
    queue = Events()
    side = port(queue, ranks)
    async with background() as tasks:
        side.start(tasks)
        for event in events[: len(events) - late]:
            queue.put(event)
        waiting = asyncio.create_task(side.import_report("t"))
        await asyncio.sleep(0)
        for event in events[len(events) - late :]:
            queue.put(event)
        return await asyncio.wait_for(waiting, 5)


async def test_all_ranks_make_one_report() -> None:
    report = await report_of([pull(0), pull(1)], 2)
    assert report.outcome is TransferOutcome.PULLED
    assert (report.tokens, report.wire_bytes, report.started_s, report.ended_s) == (10, 200, 1.0, 3.0)


async def test_events_that_come_after_the_last_token_still_count() -> None:
    assert (await report_of([pull(0), pull(1)], 2, late=2)).outcome is TransferOutcome.PULLED


async def test_one_failed_rank_means_recomputed() -> None:
    report = await report_of([pull(0), pull(1, ok=False, error="checksum")], 2)
    assert report.outcome is TransferOutcome.RECOMPUTED
    assert report.error == "checksum"


async def test_nothing_pulled_means_cached() -> None:
    assert (await report_of([pull(0, tokens=0)], 1)).outcome is TransferOutcome.CACHED


async def test_a_callback_that_fails_ends_neither_the_loop_nor_the_process(caplog: pytest.LogCaptureFixture) -> None:
    queue = Events()
    side = port(queue, 1)
    async with background() as tasks:
        side.start(tasks)
        called = asyncio.Event()
        side.when_staged("t", lambda: {}["a bug"])
        side.when_staged("u", called.set)
        for name in "tu":
            queue.put(StagedChunk(name, 0, 512, False, 512))
        await asyncio.wait_for(called.wait(), 5)  # SIGTERM would have ended this test, too


async def test_room_and_owners_follow_the_events() -> None:
    queue, room = Events(), asyncio.Event()
    side = port(queue, 1)
    side.when_room(room.set)
    async with background() as tasks:
        side.start(tasks)
        side.announce("t", 60, b"gateway")  # of 10 bytes a token, in a pool of 1000
        side.announce("u", 60, b"gateway")
        assert side.reserve("t")
        assert not side.reserve("u")
        queue.put(StagedChunk("t", 0, 60, True, 600))
        queue.put(TransferEnded("t", 0, 0))
        await asyncio.wait_for(room.wait(), 5)
        assert side.staged_bytes == 0
        assert side.reserve("u")
        await side.release_of(b"gateway")
        side.announce("v", 100, b"gateway")
        assert side.reserve("v")
        assert cast(Control, side._control).released == ["u"]


async def test_a_kv_thread_that_dies_takes_the_process_down_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, told = [], asyncio.Event()
    monkeypatch.setattr(os, "kill", lambda pid, number: (signals.append((pid, number)), told.set()))
    queue = Events()
    with structlog.testing.capture_logs() as logs:
        async with background() as tasks:
            port(queue, 1).start(tasks)
            queue.put(ThreadEnded(0, "puller", "KeyError: 'a bug'"))
            await asyncio.wait_for(told.wait(), 5)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert "KV puller of rank 0" in str(logs[0]["exc_info"])


async def test_the_first_chunk_calls_back_once() -> None:
    queue, seen = Events(), []
    side = port(queue, 1)
    async with background() as tasks:
        side.start(tasks)
        called = asyncio.Event()
        side.when_staged("t", lambda: (seen.append(1), called.set()))
        for end in (512, 1024):
            queue.put(StagedChunk("t", 0, end, end == 1024, end))
        await asyncio.wait_for(called.wait(), 5)
        await asyncio.sleep(0)
        assert seen == [1]
