"""Copies between a cache and host memory: their order and threads; blocks as the destination of an import."""

import inspect
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import KvError, KvFault
from services.worker.kv.device import Blocks, Copies, DeviceCopies, TorchDevice
from services.worker.kv.layout import slots_of, strided_layout
from services.worker.kv.staging import HeapMemory, Piece, PinnedMemory, Rows, Segment
from services.worker.kv.wire.importing import Load, dtype_name, write_frame
from services.worker.kv.wire.protocol import Frame
from shared.domain.kv import Codec
from tests.gpu.rates import LOSSY, measure, show
from tests.services.worker.kv.late_device import LateDevice

SEGMENT, WAIT_S = 4, 20.0
SEEDS = st.integers(0, 10_000)
Result = list[Segment] | Exception


def shape(tokens: int) -> tuple[int, ...]:
    return 1, 2, tokens, 1, 2


ROWS = [Rows(shape, torch.float32, SEGMENT)]


def pinned(limit_bytes: int) -> PinnedMemory:
    return PinnedMemory(ROWS, limit_bytes, lambda size: torch.zeros(size, dtype=torch.uint8))


class Run:
    """A model whose cache is [1, 2, 16, 1, 2], and copies of it."""

    def __init__(self, device: LateDevice, scratch: int = 2, memory: HeapMemory | None = None) -> None:
        self.device = device
        self.cache = torch.zeros(shape(16))
        memory = memory or HeapMemory(ROWS)
        self.copies = DeviceCopies(cast(Any, device), memory, 16 * SEGMENT, scratch)
        self.results: queue.Queue[Result] = queue.Queue()
        self.deaths: list[str] = []

    def fill(self, first: int, until: int, kv: torch.Tensor) -> None:
        self.device.issue(lambda: kv.copy_(self.cache[:, :, first:until]))

    def model(self, value: float, start: int = 0, end: int = 16) -> None:
        self.device.issue(lambda: self.cache[:, :, start:end].fill_(value))

    def result(self) -> Result:
        return self.results.get(timeout=WAIT_S)

    def staged(self) -> list[float]:
        """Values of each token of a chunk that has come; one is made of equal values."""
        result = self.result()
        assert isinstance(result, list)
        kv = torch.cat([segment.kv for segment in result], dim=2)
        return [float(token.mean()) for token in kv[0, 0]]


@contextmanager
def running(device: LateDevice, scratch: int = 2, memory: HeapMemory | None = None) -> Iterator[Run]:
    run = Run(device, scratch, memory)
    run.copies.start(lambda thread, _: run.deaths.append(thread))
    try:
        yield run
    finally:
        run.copies.close()


def exported(device: LateDevice, scratch: int, *, imports: bool = False) -> list[float]:
    """Of 14 tokens of which the model is just computing 1; their blocks are used for 2 at once, by the model or an
    import.
    """
    with running(device, scratch) as run:
        run.model(1.0)
        run.copies.stage([Piece(0, 14, run.fill)], run.results.put)
        if imports:
            with run.copies.writing(run.copies.freed()):
                run.model(2.0)
            run.copies.written()
        else:
            run.model(2.0)
        return run.staged()


@given(SEEDS, st.integers(1, 5), st.booleans())
def test_an_export_is_what_the_model_had_computed_though_its_blocks_are_used_again(
    seed: int, scratch: int, imports: bool
) -> None:
    assert exported(LateDevice(seed), scratch, imports=imports) == [1.0] * 14


def test_without_the_order_other_values_are_exported() -> None:
    seen = {value for seed in range(50) for value in exported(LateDevice(seed, deaf=True), 1)}
    assert 2.0 in seen or 0.0 in seen


def test_the_engines_thread_does_not_wait() -> None:
    device = LateDevice()
    with running(device, 1) as run:
        for _ in range(3):
            run.model(1.0)
            run.copies.stage([Piece(0, 16, run.fill)], run.results.put)
            with run.copies.writing(run.copies.freed()):
                run.model(2.0)
            run.copies.written()
            run.copies.join()
        for _ in range(3):
            run.result()
    assert device.waited
    assert threading.current_thread() not in device.waited


def imported(device: LateDevice, *, join: bool = True) -> list[float]:
    """A block that the model still reads is freed and imported into; what the model reads before and after."""
    seen: list[float] = []
    with running(device) as run:
        device.issue(lambda: seen.append(float(run.cache[0, 0, 3, 0, 0])))
        with run.copies.writing(run.copies.freed()):
            there = run.copies.upload(torch.full(shape(1), 2.0))
            device.issue(lambda: run.cache[:, :, 3:4].copy_(there))
        run.copies.written()
        if join:
            run.copies.join()
        device.issue(lambda: seen.append(float(run.cache[0, 0, 3, 0, 0])))
        device.finish()
    return seen


@given(SEEDS)
def test_imports_come_after_the_earlier_use_of_a_block_and_before_its_next_use(seed: int) -> None:
    assert imported(LateDevice(seed)) == [0.0, 2.0]


