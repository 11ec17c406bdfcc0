"""Operations of the worker on a rank, by a call and over a socket: prefetches, releases, and renewals of leases."""

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext

import pytest
import torch

from services.worker.kv.port import ConnectorPort, ExportLedger
from services.worker.kv.rank_control import DirectControl, KvControl, SocketControl
from services.worker.kv.rank_messages import Accepted, Drop, RankStats, Release, RenewLease, Stats
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import Credit, encode_message
from shared.domain.kv import KvHandle, TransferOutcome
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.runtime.tasks import background
from tests.services.worker.kv.rig import KEY, TOKEN_BYTES, Clock, Rig, model_kv, prefetch, stage, wait_until
from tests.services.worker.kv.wire.peers import Stranger, pull


def control_of(endpoint: KvEndpoint, key: str = KEY, answer_s: float = 20.0) -> SocketControl:
    return SocketControl((endpoint.settings.controls[0],), key, answer_s=answer_s)


async def level(control: KvControl, name: str, wanted: object) -> RankStats:
    """Statistics once a level or count is what is wanted."""
    async with asyncio.timeout(20):
        while True:
            (stats,) = await control.call(Stats())
            if getattr(stats, name) == wanted:
                return stats
            await asyncio.sleep(0.01)


async def settled(control: KvControl, name: str) -> int:
    """A level once it has stopped rising."""
    async with asyncio.timeout(20):
        last, alike = -1, 0
        while alike < 10:
            (stats,) = await control.call(Stats())
            value: int = getattr(stats, name)
            alike = alike + 1 if value == last and value > 0 else 0
            last = value
            await asyncio.sleep(0.02)
    return last


@pytest.mark.parametrize("direct", [False, True])
async def test_a_load_continues_a_prefetch(rig: Rig, direct: bool) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    by_call: AbstractAsyncContextManager[KvControl] = nullcontext(DirectControl(importer.carry_out))
    async with by_call if direct else control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 64)))
        stage(exporter, kv, end=32)
        await level(control, "inbox_bytes", 32 * TOKEN_BYTES)
        got = rig.load(importer, rig.handle([exporter], 64), 16)
        await control.call(Drop("t"))  # which a load is not
        await level(control, "inbox_bytes", 0)
        stage(exporter, kv, start=32)
        result = await asyncio.to_thread(rig.result)
    assert (result.ok, result.prefetched, result.tokens) == (True, True, 48)
    assert torch.equal(got.kv, kv[:, :, 16:])


async def test_a_load_that_comes_late_goes_on_where_a_slow_prefetch_is(rig: Rig) -> None:
    """The exporter's chunks come slowly, the engine's blocks later than any progress deadline: nothing is lost."""
    stall_s, kv = 1.5, model_kv(128)
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=stall_s))
    began = time.monotonic()
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 128)))
        for start in range(0, 96, 16):
            stage(exporter, kv, start=start, end=start + 16)
            await level(control, "inbox_bytes", (start + 16) * TOKEN_BYTES)
            await asyncio.sleep(stall_s / 2)
        assert time.monotonic() - began > 2 * stall_s
        got = rig.load(importer, rig.handle([exporter], 128))
        stage(exporter, kv, start=96)
        result = await asyncio.to_thread(rig.result)
    assert (result.ok, result.prefetched) == (True, True)
    assert torch.equal(got.kv, kv)
    assert exporter.stats().sent_bytes == kv.numel() * 4  # each byte once


async def test_the_inbox_is_bounded_and_a_paused_prefetch_is_kept(rig: Rig) -> None:
    """The second prefetch has no room, and the first pauses at the bound: no progress deadline runs, the exporter's
    neither. Loads get everything all the same.
    """
    kv = model_kv(4096)
    window = kv.numel() * 4 // 8
    limits = PullLimits(stall_s=1.0, window_bytes=window, inbox_bytes=2 * window)
    exporter, importer = rig.endpoint(lease_s=1.0), rig.endpoint(limits=limits)
    stage(exporter, kv, "a", each=64)
    async with control_of(importer) as control:
        for name in "ab":
            await control.call(prefetch(rig.handle([exporter], 4096, name)))
        before = await settled(control, "inbox_bytes")
        assert before <= 2 * window + kv.numel() * 4 // 64
        await asyncio.sleep(3.0)  # several times what would have been a stall, or the end of the lease
        (stats,) = await control.call(Stats())
        assert (stats.inbox_bytes, stats.pulling) == (before, 1)
        stage(exporter, kv, "b", each=64)
        captures = [rig.load(importer, rig.handle([exporter], 4096, name)) for name in "ab"]
        assert all([(await asyncio.to_thread(rig.result)).ok for _ in captures])
    assert all(torch.equal(capture.kv, kv) for capture in captures)
    assert exporter.stats().sent_bytes == 2 * kv.numel() * 4


