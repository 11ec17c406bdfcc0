"""The KV port of an instance: events of ranks, reports of imports, leases, and the ledger of exports."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.port import ConnectorPort, ExpectedImport, ExportLedger
from services.worker.kv.rank_events import EventSender, KvEvents
from services.worker.kv.rank_messages import (
    KvEvent,
    Operation,
    PullEnded,
    RankStats,
    Release,
    RenewLease,
    StagedChunk,
    StagingFailed,
    ThreadEnded,
    TransferEnded,
)
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.errors import DeadlineExceeded
from shared.runtime.tasks import background
from tests.services.worker.kv.rig import TOKEN_BYTES, Clock, Rig, model_kv, stage, wait_until

LEASE_S = 30.0


class Events:
    """A queue in the place of the socket."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.put = self._queue.put_nowait

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


class Port(ConnectorPort):
    """Of an instance with so many ranks, in whose pools 1000 bytes fit, 10 a token."""

    def __init__(self, ranks: int = 1) -> None:
        self.queue, self.control, self.clock = Events(), Control(), Clock()
        endpoints = tuple(f"tcp://127.0.0.1:{rank}" for rank in range(ranks))
        template = KvHandle("", "d0", 1, "f", endpoints, 0, "bfloat16", lease_s=LEASE_S)
        ledger = ExportLedger(1000, ranks)
        super().__init__(
            self.control, cast(KvEvents, self.queue), template, ledger, lambda tokens: 10 * tokens, self.clock
        )

    def decode(self, name: str = "t") -> ExpectedImport:
        """A decode of that transfer has begun."""
        return self.expect(self.handle(name, 10, Codec.RAW))

    async def report(self, expected: ExpectedImport) -> TransferReport:
        return await asyncio.wait_for(self.import_report(expected), 5)


@asynccontextmanager
async def running(ranks: int = 1) -> AsyncIterator[Port]:
    port = Port(ranks)
    async with background() as tasks:
        port.start(tasks)
        yield port


def pull(rank: int = 0, *, ok: bool = True, tokens: int = 10, error: str = "", name: str = "t") -> PullEnded:
    return PullEnded(
        transfer_id=name,
        rank=rank,
        ok=ok,
        error=error,
        tokens=tokens,
        wire_bytes=100,
        started_s=1.0 + rank,
        ended_s=2.0 + rank,
        prefetched=False,
    )


@pytest.mark.parametrize(
    ("pulls", "outcome", "error"),
    [
        ([pull(0), pull(1)], TransferOutcome.PULLED, ""),
        ([pull(0), pull(1, ok=False, error="checksum")], TransferOutcome.RECOMPUTED, "checksum"),
        ([pull(0, tokens=0), pull(1, tokens=0)], TransferOutcome.CACHED, ""),
    ],
)
@pytest.mark.parametrize("late", [0, 2])
async def test_the_pulls_of_all_ranks_make_one_report(
    pulls: list[PullEnded], outcome: TransferOutcome, error: str, late: int
) -> None:
    """Events that come after the last token still count."""
    async with running(2) as port:
        decode = port.decode()
        for event in pulls[late:]:
            port.queue.put(event)
        waiting = asyncio.create_task(port.report(decode))
        await asyncio.sleep(0)
        for event in pulls[:late]:
            port.queue.put(event)
        report = await waiting
    assert (report.outcome, report.error) == (outcome, error)
    if outcome is TransferOutcome.PULLED:
        assert (report.tokens, report.wire_bytes, report.started_s, report.ended_s) == (10, 200, 1.0, 3.0)


async def test_pulls_that_end_after_their_decode_leave_nothing_and_harm_no_other_report() -> None:
    async with running() as port:
        long, first = port.decode("long"), port.decode("again")
        again = port.decode("again")
        port.end(first)
        port.queue.put(pull(name="long", tokens=5000))
        for number in range(1000):
            port.end(port.decode(f"cancelled {number}"))
            port.queue.put(pull(name=f"cancelled {number}"))
        port.queue.put(pull(name="again"))
        assert (await port.report(again)).outcome is TransferOutcome.PULLED
        assert list(port.imports.values()) == [long, again]
        report = port.known_report(long)  # without a wait
        assert report is not None
        assert (report.outcome, report.tokens) == (TransferOutcome.PULLED, 5000)
        for decode in (long, again):
            port.end(decode)
        assert not port.imports


async def test_a_lease_is_renewed_three_times_until_its_import_ends_or_its_decode_does() -> None:
    port = Port()
    _, pulled, cancelled = port.decode("waits"), port.decode("pulled"), port.decode("cancelled")
    for _ in range(3):
        for _ in range(4):  # turns that come early renew nothing
            await port.renew_leases()
        port.clock.now += LEASE_S / 3
    assert sorted(port.control.renewed) == ["cancelled"] * 3 + ["pulled"] * 3 + ["waits"] * 3
    pulled.pulls.append(pull(name="pulled"))
    port.end(cancelled)
    port.control.renewed.clear()
    await port.renew_leases()
    assert port.control.renewed == ["waits"]


async def test_a_rank_that_does_not_answer_costs_one_renewal_and_nothing_else() -> None:
    port = Port()
    for name in ("a", "b"):
        port.decode(name)
    port.control.silent = True
    await port.renew_leases()
    port.control.silent = False
    await port.renew_leases()
    assert port.control.renewed == ["b"]
    port.clock.now += LEASE_S / 3
    await port.renew_leases()
    assert port.control.renewed == ["b", "a", "b"]


