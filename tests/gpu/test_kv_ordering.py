"""KV imports and exports beside a model that runs on another stream of a real device. torch alone is needed.

Each race is shown first without the order, by a stream that is held up on purpose, and then that the order ends it.
"""

import pytest
import torch

from services.worker.kv.layout import StridedLayout, slots_of, strided_layout
from services.worker.kv.ordering import DeviceOrder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS, HEADS, BLOCK, DIM = 8, 2, 16, 32
HELD_UP = 400_000_000  # cycles: a fifth of a second or more, far longer than all that is issued meanwhile
OLD, NEW = 1.0, 2.0


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.full((BLOCKS, HEADS, BLOCK, 2 * DIM), OLD, device="cuda")


@pytest.fixture
def layout(cache: torch.Tensor) -> StridedLayout:
    return strided_layout(cache, DIM, BLOCK)


@pytest.fixture
def model() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@pytest.fixture
def incoming() -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and KV of block 3, on the device already: a copy from the host would wait by itself."""
    slots = slots_of(torch.tensor([3]), BLOCK, 0, BLOCK).cuda()
    return slots, torch.full((2, BLOCK, HEADS, DIM), NEW, device="cuda")


@pytest.fixture(autouse=True)
def warm(cache: torch.Tensor, layout: StridedLayout, incoming: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Kernels are loaded on first use, which would hold up both streams."""
    slots, kv = incoming
    layout.scatter(cache.clone(), slots, 0, kv)
    cache[3].clone()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("ordered", [False, True])
def test_the_model_reads_what_was_imported(
    cache: torch.Tensor,
    layout: StridedLayout,
    incoming: tuple[torch.Tensor, torch.Tensor],
    model: torch.cuda.Stream,
    ordered: bool,
) -> None:
    slots, kv = incoming
    with torch.cuda.stream(model):
        order = DeviceOrder(torch.get_device_module(cache.device))
        freed = order.freed()
    with order.writing(freed):
        torch.cuda._sleep(HELD_UP)
        layout.scatter(cache, slots, 0, kv)
    if ordered:
        order.written()
    with torch.cuda.stream(model):
        seen = cache[3].clone()
    torch.cuda.synchronize()
    assert bool((seen == NEW).all()) is ordered


@pytest.mark.parametrize("ordered", [False, True])
def test_an_import_leaves_a_block_alone_while_the_model_still_reads_it(
    cache: torch.Tensor,
    layout: StridedLayout,
    incoming: tuple[torch.Tensor, torch.Tensor],
    model: torch.cuda.Stream,
    ordered: bool,
) -> None:
    slots, kv = incoming
    order = DeviceOrder(torch.get_device_module(cache.device))
    nothing = torch.cuda.Event()
    nothing.record(torch.cuda.Stream())
    with torch.cuda.stream(model):
        torch.cuda._sleep(HELD_UP)
        seen = cache[3].clone()
        freed = order.freed() if ordered else nothing
    with order.writing(freed):
        layout.scatter(cache, slots, 0, kv)
    torch.cuda.synchronize()
    assert bool((seen == OLD).all()) is ordered
    assert bool((cache[3].clone() == NEW).all())


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_exported_is_on_the_host_before_its_block_is_used_again(
    cache: torch.Tensor, model: torch.cuda.Stream, ordered: bool
) -> None:
    """Into pinned memory, where a copy does not wait for the device by itself."""
    order = DeviceOrder(torch.get_device_module(cache.device))
    host = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, pin_memory=True)
    with torch.cuda.stream(model):
        torch.cuda._sleep(HELD_UP)
        cache.fill_(NEW)  # the forward
        host.copy_(cache, non_blocking=True)
        if ordered:
            order.copied()
    assert bool((host == NEW).all()) is ordered
    torch.cuda.synchronize()


def test_a_gather_follows_the_forward_of_its_stream(
    cache: torch.Tensor, layout: StridedLayout, model: torch.cuda.Stream
) -> None:
    order, out = DeviceOrder(torch.get_device_module(cache.device)), torch.zeros(2, BLOCK, HEADS, DIM)
    with torch.cuda.stream(model):
        torch.cuda._sleep(HELD_UP)
        cache.fill_(NEW)
        layout.gather(cache, torch.tensor([3]), 0, BLOCK, out)
        order.copied()
        cache.fill_(OLD)
    assert bool((out == NEW).all())
