"""On which device, from which threads and with which events KV is moved: with stand-ins for `torch.cuda`, which is
ROCm's, too, and `torch.xpu`. The rank is the second one of an instance, whose caches are on device 1.
"""

from pathlib import Path

import pytest
import torch

from services.worker.kv.device import Blocks, DeviceCopies
from services.worker.kv.layout import slots_of, strided_layout
from services.worker.kv.staging import HeapMemory
from services.worker.kv.wire.importing import Load
from tests.services.worker.kv.rig import DIM, KV_HEADS, LAYERS, WAIT_S, Rig, model_kv
from tests.services.worker.kv.stand_in import OnHost, StandIn

BLOCK, TOKENS, SEGMENT = 16, 50, 16
THREADS = {"kv-puller", "kv-copies", "kv-server"}


@pytest.fixture(params=["cuda", "xpu"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(request.param)
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def shape(tokens: int) -> tuple[int, ...]:
    return LAYERS, 2, tokens, KV_HEADS, DIM


def moved(rig: Rig, module: StandIn) -> bool:
    """Export all tokens from one rank and import them into another one's blocks; whether they are the same."""
    device = OnHost(module, 1)
    device.enter()  # the engine's thread, as vLLM does
    copies = [
        DeviceCopies(device, HeapMemory(shape, torch.float32, SEGMENT), SEGMENT * LAYERS * 2 * KV_HEADS * DIM, 2)
        for _ in range(2)
    ]
    exporter, importer = (rig.endpoint(copies=each) for each in copies)
    kv = model_kv(TOKENS)
    exporter.stage("t", 0, TOKENS, TOKENS, lambda first, until, out: out.copy_(kv[:, :, first:until]))
    caches = [torch.zeros(6, KV_HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    layout, blocks = strided_layout(caches[0], DIM, BLOCK), torch.tensor([3, 1, 5, 2])
    slots = slots_of(blocks, BLOCK, 0, TOKENS)
    into = Blocks(caches, layout, slots, 0, 0, 0, copies[1], copies[1].freed(), False, None)
    importer.load(Load("r", rig.handle([exporter], TOKENS), 0, TOKENS, into, WAIT_S))
    result = rig.result()
    assert result.ok, result.error
    copies[1].join()
    got = torch.empty(shape(TOKENS))
    for cache, each in zip(caches, got, strict=True):
        layout.gather(cache, blocks, 0, TOKENS, each)
    return torch.equal(got, kv)


def test_every_kv_thread_works_on_the_device_of_its_rank_alone(tmp_path: Path, module: StandIn) -> None:
    rig = Rig(tmp_path)
    try:
        assert moved(rig, module)
    finally:
        rig.close()
    first = {name: (call.name, call.device) for name, call in module.first.items() if name in THREADS}
    assert first == dict.fromkeys(THREADS, ("set_device", 1))
    assert {"Event.synchronize", "stream left"} <= {call.name for call in module.calls if call.thread in THREADS}
    assert module.contexts == {1}


def test_a_thread_that_sets_no_device_makes_a_context_on_device_0(tmp_path: Path, module: StandIn) -> None:
    """The stand-in would notice."""
    rig, device = Rig(tmp_path), OnHost
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "enter", lambda _: None)
            assert moved(rig, module)
    finally:
        rig.close()
    assert 0 in module.contexts


def test_threads_that_wait_for_events_sleep_where_the_device_offers_it(module: StandIn) -> None:
    asked: list[dict[str, object]] = []
    make = module.Event
    module.Event = lambda **options: asked.append(options) or make(**options)  # type: ignore[func-returns-value, method-assign]
    device = OnHost(module, 0)
    at_start, _ = len(asked), asked.clear()
    device.event()
    assert at_start >= 1  # what a device lacks is known before the first transfer
    assert asked == [{"blocking": True} if module.kind == "cuda" else {}]
