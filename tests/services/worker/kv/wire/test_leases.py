"""Staged KV whose decode waits for blocks longer than a lease, without a prefetch, on a clock that the test sets."""

import pytest
import torch

from services.worker.kv.port import ConnectorPort, ExportLedger
from services.worker.kv.rank_links import DirectControl, Prefetch, RenewLease
from services.worker.kv.wire.endpoint import KvEndpoint
from shared.domain.kv import KvHandle, TransferOutcome
from shared.runtime.tasks import background
from tests.services.worker.kv.rig import Rig, model_kv, stage
from tests.services.worker.kv.test_staging import Clock
from tests.services.worker.kv.wire.test_rude_peers import wait_until

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