def test_without_the_order_both_races_happen() -> None:
    assert any(imported(LateDevice(seed, deaf=True))[0] for seed in range(200))
    assert (0.0, 0.0) in {tuple(imported(LateDevice(seed), join=False)) for seed in range(50)}


def test_a_failed_gather_is_raised_and_the_next_one_is_right() -> None:
    device = LateDevice()
    with running(device, 1) as run:

        def fill(first: int, until: int, kv: torch.Tensor) -> None:
            run.fill(first, until, kv)
            if first:
                raise RuntimeError("no such block")

        run.model(1.0)
        with pytest.raises(RuntimeError):
            run.copies.stage([Piece(0, 12, fill)], run.results.put)
        run.copies.stage([Piece(0, 12, run.fill)], run.results.put)
        assert run.staged() == [1.0] * 12
        assert run.results.empty()


def test_a_copy_that_the_device_lost_fails_alone_and_a_bug_ends_the_thread() -> None:
    device = LateDevice()
    with running(device) as run:
        device.broken = RuntimeError("an illegal memory access")
        run.copies.stage([Piece(0, 4, run.fill)], run.results.put)
        assert run.result() is device.broken
        device.broken = None
        run.copies.stage([Piece(0, 4, run.fill)], run.results.put)
        assert isinstance(run.result(), list)
        assert run.deaths == []
        run.copies.stage([Piece(0, 4, run.fill)], lambda _: {}["a bug"])
    assert run.deaths == ["copies"]


def test_pinned_memory_of_a_chunk_is_kept_until_it_has_been_copied_and_without_any_nothing_is_issued() -> None:
    memory = pinned(8 * 16)
    run, free, copied = Run(LateDevice(), 2, memory), memory.free_places, threading.Event()
    run.copies.stage([Piece(0, 8, lambda *_: None)], lambda _: copied.set())
    assert memory.free_places == free - 8  # nothing else refers to it yet
    taken = memory.take(Piece(0, memory.free_places, lambda *_: None))
    with pytest.raises(KvError) as raised:
        run.copies.stage([Piece(0, 4, lambda *_: pytest.fail("nothing is gathered"))], run.results.put)
    assert raised.value.fault is KvFault.REFUSED
    run.copies.start(lambda *_: None)
    assert copied.wait(WAIT_S)
    run.copies.close()
    del taken
    assert memory.free_places == free


def test_beside_a_cache_on_the_host_all_is_done_when_a_call_returns() -> None:
    copies, cache, results = Copies(HeapMemory(ROWS)), torch.ones(shape(6)), list[Result]()
    copies.stage([Piece(0, 6, lambda first, until, kv: kv.copy_(cache[:, :, first:until]))], results.append)
    (staged,) = results
    assert isinstance(staged, list)
    assert [segment.kv.shape[2] for segment in staged] == [4, 2]
    assert all(bool((segment.kv == 1.0).all()) for segment in staged)


class Module:
    """What `torch.cuda` or `torch.xpu` takes; its streams and events do nothing."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.events: list[dict[str, object]] = []
        self.devices: list[torch.device] = []
        self.set_device = self.devices.append

    def Event(self, **options: object) -> object:
        """TypeError for what the real one does not take."""
        self.events.append(options)
        real = torch.cuda.Event if self.kind == "cuda" else torch.xpu.Event
        inspect.signature(real.__new__).bind(real, **options)
        return object()


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_thread_is_on_the_device_of_its_rank_and_sleeps_where_events_offer_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Module(kind)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    device = TorchDevice(cast(Any, SimpleNamespace(device=torch.device(kind, 1), dtype=torch.float32)))
    assert module.events  # what a device lacks is known before the first transfer
    module.events.clear()
    device.event()
    assert module.events == [{"blocking": True} if kind == "cuda" else {}]
    device.enter()
    assert module.devices == [torch.device(kind, 1)]


BLOCK, HEADS, DIM, TOKENS = 4, 2, 8, 10


class Decoder:
    """In the place of a device's codec."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, *_: Any) -> bool:
        self.decoded += 1
        return True


@pytest.mark.parametrize(("numbers", "first"), [([3, 1, 2], 0), ([0, 1, 2], 4), ([0, 0, 2], 8), ([0, 0, 0], 10)])
def test_tokens_outside_of_a_window_are_not_written_to_the_null_block(numbers: list[int], first: int) -> None:
    cache, kv = torch.zeros(4, HEADS, BLOCK, 2 * DIM), torch.randn(2, TOKENS, HEADS, DIM)
    layout, decoder = strided_layout(cache, DIM, BLOCK), Decoder()
    copies = Copies(HeapMemory([Rows(lambda tokens: (1, 2, tokens, HEADS, DIM), cache.dtype, BLOCK)]))
    slots = slots_of(torch.tensor(numbers), BLOCK, 0, TOKENS)
    blocks = Blocks(
        caches=[cache],
        layout=layout,
        slots=[slots],
        token_start=0,
        layer_start=0,
        head_start=0,
        copies=copies,
        freed=None,
        zero=False,
        codec=cast(Any, decoder),
        null_slots=BLOCK,
    )
    blocks.write(0, 0, 0, kv)
    assert not cache[0].any()
    out = torch.empty_like(kv)
    layout.gather(cache, torch.tensor(numbers), 0, TOKENS, out)
    assert torch.equal(out[:, first:], kv[:, first:])
    payload = torch.zeros(1, dtype=torch.uint8)
    by_kernel = blocks.take((0, 1), (0, TOKENS), (0, HEADS), payload, torch.float32, Codec.RAW)
    assert (by_kernel, decoder.decoded) == (first == 0, first == 0)  # only where all tokens have blocks


