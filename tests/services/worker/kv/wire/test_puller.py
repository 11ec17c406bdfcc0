"""The importer: prefetches, and renewals of leases."""

import asyncio
import threading
import time

import pytest
import torch

from services.worker.kv.port import ConnectorPort, ExportLedger
from services.worker.kv.rank_links import (
    DirectControl,
    Drop,
    KvControl,
    Prefetch,
    RankStats,
    Release,
    RenewLease,
    SocketControl,
    Stats,
)
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import Credit, Pull, encode_message
from shared.domain.kv import Codec, KvHandle, TransferOutcome
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.runtime.tasks import background
from tests.services.worker.kv.rig import KEY, KV_HEADS, LAYERS, Rig, model_kv, prefetch, stage
from tests.services.worker.kv.rig import control_of as address_of_control
from tests.services.worker.kv.test_staging import Clock
from tests.services.worker.kv.wire.hostile import Stranger
from tests.services.worker.kv.wire.test_rude_peers import wait_until


async def level(control: KvControl, name: str, wanted: object) -> RankStats:
    """Statistics once a level or count is what is wanted."""
    async with asyncio.timeout(10):
        while True:
            (stats,) = await control.call(Stats())
            if getattr(stats, name) == wanted:
                return stats
            await asyncio.sleep(0.01)


def control_of(endpoint: KvEndpoint, key: str = KEY) -> SocketControl:
    return SocketControl((address_of_control(endpoint),), key)


async def test_a_load_takes_over_what_was_prefetched(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 64), keep_s=20))
        stage(exporter, kv, end=32)
        half = kv[:, :, :32].numel() * 4
        await level(control, "inbox_bytes", half)
        got = rig.load(importer, rig.handle([exporter], 64), 16)
        await level(control, "inbox_bytes", 0)
        stage(exporter, kv, start=32)
        result = await asyncio.to_thread(rig.result)
    assert (result.ok, result.prefetched, result.tokens) == (True, True, 48)
    assert torch.equal(got.kv, kv[:, :, 16:])


async def test_a_load_that_comes_late_goes_on_where_a_slow_prefetch_is(rig: Rig) -> None:
    """The exporter's chunks come slowly, the engine's blocks later than any progress deadline: nothing is lost."""
    stall_s, kv = 0.6, model_kv(128)
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=stall_s))
    began = time.monotonic()
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 128), keep_s=60))
        for start in range(0, 96, 16):
            stage(exporter, kv, start=start, end=start + 16)
            await level(control, "inbox_bytes", kv[:, :, : start + 16].numel() * 4)
            await asyncio.sleep(stall_s / 2)
        assert time.monotonic() - began > 2 * stall_s
        got = rig.load(importer, rig.handle([exporter], 128))
        stage(exporter, kv, start=96)
        result = await asyncio.to_thread(rig.result)
    assert (result.ok, result.prefetched) == (True, True)
    assert torch.equal(got.kv, kv)
    assert exporter.server_counters.sent_bytes == kv.numel() * 4  # each byte once
    assert exporter.server_counters.served == 1


async def test_a_prefetch_that_pauses_for_room_is_kept_and_goes_on_when_there_is_some(rig: Rig) -> None:
    """Paused, it waits for the engine and not for the exporter: no progress deadline runs, the exporter's neither."""
    kv = model_kv(4096)
    window = kv.numel() * 4 // 8
    limits = PullLimits(stall_s=0.3, window_bytes=window, inbox_bytes=2 * window)
    exporter, importer = rig.endpoint(lease_s=0.5), rig.endpoint(limits=limits)
    for start in range(0, 4096, 64):
        stage(exporter, kv, start=start, end=start + 64)
    stage(exporter, kv[:, :, :64], "small")
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 4096), keep_s=60))
        await level(control, "prefetches", 1)
        before = await settled(control, "inbox_bytes")
        await asyncio.sleep(1.5)  # several times what would have been a stall, or the end of the lease
        (stats,) = await control.call(Stats())
        assert (stats.inbox_bytes, stats.pulling) == (before, 1)
        assert exporter.staged_bytes > 0
        got = rig.load(importer, rig.handle([exporter], 4096))
        assert (await asyncio.to_thread(rig.result)).ok
    assert torch.equal(got.kv, kv)
    assert exporter.server_counters.sent_bytes == kv.numel() * 4


