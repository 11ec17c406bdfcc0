"""The KV port of an instance: reports of imports, leases, and the ledger of exports."""

import asyncio
import os
import signal
import time
from typing import Any, cast

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.port import ConnectorPort, ExpectedImport, ExportLedger
from services.worker.kv.rank_links import (
    KvEvents,
    Operation,
    PullEnded,
    RankStats,
    Release,
    RenewLease,
    StagedChunk,
    ThreadEnded,
    TransferEnded,
)
from shared.domain.kv import Codec, KvHandle, TransferOutcome
from shared.errors import DeadlineExceeded
from shared.runtime.tasks import background
from tests.services.worker.kv.test_staging import Clock


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
        self.renewed: list[str] = []
        self.silent = False

    async def call(self, operation: Operation) -> list[RankStats]:
        match operation:
            case RenewLease(handle):
                if self.silent:
                    raise DeadlineExceeded("a KV endpoint did not answer RenewLease")
                self.renewed.append(handle.transfer_id)
            case Release(transfer_id):
                self.released.append(transfer_id)
        return []


def pull(rank: int, *, ok: bool = True, tokens: int = 10, error: str = "", name: str = "t") -> PullEnded:
    return PullEnded(name, rank, ok, error, tokens, 100, 1.0 + rank, 2.0 + rank, False)


LEASE_S = 30.0


def port(events: Events, ranks: int, clock: Clock | None = None) -> ConnectorPort:
    endpoints = tuple(f"tcp://127.0.0.1:{rank}" for rank in range(ranks))
    template = KvHandle("", "d0", 1, "f", endpoints, 0, "bfloat16", lease_s=LEASE_S)
    ledger = ExportLedger(1000, ranks)
    return ConnectorPort(Control(), cast(KvEvents, events), template, ledger, 10, clock or time.monotonic)


def expected(side: ConnectorPort, name: str = "t") -> ExpectedImport:
    """A decode of that transfer has begun."""
    return side.expect(side.handle(name, 10, Codec.RAW))


async def report_of(events: list[PullEnded], ranks: int, late: int = 0) -> Any:
    queue = Events()
    side = port(queue, ranks)
    async with background() as tasks:
        side.start(tasks)
        decode = expected(side)
        for event in events[: len(events) - late]:
            queue.put(event)
        waiting = asyncio.create_task(side.import_report(decode))
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


async def test_pulls_that_end_after_their_decode_was_cancelled_leave_nothing_and_harm_no_other_report() -> None:
    queue = Events()
    side = port(queue, 1)
    async with background() as tasks:
        side.start(tasks)
        long = expected(side, "long")
        queue.put(pull(0, tokens=5000, name="long"))
        for number in range(1000):
            decode = expected(side, f"cancelled {number}")
            side.end(decode)
            queue.put(pull(0, name=f"cancelled {number}"))
        last = expected(side, "last")
        queue.put(pull(0, name="last"))
        assert (await asyncio.wait_for(side.import_report(last), 5)).outcome is TransferOutcome.PULLED  # all are taken
        assert list(side._imports.values()) == [long, last]
        report = side.known_report(long)  # without a wait
        assert report is not None
        assert (report.outcome, report.tokens) == (TransferOutcome.PULLED, 5000)
        for decode in (long, last):
            side.end(decode)
        assert not side._imports


async def test_a_decode_that_ends_does_not_end_the_report_of_a_later_one_of_the_same_transfer() -> None:
    queue = Events()
    side = port(queue, 1)
    async with background() as tasks:
        side.start(tasks)
        first, second = expected(side), expected(side)
        side.end(first)
        queue.put(pull(0))
        assert (await asyncio.wait_for(side.import_report(second), 5)).outcome is TransferOutcome.PULLED


async def test_the_lease_of_an_import_is_renewed_three_times_a_lease_until_it_ends_or_its_decode_does() -> None:
    clock = Clock()
    side = port(Events(), 1, clock)
    control = cast(Control, side._control)
    waits, pulled, cancelled = expected(side, "waits"), expected(side, "pulled"), expected(side, "cancelled")
    for _ in range(3):
        for _ in range(4):  # turns that come early renew nothing
            await side.renew_leases()
        clock.now += LEASE_S / 3
    assert {name: control.renewed.count(name) for name in ("waits", "pulled", "cancelled")} == {
        "waits": 3,
        "pulled": 3,
        "cancelled": 3,
    }
    pulled.pulls.append(pull(0, name="pulled"))
    side.end(cancelled)
    control.renewed.clear()
    await side.renew_leases()
    assert control.renewed == ["waits"]
    assert list(side._imports.values()) == [waits, pulled]