def test_what_make_gpu_check_measures_runs_on_a_cpu_and_arrives() -> None:
    rates = measure("cpu", 96, rounds=1)
    ways = {"plain copy to the host", "plain copy to the device", "export", "import", "end to end"}
    assert set(rates) == ways | {f"end to end {codec.value}" for codec in LOSSY}
    assert all(rate > 0 for rate in rates.values())
    assert len(show(rates).splitlines()) == len(rates)


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


def frame_of(kv: torch.Tensor, scales: tuple[float, ...] = ()) -> Frame:
    """Of one layer's [2, tokens, heads, dim]."""
    _, tokens, heads, dim = kv.shape
    names = ("layer_start", "layer_end", "layers", "token_start", "token_end", "head_start", "head_end", "head_dim")
    where = dict(zip(names, (0, 1, 1, 0, tokens, 0, heads, dim), strict=True))
    rest: dict[str, Any] = {"rank": 0, "ranks": 1, "checksum": 0, "scales": scales, "dtype": dtype_name(kv.dtype)}
    return Frame(pull_id=1, sequence=0, transfer_id="t", generation=1, codec=Codec.RAW, **where, **rest)


def stored_of(kv: torch.Tensor, eight_bit: torch.dtype, theirs: tuple[float, ...], ours: tuple[float, ...]) -> Any:
    """What lies in a device's cache of bytes, [2, tokens, heads, dim], once a frame with that KV is written to it."""
    cache = torch.zeros(4, HEADS, BLOCK, 2 * DIM, dtype=torch.uint8)
    layout, numbers = strided_layout(cache, DIM, BLOCK), torch.tensor([3, 1, 2])
    blocks = Blocks(
        caches=[cache],
        layout=layout,
        slots=[slots_of(numbers, BLOCK, 0, TOKENS)],
        token_start=0,
        layer_start=0,
        head_start=0,
        copies=Copies(HeapMemory([Rows(lambda tokens: (1, 2, tokens, HEADS, DIM), cache.dtype, BLOCK)])),
        freed=None,
        zero=False,
        codec=None,
        eight_bit=eight_bit,
        kv_scales=(ours,),
    )
    load = Load("r", cast(Any, None), 0, TOKENS, (blocks,), WAIT_S)
    write_frame(frame_of(kv, theirs), kv.contiguous().view(torch.uint8).flatten().numpy().data, load)
    out = torch.empty(2, TOKENS, HEADS, DIM, dtype=torch.uint8)
    layout.gather(cache, numbers, 0, TOKENS, out)
    return out.view(eight_bit)


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eight_bit", EIGHT_BITS)
def test_more_bits_are_divided_by_the_scales_rounded_once_and_never_infinite(
    wide: torch.dtype, eight_bit: torch.dtype
) -> None:
    scales, top = (0.3, 0.0007), torch.finfo(eight_bit).max
    kv = torch.randn(2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(wide)
    kv[1, 0] = 60_000.0  # more than the type has at this scale
    expected = kv.float() / torch.tensor(scales).view(2, 1, 1, 1)
    stored = stored_of(kv, eight_bit, (), scales).float()
    assert torch.equal(stored, expected.clamp(-top, top).to(eight_bit).float())
    assert (stored[1, 0] == top).all()


@pytest.mark.parametrize("eight_bit", EIGHT_BITS)
@pytest.mark.parametrize("theirs", EIGHT_BITS)
def test_eight_bits_of_another_type_or_with_other_scales_keep_their_values(
    theirs: torch.dtype, eight_bit: torch.dtype
) -> None:
    kv = torch.randn(2, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(theirs)
    equal = stored_of(kv, eight_bit, (0.3, 0.2), (0.3, 0.2))
    if theirs is eight_bit:
        assert torch.equal(equal.view(torch.uint8), kv.view(torch.uint8))
    assert torch.equal(equal.float(), kv.float().to(eight_bit).float())
    doubled = stored_of(kv, eight_bit, (0.5, 0.25), (0.25, 0.5)).float()
    factors = torch.tensor((2.0, 0.5)).view(2, 1, 1, 1)
    assert torch.equal(doubled, (kv.float() * factors).to(eight_bit).float())
