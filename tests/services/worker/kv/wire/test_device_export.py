"""Exports of a cache on a device, pulled over real sockets while the model goes on."""

import asyncio

import pytest
import torch

from services.worker.kv.device import DeviceCopies
from services.worker.kv.host_memory import PinnedMemory
from services.worker.kv.rank_links import KvEvent, KvEvents, StagingFailed, TransferEnded
from tests.services.worker.kv.late_device import LateDevice
from tests.services.worker.kv.rig import DIM, KV_HEADS, LAYERS, WAIT_S, Rig, model_kv

TOKENS, SEGMENT = 50, 16
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * DIM * 4


def shape(tokens: int) -> tuple[int, ...]:
    return LAYERS, 2, tokens, KV_HEADS, DIM


def copies_of(device: LateDevice, tokens: int = 200) -> DeviceCopies:
    memory = PinnedMemory(
        shape, torch.float32, SEGMENT, tokens * TOKEN_BYTES, lambda size: torch.zeros(size, dtype=torch.uint8)
    )
    return DeviceCopies(device, memory, SEGMENT * TOKEN_BYTES // 4, 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_importer_gets_what_was_computed_though_the_blocks_are_used_again(rig: Rig, seed: int) -> None:
    device, kv, cache = LateDevice(seed), model_kv(TOKENS), torch.zeros(shape(TOKENS))
    exporter, importer = rig.endpoint(copies=copies_of(device)), rig.endpoint()

    def fill(first: int, until: int, out: torch.Tensor) -> None:
        device.issue(lambda: out.copy_(cache[:, :, first:until]))

    capture = rig.load(importer, rig.handle([exporter], TOKENS))
    for start, end in ((0, 20), (20, TOKENS)):

        def compute(start: int = start, end: int = end) -> None:
            cache[:, :, start:end] = kv[:, :, start:end]

        device.issue(compute)
        exporter.stage("t", start, end, TOKENS, fill)
        device.issue(lambda: cache.fill_(-1.0))
    result = rig.result()
    assert result.ok, result.error
    assert torch.equal(capture.kv, kv)
    assert exporter.stats().staged_bytes in (0, TOKENS * TOKEN_BYTES)


def test_all_threads_of_an_endpoint_make_the_device_their_current_one(rig: Rig) -> None:
    device, kv = LateDevice(), model_kv(TOKENS)
    exporter = rig.endpoint(copies=copies_of(device))
    exporter.stage("t", 0, TOKENS, TOKENS, lambda first, until, out: out.copy_(kv[:, :, first:until]))
    rig.load(exporter, rig.handle([exporter], TOKENS))
    assert rig.result().ok
    assert sorted(device.entered) == ["kv-copies", "kv-puller", "kv-server"]


async def events_until(events: KvEvents, last: type[KvEvent]) -> list[KvEvent]:
    seen: list[KvEvent] = []
    async with asyncio.timeout(WAIT_S):
        while not seen or not isinstance(seen[-1], last):
            seen.append(await events.get())
    return seen


async def test_a_transfer_that_ends_while_it_is_copied_holds_its_room_until_the_copy_is_over(rig: Rig) -> None:
    async with rig.events() as events:
        device = LateDevice()
        exporter = rig.endpoint(copies=copies_of(device), staging_bytes=TOKENS * TOKEN_BYTES)
        with device.lock:  # the copy does not end
            exporter.stage("t", 0, TOKENS, TOKENS, lambda *_: None)
            exporter.release("t")
            assert exporter.staged_bytes == TOKENS * TOKEN_BYTES
        seen = await asyncio.wait_for(events_until(events, TransferEnded), WAIT_S)
        assert seen == [TransferEnded("t", 0, 0)]
        assert exporter.staged_bytes == 0


async def test_want_of_pinned_memory_fails_the_transfer_and_not_the_engine(rig: Rig) -> None:
    async with rig.events() as events:
        exporter, importer = rig.endpoint(copies=copies_of(LateDevice(), tokens=10)), rig.endpoint()
        exporter.stage("t", 0, TOKENS, TOKENS, lambda *_: pytest.fail("nothing is gathered"))
        seen = await events_until(events, StagingFailed)
        assert "pinned memory has no room" in str(seen[-1])
        rig.load(importer, rig.handle([exporter], TOKENS))
        assert rig.result().error.startswith("refused")