async def test_a_paused_prefetch_goes_on_when_another_leaves_room(rig: Rig) -> None:
    kv = model_kv(4096)
    window = kv.numel() * 4 // 8
    exporter = rig.endpoint()
    importer = rig.endpoint(limits=PullLimits(window_bytes=window, inbox_bytes=5 * window))
    async with control_of(importer) as control:
        for name in "ab":
            await control.call(prefetch(rig.handle([exporter], 4096, name), keep_s=60))
        await level(control, "prefetches", 2)  # while there is room for both
        for name in "ab":
            for start in range(0, 4096, 64):
                stage(exporter, kv, name, start, start + 64)
        before = await settled(control, "inbox_bytes")
        (stats,) = await control.call(Stats())
        received = stats.received_bytes
        assert before > 0
        await control.call(Drop("a"))
        async with asyncio.timeout(10):
            while (await control.call(Stats()))[0].received_bytes == received:
                await asyncio.sleep(0.01)


async def test_a_prefetch_that_makes_no_progress_ends(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=0.3)), model_kv(64)
    stage(exporter, kv, end=32)
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 64), keep_s=60))
        await level(control, "inbox_bytes", kv[:, :, :32].numel() * 4)
        await level(control, "pulling", 0)
        await level(control, "inbox_bytes", 0)  # its buffer goes a moment later


async def test_a_release_drops_a_prefetch(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv, end=32)
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 64), keep_s=60))
        await level(control, "inbox_bytes", kv[:, :, :32].numel() * 4)
        await control.call(Release("t"))
        stats = await level(control, "inbox_bytes", 0)
    assert stats.pulling == 0


async def test_an_exporter_forgets_a_pull_of_which_it_hears_no_more(rig: Rig) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(64), end=32)
    pull = Pull(1, "t", 7, "model", Codec.RAW, 0, LAYERS, 0, 64, 0, KV_HEADS, 0, 1, 1, 1 << 20, timeout_s=1.0)
    async with control_of(exporter) as control:
        with Stranger(exporter.address) as peer:
            peer.send(encode_message(pull))
            await level(control, "serving", 1)
            for _ in range(8):
                peer.send(encode_message(Credit(1, 0)))
                await asyncio.sleep(0.25)
                assert (await control.call(Stats()))[0].serving == 1
            await level(control, "serving", 0)


async def settled(control: SocketControl, name: str) -> int:
    """A level once it has stopped rising."""
    async with asyncio.timeout(20):
        last, alike = -1, 0
        while alike < 10:
            (stats,) = await control.call(Stats())
            level = getattr(stats, name)
            alike = alike + 1 if level == last and level > 0 else 0
            last = level
            await asyncio.sleep(0.02)
    return last


async def test_a_rank_in_this_process_is_asked_without_a_socket(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv)
    control = DirectControl(importer.carry_out)
    await control.call(prefetch(rig.handle([exporter], 64), keep_s=60))
    await level(control, "inbox_bytes", kv.numel() * 4)
    await control.call(Drop("t"))
    await level(control, "inbox_bytes", 0)
    with pytest.raises(PolyphaseError, match="fingerprint"):
        await control.call(prefetch(rig.handle([exporter], 64, fingerprint="other"), keep_s=1))
    with pytest.raises(PolyphaseError, match="invalid"):
        await control.call(prefetch(rig.handle([exporter], 64, endpoints=()), keep_s=1))
    stage(importer, kv, "mine")
    await control.call(Release("mine"))
    assert (await control.call(Stats()))[0].staged_bytes == 0


