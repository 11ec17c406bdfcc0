"""KV imports and exports beside a model that runs on another stream of a real device. torch alone is needed.

Each race is shown first without the order, by a stream that is held up on purpose, and then that the order ends it.
"""

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from services.worker.kv.device import DeviceCopies, TorchDevice
from services.worker.kv.layout import StridedLayout, slots_of, strided_layout
from services.worker.kv.staging import Piece, PinnedMemory, Rows, Segment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS, HEADS, BLOCK, DIM = 8, 2, 16, 32
HELD_UP = 400_000_000  # cycles: a fifth of a second or more, far longer than all that is issued meanwhile
OLD, NEW = 1.0, 2.0
WAIT_S = 30.0


def shape(tokens: int) -> tuple[int, ...]:
    return 1, 2, tokens, HEADS, DIM


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
def copies(cache: torch.Tensor) -> Iterator[DeviceCopies]:
    memory = PinnedMemory([Rows(shape, cache.dtype, BLOCK)], 1 << 20)
    made = DeviceCopies(TorchDevice(cache), memory, 2 * BLOCK * HEADS * DIM * cache.dtype.itemsize, 2)
    made.start(lambda *_: None)
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.fixture
def incoming() -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and KV of block 3, on the device already: a copy from the host would wait by itself."""
    slots = slots_of(torch.tensor([3]), BLOCK, 0, BLOCK).cuda()
    return slots, torch.full((2, BLOCK, HEADS, DIM), NEW, device="cuda")


@pytest.fixture(autouse=True)
def warm(
    cache: torch.Tensor, layout: StridedLayout, incoming: tuple[torch.Tensor, torch.Tensor], copies: DeviceCopies
) -> None:
    """Kernels are loaded on first use, which would hold up both streams."""
    slots, kv = incoming
    layout.scatter(cache.clone(), slots, 0, kv)
    cache[3].clone()
    export(copies, cache.clone(), layout).get(timeout=WAIT_S)
    copies.upload(torch.zeros(4))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def export(
    copies: DeviceCopies, cache: torch.Tensor, layout: StridedLayout
) -> "queue.Queue[list[Segment] | Exception]":
    """All blocks, in four segments and two buffers of scratch memory."""
    results: queue.Queue[list[Segment] | Exception] = queue.Queue()

    def fill(start: int, end: int, kv: torch.Tensor) -> None:
        layout.gather(cache, copies.upload(torch.arange(BLOCKS)), start, end, kv[0])

    copies.stage([Piece(0, 4 * BLOCK, fill)], results.put)
    return results


@pytest.mark.parametrize("ordered", [False, True])
def test_the_model_reads_what_was_imported(
    cache: torch.Tensor,
    layout: StridedLayout,
    incoming: tuple[torch.Tensor, torch.Tensor],
    model: torch.cuda.Stream,
    copies: DeviceCopies,
    ordered: bool,
) -> None:
    slots, kv = incoming
    with torch.cuda.stream(model):
        freed = copies.freed()
    with copies.writing(freed):
        torch.cuda._sleep(HELD_UP)
        layout.scatter(cache, slots, 0, kv)
    copies.written()
    with torch.cuda.stream(model):
        if ordered:
            copies.join()
        seen = cache[3].clone()
    torch.cuda.synchronize()
    assert bool((seen == NEW).all()) is ordered


@pytest.mark.parametrize("ordered", [False, True])
def test_an_import_leaves_a_block_alone_while_the_model_still_reads_it(
    cache: torch.Tensor,
    layout: StridedLayout,
    incoming: tuple[torch.Tensor, torch.Tensor],
    model: torch.cuda.Stream,
    copies: DeviceCopies,
    ordered: bool,
) -> None:
    slots, kv = incoming
    nothing = torch.cuda.Event()
    nothing.record(torch.cuda.Stream())
    with torch.cuda.stream(model):
        torch.cuda._sleep(HELD_UP)
        seen = cache[3].clone()
        freed = copies.freed() if ordered else nothing
    with copies.writing(freed):
        layout.scatter(cache, slots, 0, kv)
    torch.cuda.synchronize()
    assert bool((seen == OLD).all()) is ordered
    assert bool((cache[3].clone() == NEW).all())


def test_what_is_exported_is_what_was_computed_and_nobody_waits_on_the_engines_thread(
    cache: torch.Tensor, layout: StridedLayout, model: torch.cuda.Stream, copies: DeviceCopies
) -> None:
    with torch.cuda.stream(model):
        torch.cuda._sleep(HELD_UP)
        cache.fill_(NEW)  # the forward
        began = time.perf_counter()
        results = export(copies, cache, layout)
        issued_s = time.perf_counter() - began
        cache.fill_(OLD)  # the blocks are used again
    assert results.empty()
    result = results.get(timeout=WAIT_S)
    assert isinstance(result, list)
    assert all(bool((segment.kv == NEW).all()) for segment in result)
    print(f"\nissued in {issued_s * 1e3:.2f} ms while the device was held up")
    assert issued_s < 0.1


def test_under_load_every_chunk_is_of_its_own_step(
    cache: torch.Tensor, layout: StridedLayout, model: torch.cuda.Stream, copies: DeviceCopies
) -> None:
    """Steps write their number everywhere, export it and are overtaken by the next; imports write beside them."""
    steps, other, stop = 300, torch.zeros_like(cache), threading.Event()
    slots, incoming = (
        slots_of(torch.arange(BLOCKS), BLOCK, 0, BLOCKS * BLOCK),
        torch.ones(2, BLOCKS * BLOCK, HEADS, DIM),
    )

    def load() -> None:
        while not stop.is_set():
            with copies.writing(copies.freed()):
                layout.scatter(other, copies.upload(slots), 0, copies.upload(incoming))
            copies.written()

    puller = threading.Thread(target=load)
    puller.start()
    results = []
    try:
        with torch.cuda.stream(model):
            for step in range(steps):
                copies.join()
                cache.fill_(float(step))
                results.append(export(copies, cache, layout))
                if step % 8 == 7:  # pinned memory is bounded
                    for number, result in zip(range(step - 7, step + 1), results, strict=True):
                        check(result.get(timeout=WAIT_S), number)
                    results.clear()
    finally:
        stop.set()
        puller.join()
    torch.cuda.synchronize()
    assert bool((other == 1.0).all())
    print(f"\n{steps} steps, each overtaken by the next")


def check(result: list[Segment] | Exception, number: int) -> None:
    assert isinstance(result, list)
    for segment in result:
        assert bool((segment.kv == float(number)).all()), f"step {number} was overtaken"
