"""Pulls that begin before the engine has blocks for them, asked for through the control channel."""

import asyncio
import threading

import pytest
import torch
from kv_rig import KEY, Rig, model_kv, stage

from services.worker.kv.control import KvControl, SocketControl
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.frames import RankStats
from services.worker.kv.wire.importing import PullLimits
from shared.errors import DeadlineExceeded, PolyphaseError


async def level(control: KvControl, name: str, wanted: object) -> RankStats:
    """Statistics once a level or count is what is wanted."""
    async with asyncio.timeout(10):
        while True:
            (stats,) = await control.stats()
            if getattr(stats, name) == wanted:
                return stats
            await asyncio.sleep(0.01)


def control_of(endpoint: KvEndpoint) -> SocketControl:
    return SocketControl((endpoint.address,), KEY)


async def test_a_load_takes_over_what_was_prefetched(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    async with control_of(importer) as control:
        await control.prefetch(rig.handle([exporter], 64), keep_s=20)
        stage(exporter, kv, end=32)
        half = kv[:, :, :32].numel() * 4
        await level(control, "inbox_bytes", half)
        got = rig.load(importer, rig.handle([exporter], 64), 16)
        await level(control, "inbox_bytes", 0)
        stage(exporter, kv, start=32)
        result = await asyncio.to_thread(rig.result)
    assert (result.ok, result.prefetched, result.tokens) == (True, True, 48)
    assert torch.equal(got.kv, kv[:, :, 16:])


async def test_a_finished_prefetch_frees_the_exporter_and_waits(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv)
    async with control_of(importer) as control, control_of(exporter) as other:
        await control.prefetch(rig.handle([exporter], 64), keep_s=20)
        await level(control, "inbox_bytes", kv.numel() * 4)
        await level(other, "staged_bytes", 0)
        got = rig.load(importer, rig.handle([exporter], 64))
        assert (await asyncio.to_thread(rig.result)).ok
        stats = await level(control, "inbox_bytes", 0)
    assert torch.equal(got.kv, kv)
    assert (stats.pulls_ok, stats.pulling, stats.prefetches) == (1, 0, 1)


async def test_a_dropped_prefetch_leaves_nothing_and_the_load_pulls_for_itself(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    async with control_of(importer) as control:
        await control.prefetch(rig.handle([exporter], 64), keep_s=20)
        stage(exporter, kv, end=32)
        await level(control, "inbox_bytes", kv[:, :, :32].numel() * 4)
        await control.drop("t")
        stats = await level(control, "inbox_bytes", 0)
        assert stats.pulling == 0
        got = rig.load(importer, rig.handle([exporter], 64))
        stage(exporter, kv, start=32)
        result = await asyncio.to_thread(rig.result)
    assert (result.ok, result.prefetched) == (True, False)
    assert torch.equal(got.kv, kv)


async def test_drop_does_not_touch_a_load(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    async with control_of(importer) as control:
        rig.load(importer, rig.handle([exporter], 64))
        await control.drop("t")
        stage(exporter, kv)
        assert (await asyncio.to_thread(rig.result)).ok


async def test_a_prefetch_that_nobody_loads_ends(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv)
    async with control_of(importer) as control:
        await control.prefetch(rig.handle([exporter], 64), keep_s=0.2)
        await level(control, "prefetches", 1)
        stats = await level(control, "pulling", 0)
    assert stats.inbox_bytes == 0
    assert rig.results.empty()


async def test_the_inbox_is_bounded(rig: Rig) -> None:
    """The second prefetch has no room, and the first stops at the bound; loads get everything all the same."""
    kv = model_kv(4096)
    size = kv.numel() * 4
    window = size // 8
    limits = PullLimits(window_bytes=window, inbox_bytes=2 * window)
    exporter, importer = rig.endpoint(), rig.endpoint(limits=limits)
    for name in "ab":
        for start in range(0, 4096, 64):
            stage(exporter, kv, name, start, start + 64)
    async with control_of(importer) as control:
        for name in "ab":
            await control.prefetch(rig.handle([exporter], 4096, name), keep_s=20)
        await asyncio.to_thread(threading.Event().wait, 0.3)  # time to take too much, if it would
        (stats,) = await control.stats()
        assert 0 < stats.inbox_bytes <= 2 * window + size // 64
        captures = [rig.load(importer, rig.handle([exporter], 4096, name)) for name in "ab"]
        results = [await asyncio.to_thread(rig.result) for _ in captures]
    assert all(result.ok for result in results)
    assert all(torch.equal(capture.kv, kv) for capture in captures)


async def test_release_is_idempotent(rig: Rig) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(64))
    async with control_of(exporter) as control:
        await control.release("t")
        await control.release("t")
        (stats,) = await control.stats()
    assert (stats.staged_bytes, stats.transfers) == (0, 0)


async def test_control_needs_the_key(rig: Rig) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(64))
    async with SocketControl((exporter.address,), "guess") as control:
        with pytest.raises(DeadlineExceeded):
            await control.release("t", timeout_s=0.3)
    assert exporter.staged_bytes > 0
    assert exporter.server_counters.dropped == 1


async def test_a_prefetch_of_another_model_is_an_error(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    async with control_of(importer) as control:
        with pytest.raises(PolyphaseError, match="fingerprint"):
            await control.prefetch(rig.handle([exporter], 64, fingerprint="other"), keep_s=1)