async def test_a_finished_prefetch_frees_the_exporter_and_waits(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv)
    async with control_of(importer) as control, control_of(exporter) as other:
        await control.call(prefetch(rig.handle([exporter], 64), keep_s=20))
        await level(control, "inbox_bytes", kv.numel() * 4)
        await level(other, "staged_bytes", 0)
        loaded_s = time.time()
        got = rig.load(importer, rig.handle([exporter], 64))
        result = await asyncio.to_thread(rig.result)
        stats = await level(control, "inbox_bytes", 0)
    assert torch.equal(got.kv, kv)
    assert (stats.pulls_ok, stats.pulling, stats.prefetches) == (1, 0, 1)
    assert result.ok
    assert result.started_s <= result.ended_s <= loaded_s, "the wait for the engine's blocks is no part of it"


async def test_a_dropped_prefetch_leaves_nothing_and_the_load_pulls_for_itself(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 64), keep_s=20))
        stage(exporter, kv, end=32)
        await level(control, "inbox_bytes", kv[:, :, :32].numel() * 4)
        await control.call(Drop("t"))
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
        await control.call(Drop("t"))
        stage(exporter, kv)
        assert (await asyncio.to_thread(rig.result)).ok


async def test_a_prefetch_that_nobody_loads_ends(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv)
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 64), keep_s=0.2))
        await level(control, "prefetches", 1)
        await level(control, "pulling", 0)
        await level(control, "inbox_bytes", 0)  # its buffer goes a moment later
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
            await control.call(prefetch(rig.handle([exporter], 4096, name), keep_s=20))
        await asyncio.to_thread(wait_until, lambda: importer.stats().inbox_bytes > 0)
        await asyncio.to_thread(threading.Event().wait, 0.3)  # time to take too much, if it would
        (stats,) = await control.call(Stats())
        assert 0 < stats.inbox_bytes <= 2 * window + size // 64
        captures = [rig.load(importer, rig.handle([exporter], 4096, name)) for name in "ab"]
        results = [await asyncio.to_thread(rig.result) for _ in captures]
    assert all(result.ok for result in results)
    assert all(torch.equal(capture.kv, kv) for capture in captures)


async def test_release_is_idempotent(rig: Rig) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(64))
    async with control_of(exporter) as control:
        await control.call(Release("t"))
        await control.call(Release("t"))
        (stats,) = await control.call(Stats())
    assert (stats.staged_bytes, stats.transfers) == (0, 0)


async def test_control_needs_the_key(rig: Rig) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(64))
    async with control_of(exporter, "guess") as control:
        with pytest.raises(DeadlineExceeded):
            await control.call(Release("t"), timeout_s=0.3)
    assert exporter.staged_bytes > 0
    assert exporter.stats().dropped_messages == 1