async def test_a_paused_prefetch_goes_on_when_another_leaves_room(rig: Rig) -> None:
    kv = model_kv(4096)
    window = kv.numel() * 4 // 8
    exporter = rig.endpoint()
    importer = rig.endpoint(limits=PullLimits(window_bytes=window, inbox_bytes=5 * window))
    async with control_of(importer) as control:
        for name in "ab":
            await control.call(prefetch(rig.handle([exporter], 4096, name)))
        await level(control, "prefetches", 2)  # while there is room for both
        for name in "ab":
            stage(exporter, kv, name, each=64)
        await settled(control, "inbox_bytes")
        received = importer.stats().received_bytes
        await control.call(Drop("a"))
        await asyncio.to_thread(wait_until, lambda: importer.stats().received_bytes > received)


@pytest.mark.parametrize("why", ["no progress", "never loaded", "drop", "release"])
async def test_a_prefetch_that_ends_leaves_nothing(rig: Rig, why: str) -> None:
    limits = PullLimits(stall_s=0.3 if why == "no progress" else 10.0)
    exporter, importer, kv = rig.endpoint(), rig.endpoint(limits=limits), model_kv(64)
    stage(exporter, kv, end=32)
    async with control_of(importer) as control:
        await control.call(prefetch(rig.handle([exporter], 64), keep_s=0.3 if why == "never loaded" else 60.0))
        await level(control, "prefetches", 1)
        if why in ("drop", "release"):
            await level(control, "inbox_bytes", 32 * TOKEN_BYTES)
            await control.call(Drop("t") if why == "drop" else Release("t"))
        await level(control, "pulling", 0)
        await level(control, "inbox_bytes", 0)  # its buffer goes a moment later
        assert rig.results.empty()
        got = rig.load(importer, rig.handle([exporter], 64))
        stage(exporter, kv, start=32)
        result = await asyncio.to_thread(rig.result)
    assert (result.ok, result.prefetched) == (True, False)
    assert torch.equal(got.kv, kv)


async def test_a_finished_prefetch_that_is_dropped_leaves_the_kv_to_another_instance(rig: Rig) -> None:
    exporter, first, second, kv = rig.endpoint(), rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv)
    async with control_of(first) as control:
        await control.call(prefetch(rig.handle([exporter], 64)))
        await level(control, "inbox_bytes", kv.numel() * 4)
        await control.call(Drop("t"))  # its decode was refused
        await level(control, "inbox_bytes", 0)
    got = rig.load(second, rig.handle([exporter], 64))
    assert (await asyncio.to_thread(rig.result)).ok
    assert torch.equal(got.kv, kv)


@pytest.mark.parametrize("early", [True, False])
async def test_an_accepted_prefetch_frees_the_exporter_and_waits(rig: Rig, early: bool) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    stage(exporter, kv, end=32)
    async with control_of(importer) as control, control_of(exporter) as other:
        await control.call(prefetch(rig.handle([exporter], 64)))
        await level(control, "inbox_bytes", kv.numel() * 2)
        if early:
            await control.call(Accepted("t"))
        stage(exporter, kv, start=32)
        await level(control, "inbox_bytes", kv.numel() * 4)
        if not early:
            assert exporter.staged_bytes > 0
            await control.call(Accepted("t"))
        await level(other, "staged_bytes", 0)
        loaded_s = time.time()
        got = rig.load(importer, rig.handle([exporter], 64))
        result = await asyncio.to_thread(rig.result)
        stats = await level(control, "inbox_bytes", 0)
    assert torch.equal(got.kv, kv)
    assert (stats.pulls_ok, stats.pulling, stats.prefetches) == (1, 0, 1)
    assert result.started_s <= result.ended_s <= loaded_s, "the wait for the engine's blocks is no part of it"


async def test_an_exporter_forgets_a_pull_whose_importer_is_silent(rig: Rig) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(40), end=32)
    with Stranger(exporter.address) as peer:
        peer.send(encode_message(pull(credit_bytes=1 << 20, timeout_s=2.0)))
        wait_until(lambda: exporter.stats().serving == 1)
        for _ in range(12):
            peer.send(encode_message(Credit(1, 0)))
            await asyncio.sleep(0.25)
            assert exporter.stats().serving == 1
        wait_until(lambda: exporter.stats().serving == 0)