async def test_a_rank_that_does_not_answer_costs_one_renewal_and_nothing_else() -> None:
    clock = Clock()
    side = port(Events(), 1, clock)
    control = cast(Control, side._control)
    for name in ("a", "b"):
        expected(side, name)
    control.silent = True
    await side.renew_leases()
    control.silent = False
    await side.renew_leases()
    assert control.renewed == ["b"]
    clock.now += LEASE_S / 3
    await side.renew_leases()
    assert control.renewed == ["b", "a", "b"]


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


def reserve(ledger: ExportLedger, transfer_id: str, size_bytes: int, owner: bytes = b"x") -> bool:
    ledger.announce(transfer_id, size_bytes, owner)
    return ledger.reserve(transfer_id)


def test_exports_are_let_in_while_all_of_them_fit() -> None:
    ledger, room = ExportLedger(100, 1), []
    ledger.when_room = lambda: room.append(ledger.reserved_bytes)
    assert reserve(ledger, "a", 60)
    assert not reserve(ledger, "b", 60)
    assert reserve(ledger, "c", 40, b"y")
    assert not ledger.reserve("b")
    ledger.dropped("a", 0)
    assert room == [40]
    assert ledger.reserve("b")
    assert (ledger.owned_by(b"x"), ledger.owned_by(b"y"), ledger.owned_by(b"z")) == (["b"], ["c"], [])


def test_who_has_room_keeps_it_however_often_it_is_asked_for() -> None:
    ledger = ExportLedger(100, 1)
    assert reserve(ledger, "a", 60)
    assert ledger.reserve("a")
    assert ledger.reserved_bytes == 60


def test_who_only_waits_holds_nothing_and_its_end_is_no_news() -> None:
    ledger, room = ExportLedger(100, 1), []
    ledger.when_room = lambda: room.append(ledger.reserved_bytes)
    ledger.announce("a", 100, b"x")
    assert reserve(ledger, "b", 100)
    ledger.end("a")
    assert (room, ledger.reserved_bytes) == ([], 100)


def test_one_that_has_ended_gets_nothing_though_its_engine_still_asks() -> None:
    ledger = ExportLedger(100, 1)
    assert reserve(ledger, "full", 100)
    ledger.announce("a", 60, b"x")
    assert not ledger.reserve("a")
    ledger.end("a")
    assert ledger.reserve("a")  # it holds up nobody
    assert (ledger.reserved_bytes, len(ledger)) == (100, 1)


def test_an_export_ends_when_its_last_rank_has_dropped_it() -> None:
    ledger = ExportLedger(100, 2)
    reserve(ledger, "a", 60)
    ledger.dropped("a", 1)
    ledger.dropped("a", 1)
    assert ledger.reserved_bytes == 60
    ledger.dropped("a", 0)
    ledger.dropped("a", 0)
    assert (ledger.reserved_bytes, len(ledger)) == (0, 0)


def test_what_can_never_fit_waits_for_nothing_and_takes_nothing() -> None:
    ledger = ExportLedger(100, 1)
    reserve(ledger, "a", 90)
    assert reserve(ledger, "huge", 101, b"y")
    assert ledger.reserved_bytes == 90
    assert ledger.owned_by(b"y") == ["huge"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"), st.integers(0, 60), st.sampled_from(["announce", "reserve", "end", "drop"])
        )
    )
)
def test_it_never_promises_more_than_there_is(steps: list[tuple[str, int, str]]) -> None:
    ledger = ExportLedger(100, 1)
    for name, size, what in steps:
        if what == "announce":
            ledger.announce(name, size, b"x")
        elif what == "reserve":
            ledger.reserve(name)
        elif what == "end":
            ledger.end(name)
        else:
            ledger.dropped(name, 0)
        assert 0 <= ledger.reserved_bytes <= 100
    for name in "abcdef":
        ledger.end(name)
    assert (ledger.reserved_bytes, len(ledger)) == (0, 0)
