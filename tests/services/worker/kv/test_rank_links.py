"""The events of ranks, and what the worker makes of them."""

import asyncio
from pathlib import Path

import zmq

from services.worker.kv.rank_links import (
    EventSender,
    KvEvent,
    KvEvents,
    PullEnded,
    SocketControl,
    StagedChunk,
    StagingFailed,
    Stats,
    TransferEnded,
)
from tests.services.worker.kv.rig import KEY, Rig, control_of, model_kv, stage


async def next_event(events: KvEvents) -> KvEvent:
    """The next one that does not tell of the end of an export."""
    async with asyncio.timeout(10):
        while isinstance(event := await events.get(), TransferEnded):
            pass
    return event


async def test_a_transfer_tells_its_story(rig: Rig) -> None:
    kv = model_kv(64)
    async with rig.events() as events:
        exporter, importer = rig.endpoint(), rig.endpoint()
        stage(exporter, kv, end=32)
        stage(exporter, kv, start=32)
        size = kv.numel() * 4
        assert await next_event(events) == StagedChunk("t", 0, 32, False, size // 2)
        assert await next_event(events) == StagedChunk("t", 0, 64, True, size)
        rig.load(importer, rig.handle([exporter], 64))
        ended = await next_event(events)
    assert isinstance(ended, PullEnded)
    assert (ended.transfer_id, ended.ok, ended.tokens, ended.wire_bytes) == ("t", True, 64, size)
    assert 0 < ended.started_s <= ended.ended_s


async def test_the_end_of_an_export_is_told_with_what_is_left(rig: Rig) -> None:
    async with rig.events() as events:
        exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
        for name in "ab":
            stage(exporter, kv, name)
            await next_event(events)
        rig.load(importer, rig.handle([exporter], 64, "a"))
        exporter.release("b")
        told = {}
        async with asyncio.timeout(10):
            while len(told) < 2:
                if isinstance(event := await events.get(), TransferEnded):
                    told[event.transfer_id] = event.staged_bytes
    assert sorted(told) == ["a", "b"]
    assert min(told.values()) == 0


async def test_a_refusal_is_told_once(rig: Rig) -> None:
    async with rig.events() as events:
        exporter = rig.endpoint(staging_bytes=100)
        kv = model_kv(64)
        stage(exporter, kv, end=32)
        stage(exporter, kv, start=32)
        stage(exporter, kv[:, :, :0], "end", end=0)
        failed = await next_event(events)
        assert isinstance(failed, StagingFailed)
        assert failed.reason.startswith("refused")
        after = await next_event(events)
        assert isinstance(after, StagedChunk)
        assert after.transfer_id == "end"


async def test_what_needs_no_pull_is_told_and_released(rig: Rig) -> None:
    async with rig.events() as events:
        exporter, importer = rig.endpoint(), rig.endpoint()
        stage(exporter, model_kv(64))
        await next_event(events)
        importer.skip(rig.handle([exporter], 64), "")
        ended = await next_event(events)
        assert isinstance(ended, PullEnded)
        assert (ended.ok, ended.tokens, ended.wire_bytes) == (True, 0, 0)
        async with SocketControl((control_of(exporter),), KEY) as control, asyncio.timeout(10):
            while (await control.call(Stats()))[0].staged_bytes:
                await asyncio.sleep(0.01)


async def test_garbage_on_the_event_socket_is_dropped(tmp_path: Path) -> None:
    async with KvEvents(f"ipc://{tmp_path}/events") as events:
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.connect(events.address)
            push.send(b"\xff garbage")
            sender = EventSender(events.address)
            waiting = asyncio.create_task(next_event(events))
            while not events.dropped:
                await asyncio.sleep(0.01)
            sender.send(StagingFailed("t", 0, "refused"))
            assert await waiting == StagingFailed("t", 0, "refused")
            sender.close()


def test_events_that_nobody_takes_do_not_block(tmp_path: Path) -> None:
    sender = EventSender(f"ipc://{tmp_path}/nobody")
    for _ in range(1000):
        sender.send(StagingFailed("t", 0, "refused"))
    sender.close()