@pytest.mark.parametrize(("change", "code"), [({"fingerprint": "x"}, "fingerprint"), ({"endpoints": ()}, "invalid")])
@pytest.mark.parametrize("direct", [False, True])
async def test_an_invalid_prefetch_is_an_error(rig: Rig, change: dict[str, object], code: str, direct: bool) -> None:
    importer = rig.endpoint()
    by_call: AbstractAsyncContextManager[KvControl] = nullcontext(DirectControl(importer.carry_out))
    async with by_call if direct else control_of(importer) as control:
        with pytest.raises(PolyphaseError, match=code):
            await control.call(prefetch(rig.handle([importer], 64, **change)))


async def test_control_needs_the_key_and_release_is_idempotent(rig: Rig) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(64))
    async with control_of(exporter, "guess", answer_s=0.3) as control:
        with pytest.raises(DeadlineExceeded):
            await control.call(Release("t"))
    assert exporter.staged_bytes > 0
    wait_until(lambda: exporter.stats().dropped_messages == 1)
    async with control_of(exporter) as control:
        for _ in range(2):
            await control.call(Release("t"))
        (stats,) = await control.call(Stats())
    assert (stats.staged_bytes, stats.transfers) == (0, 0)


LEASE_S = 30.0
TOKENS = 64


async def test_a_decode_that_waits_for_blocks_longer_than_the_lease_still_pulls(rig: Rig) -> None:
    async with rig.events() as events, background() as tasks:
        clock = Clock()
        exporter, importer, kv = rig.endpoint(lease_s=LEASE_S, clock=clock), rig.endpoint(), model_kv(TOKENS)
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


def test_every_exporter_rank_from_which_a_rank_will_pull_is_renewed(rig: Rig) -> None:
    clock = Clock()
    exporters = [rig.endpoint(rank, 2, lease_s=LEASE_S, clock=clock) for rank in range(2)]
    importer, kv = rig.endpoint(), model_kv(TOKENS)
    for rank, exporter in enumerate(exporters):
        stage(exporter, kv, heads=slice(2 * rank, 2 * rank + 2))
    clock.now += LEASE_S / 2
    importer.carry_out(RenewLease(rig.handle(exporters, TOKENS)))
    wait_until(lambda: [exporter.stats().leases_renewed for exporter in exporters] == [1, 1])


def renew(exporter: KvEndpoint, importer: KvEndpoint, handle: KvHandle, count: int) -> None:
    """Have the importer renew the lease, for the `count`th time, and wait until the exporter has."""
    importer.carry_out(RenewLease(handle))
    wait_until(lambda: exporter.stats().leases_renewed == count)


def test_renewals_are_bounded_in_number_and_the_lease_ends_after_the_last(rig: Rig) -> None:
    clock = Clock()
    exporter, importer = rig.endpoint(lease_s=LEASE_S, lease_renewals=3, clock=clock), rig.endpoint()
    handle = rig.handle([exporter], TOKENS)
    stage(exporter, model_kv(TOKENS))
    for turn in range(1, 4):
        clock.now += LEASE_S / 2
        renew(exporter, importer, handle, turn)
    clock.now += LEASE_S / 2
    importer.carry_out(RenewLease(handle))
    clock.now += LEASE_S / 2
    wait_until(lambda: exporter.staged_bytes == 0)
    assert (exporter.stats().leases_renewed, exporter.stats().leases_expired) == (3, 1)
    assert rig.refused(importer, handle).startswith("expired_lease")


@pytest.mark.parametrize("why", ["stale", "unknown", "ended", "being pulled"])
def test_leases_that_need_or_get_no_renewal(rig: Rig, why: str) -> None:
    clock = Clock()
    exporter, importer = rig.endpoint(lease_s=LEASE_S, clock=clock), rig.endpoint()
    stage(exporter, model_kv(TOKENS), end=32)
    stage(exporter, model_kv(TOKENS), "after")
    if why == "ended":
        exporter.release("t")
    if why == "being pulled":
        importer.carry_out(prefetch(rig.handle([exporter], TOKENS)))
        wait_until(lambda: exporter.stats().serving == 1)
    clock.now += LEASE_S / 2
    more = {"generation": rig.generation + 1} if why == "stale" else {}
    importer.carry_out(RenewLease(rig.handle([exporter], TOKENS, "other" if why == "unknown" else "t", **more)))
    renew(exporter, importer, rig.handle([exporter], TOKENS, "after"), 1)  # messages keep their order
    assert exporter.stats().transfers == (1 if why == "ended" else 2)