async def test_the_first_chunk_calls_back_once_and_a_callback_that_fails_ends_nothing() -> None:
    seen, called = list[str](), asyncio.Event()
    async with running() as port:
        port.when_staged("t", lambda: {}["a bug"])
        port.when_staged("u", lambda: seen.append("u"))
        port.when_staged("v", called.set)
        for name, end in (("t", 512), ("u", 512), ("u", 1024), ("v", 512)):
            port.queue.put(StagedChunk(name, 0, end, False, end))
        await asyncio.wait_for(called.wait(), 5)  # SIGTERM would have ended this test, too
    assert seen == ["u"]


async def test_room_and_owners_follow_the_events() -> None:
    room = asyncio.Event()
    async with running() as port:
        port.when_room(room.set)
        port.announce("t", 60, b"gateway")
        port.announce("u", 60, b"gateway")
        assert port.reserve("t")
        assert not port.reserve("u")
        port.queue.put(StagedChunk("t", 0, 60, True, 600))
        port.queue.put(TransferEnded("t", 0, 0))
        await asyncio.wait_for(room.wait(), 5)
        assert port.staged_bytes == 0
        assert port.reserve("u")
        await port.release_of(b"gateway")
        port.announce("v", 100, b"gateway")
        assert port.reserve("v")
        assert port.control.released == ["u"]


async def test_a_kv_thread_that_dies_ends_the_process_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    signals, signalled = [], asyncio.Event()
    monkeypatch.setattr(os, "kill", lambda pid, number: (signals.append((pid, number)), signalled.set()))
    with structlog.testing.capture_logs() as logs:
        async with running() as port:
            port.queue.put(ThreadEnded(0, "puller", "KeyError: 'a bug'"))
            await asyncio.wait_for(signalled.wait(), 5)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert "KV puller of rank 0" in str(logs[0]["exc_info"])


def test_an_export_ends_when_its_last_rank_has_dropped_it() -> None:
    ledger, room = ExportLedger(100, ranks=2), list[int]()
    ledger.when_room = lambda: room.append(ledger.reserved_bytes)
    for name, size, fits in (("a", 60, True), ("b", 60, False), ("larger than the pool", 101, True)):
        ledger.announce(name, size, b"x")
        assert ledger.reserve(name) == ledger.reserve(name) == fits
    for rank, reserved in ((1, 60), (1, 60), (0, 0), (0, 0)):
        ledger.dropped("a", rank)
        assert ledger.reserved_bytes == reserved
    assert room == [0]
    assert ledger.reserve("b")
    assert ledger.owned_by(b"x") == ["b", "larger than the pool"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"), st.integers(0, 60), st.sampled_from(["announce", "reserve", "end", "drop"])
        )
    )
)
def test_the_ledger_never_promises_more_than_there_is(steps: list[tuple[str, int, str]]) -> None:
    ledger = ExportLedger(100, ranks=1)
    for name, size, step in steps:
        if step == "announce":
            ledger.announce(name, size, b"x")
        elif step == "reserve":
            ledger.reserve(name)
        elif step == "end":
            ledger.end(name)
        else:
            ledger.dropped(name, 0)
        assert 0 <= ledger.reserved_bytes <= 100
    for name in "abcdef":
        ledger.end(name)
    assert (ledger.reserved_bytes, len(ledger)) == (0, 0)


async def next_event(events: KvEvents, *, ends: bool = False) -> KvEvent:
    """The next event that is, or is not, the end of an export."""
    async with asyncio.timeout(10):
        while isinstance(event := await events.get(), TransferEnded) != ends:
            pass
    return event


async def test_a_transfer_is_reported_from_its_chunks_to_its_end(rig: Rig) -> None:
    kv, size = model_kv(64), 64 * TOKEN_BYTES
    async with rig.events() as events:
        exporter, importer = rig.endpoint(), rig.endpoint()
        stage(exporter, kv, each=32)
        assert await next_event(events) == StagedChunk("t", 0, 32, False, size // 2)
        assert await next_event(events) == StagedChunk("t", 0, 64, True, size)
        rig.load(importer, rig.handle([exporter], 64))
        ended = await next_event(events)
        assert isinstance(ended, PullEnded)
        assert (ended.transfer_id, ended.ok, ended.tokens, ended.wire_bytes) == ("t", True, 64, size)
        assert 0 < ended.started_s <= ended.ended_s
        stage(exporter, kv, "cached")
        importer.skip(rig.handle([exporter], 64, "cached"), "")
        for _ in range(2):
            if isinstance(event := await next_event(events), PullEnded):
                assert (event.transfer_id, event.ok, event.tokens, event.wire_bytes) == ("cached", True, 0, 0)
        await asyncio.to_thread(wait_until, lambda: exporter.staged_bytes == 0)
        stage(exporter, kv, "released")
        exporter.release("released")
        while await next_event(events, ends=True) != TransferEnded("released", 0, 0):
            pass


async def test_a_refusal_is_reported_once(rig: Rig) -> None:
    async with rig.events() as events:
        exporter, kv = rig.endpoint(staging_bytes=100), model_kv(64)
        stage(exporter, kv, each=32)
        stage(exporter, kv[:, :, :0], "end")
        failed, after = await next_event(events), await next_event(events)
    assert isinstance(failed, StagingFailed)
    assert failed.reason.startswith("refused")
    assert isinstance(after, StagedChunk)
    assert after.transfer_id == "end"


def test_events_that_no_process_reads_do_not_block(tmp_path: Path) -> None:
    sender, began = EventSender(f"ipc://{tmp_path}/nowhere"), time.monotonic()
    for _ in range(1000):
        sender.send(StagingFailed("t", 0, "refused"))
    sender.close()
    assert time.monotonic() - began < 5