async def test_a_prefetch_of_another_model_is_an_error(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    async with control_of(importer) as control:
        with pytest.raises(PolyphaseError, match="fingerprint"):
            await control.call(prefetch(rig.handle([exporter], 64, fingerprint="other"), keep_s=1))


LEASE_S = 30.0


TOKENS = 64


def on_clock(exporter: KvEndpoint) -> Clock:
    clock = exporter._pool._clock = Clock()
    return clock


def renewed(exporter: KvEndpoint, importer: KvEndpoint, handle: KvHandle, count: int) -> None:
    importer.carry_out(RenewLease(handle))
    wait_until(lambda: exporter.stats().leases_renewed == count)


async def test_a_decode_that_waits_for_blocks_longer_than_the_lease_still_pulls(rig: Rig) -> None:
    async with rig.events() as events, background() as tasks:
        exporter, importer, kv = rig.endpoint(lease_s=LEASE_S), rig.endpoint(), model_kv(TOKENS)
        clock = on_clock(exporter)
        handle = rig.handle([exporter], TOKENS, lease_s=LEASE_S)
        port = ConnectorPort(DirectControl(importer.carry_out), events, handle, ExportLedger(1000, 1), 10, clock)
        stage(exporter, kv)
        expected = port.expect(handle)
        for turn in range(1, 11):  # of half a lease each: five leases without a pull
            clock.now += LEASE_S / 2
            await port.renew_leases()
            wait_until(lambda turn=turn: exporter.stats().leases_renewed == turn)
        port.start(tasks)
        got = rig.load(importer, handle)
        report = await port.import_report(expected)
    assert (report.outcome, report.tokens, report.error) == (TransferOutcome.PULLED, TOKENS, "")
    assert torch.equal(got.kv, kv)
    assert exporter.stats().leases_expired == 0


def test_every_exporter_rank_that_will_be_asked_is_renewed(rig: Rig) -> None:
    exporters = [rig.endpoint(rank, 2, lease_s=LEASE_S) for rank in range(2)]
    importer, kv = rig.endpoint(), model_kv(TOKENS)
    for rank, exporter in enumerate(exporters):
        clock = on_clock(exporter)
        stage(exporter, kv, heads=slice(2 * rank, 2 * rank + 2))
        clock.now += LEASE_S / 2
    importer.carry_out(RenewLease(rig.handle(exporters, TOKENS)))
    for exporter in exporters:
        wait_until(lambda exporter=exporter: exporter.stats().leases_renewed == 1)


def test_renewals_are_bounded_in_number_and_the_lease_ends_after_the_last(rig: Rig) -> None:
    exporter, importer = rig.endpoint(lease_s=LEASE_S, lease_renewals=3), rig.endpoint()
    clock, handle = on_clock(exporter), rig.handle([exporter], TOKENS)
    stage(exporter, model_kv(TOKENS))
    for turn in range(1, 4):
        clock.now += LEASE_S / 2
        renewed(exporter, importer, handle, turn)
    clock.now += LEASE_S / 2
    importer.carry_out(RenewLease(handle))
    clock.now += LEASE_S / 2
    wait_until(lambda: exporter.staged_bytes == 0)
    assert (exporter.stats().leases_renewed, exporter.stats().leases_expired) == (3, 1)
    rig.load(importer, handle)
    assert rig.result().error.startswith("expired_lease")


@pytest.mark.parametrize("why", ["stale", "unknown", "ended"])
def test_what_an_exporter_does_not_hold_is_not_renewed(rig: Rig, why: str) -> None:
    exporter, importer = rig.endpoint(lease_s=LEASE_S), rig.endpoint()
    clock = on_clock(exporter)
    stage(exporter, model_kv(TOKENS))
    stage(exporter, model_kv(TOKENS), "after")
    if why == "ended":
        exporter.release("t")
    clock.now += LEASE_S / 2
    more = {"generation": rig.generation + 1} if why == "stale" else {}
    importer.carry_out(RenewLease(rig.handle([exporter], TOKENS, "other" if why == "unknown" else "t", **more)))
    renewed(exporter, importer, rig.handle([exporter], TOKENS, "after"), 1)  # messages keep their order
    assert exporter.stats().transfers == (1 if why == "ended" else 2)


def test_what_is_being_pulled_needs_no_renewal(rig: Rig) -> None:
    exporter, importer = rig.endpoint(lease_s=LEASE_S), rig.endpoint()
    clock, kv = on_clock(exporter), model_kv(TOKENS)
    stage(exporter, kv, end=32)
    stage(exporter, kv, "after")
    importer.carry_out(Prefetch(rig.handle([exporter], TOKENS), TOKENS, 60.0))
    wait_until(lambda: exporter.stats().serving == 1)
    clock.now += LEASE_S / 2
    importer.carry_out(RenewLease(rig.handle([exporter], TOKENS)))
    renewed(exporter, importer, rig.handle([exporter], TOKENS, "after"), 1)
