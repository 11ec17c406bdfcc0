"""Copies between a cache and host memory, and blocks as the destination of an import."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import KvError, KvFault
from services.worker.kv.device import Blocks, Copies, DeviceCopies
from services.worker.kv.layout import slots_of, strided_layout
from services.worker.kv.staging import HeapMemory, PinnedMemory, Segment, parts_of
from shared.domain.kv import Codec
from tests.services.worker.kv.late_device import LateDevice

SEGMENT, WAIT_S = 4, 20.0


Result = list[Segment] | Exception


def shape(tokens: int) -> tuple[int, ...]:
    return 1, 2, tokens, 1, 2


class Run:
    """A model whose cache is [1, 2, tokens, 1, 2], and copies of it."""

    def __init__(self, device: LateDevice, scratch: int = 2, tokens: int = 16) -> None:
        self.device = device
        self.cache = torch.zeros(shape(tokens))
        self.copies = DeviceCopies(
            device, HeapMemory(shape, torch.float32, SEGMENT), torch.zeros(shape(SEGMENT)).numel(), scratch
        )
        self.results: queue.Queue[Result] = queue.Queue()
        self.deaths: list[str] = []
        self.copies.start(lambda thread, _: self.deaths.append(thread))

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
def running(device: LateDevice, scratch: int = 2) -> Iterator[Run]:
    run = Run(device, scratch)
    try:
        yield run
    finally:
        run.copies.close()


def exported(device: LateDevice, scratch: int) -> list[float]:
    """Of 14 tokens of which the model is just computing 1; their blocks are used for 2 at once."""
    with running(device, scratch) as run:
        run.model(1.0)
        run.copies.stage(0, 14, run.fill, run.results.put)
        run.model(2.0)
        return run.staged()


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_what_is_exported_is_what_the_model_had_computed_though_its_blocks_are_used_again(
    seed: int, scratch: int
) -> None:
    assert exported(LateDevice(seed), scratch) == [1.0] * 14


def test_without_the_order_other_values_are_exported() -> None:
    seen = {value for seed in range(50) for value in exported(LateDevice(seed, deaf=True), 1)}
    assert 2.0 in seen or 0.0 in seen


def test_the_engines_thread_waits_for_nothing() -> None:
    device = LateDevice()
    with running(device, 1) as run:
        for _ in range(3):
            run.model(1.0)
            run.copies.stage(0, 16, run.fill, run.results.put)
            with run.copies.writing(run.copies.freed()):
                run.model(2.0)
            run.copies.written()
            run.copies.join()
        for _ in range(3):
            run.result()
    assert device.waited
    assert threading.current_thread() not in device.waited


def test_chunks_come_in_the_order_in_which_they_were_staged() -> None:
    with running(LateDevice(3)) as run:
        for start in range(0, 16, 4):
            run.copies.stage(start, start + 4, run.fill, run.results.put)
        starts = [result[0].token_start for _ in range(4) if isinstance(result := run.result(), list)]
    assert starts == [0, 4, 8, 12]


def test_segments_follow_each_other() -> None:
    with running(LateDevice(3)) as run:
        run.copies.stage(3, 13, run.fill, run.results.put)
        result = run.result()
    assert isinstance(result, list)
    assert [(segment.token_start, segment.token_end) for segment in result] == [(3, 7), (7, 11), (11, 13)]


def imported(device: LateDevice, *, join: bool = True) -> list[float]:
    """A block that the model still reads is freed and imported into; what the model reads before and after."""
    seen: list[float] = []
    with running(device) as run:
        run.device.issue(lambda: seen.append(float(run.cache[0, 0, 3, 0, 0])))
        freed = run.copies.freed()
        with run.copies.writing(freed):
            run.model(2.0, 3, 4)
        run.copies.written()
        if join:
            run.copies.join()
        run.device.issue(lambda: seen.append(float(run.cache[0, 0, 3, 0, 0])))
        device.finish()
    return seen


@given(st.integers(0, 10_000))
def test_imports_come_after_what_the_block_was_for_and_before_what_it_is_for(seed: int) -> None:
    assert imported(LateDevice(seed)) == [0.0, 2.0]


def test_without_the_order_both_races_happen() -> None:
    assert (2.0, 2.0) in {tuple(imported(LateDevice(seed, deaf=True))) for seed in range(50)}
    assert (0.0, 0.0) in {tuple(imported(LateDevice(seed), join=False)) for seed in range(50)}


@given(st.integers(0, 10_000))
def test_an_import_into_blocks_whose_export_is_under_way_comes_after_their_gather(seed: int) -> None:
    device = LateDevice(seed)
    with running(device, 1) as run:
        run.model(1.0)
        run.copies.stage(0, 14, run.fill, run.results.put)
        with run.copies.writing(run.copies.freed()):
            run.model(2.0)
        run.copies.written()
        assert run.staged() == [1.0] * 14


@given(st.integers(0, 10_000))
def test_what_is_uploaded_for_an_import_is_there_when_it_is_written(seed: int) -> None:
    device = LateDevice(seed)
    with running(device) as run:
        with run.copies.writing(run.copies.freed()):
            there = run.copies.upload(torch.full((1, 2, 1, 1, 2), 7.0))
            device.issue(lambda: run.cache[:, :, 3:4].copy_(there))
        run.copies.written()
        run.copies.join()
        device.finish()
        assert run.cache[0, 0, 3].tolist() == [[7.0, 7.0]]


def test_a_failed_gather_is_raised_and_the_next_one_is_right() -> None:
    device = LateDevice()
    with running(device, 1) as run:

        def fill(first: int, until: int, kv: torch.Tensor) -> None:
            run.fill(first, until, kv)
            if first:
                raise RuntimeError("no such block")

        run.model(1.0)
        with pytest.raises(RuntimeError):
            run.copies.stage(0, 12, fill, run.results.put)
        run.copies.stage(0, 12, run.fill, run.results.put)
        assert run.staged() == [1.0] * 12
        assert run.results.empty()
        assert device.current() is LateDevice.current(device)


def test_who_waits_for_a_copy_that_the_device_lost_is_told() -> None:
    device = LateDevice()
    with running(device) as run:
        device.broken = RuntimeError("an illegal memory access")
        run.copies.stage(0, 4, run.fill, run.results.put)
        assert run.result() is device.broken
        device.broken = None
        run.copies.stage(0, 4, run.fill, run.results.put)
        assert isinstance(run.result(), list)
        assert run.deaths == []


def test_a_bug_in_the_waiting_thread_is_told() -> None:
    run = Run(LateDevice())

    def done(_: Result) -> None:
        raise ZeroDivisionError

    run.copies.stage(0, 4, run.fill, done)
    run.copies.close()
    assert run.deaths == ["copies"]


def test_pinned_memory_of_a_chunk_that_nobody_wants_is_kept_until_it_has_been_copied() -> None:
    memory = PinnedMemory(shape, torch.float32, SEGMENT, 8 * 16, lambda size: torch.zeros(size, dtype=torch.uint8))
    device, free = LateDevice(), memory.free_tokens
    copies = DeviceCopies(device, memory, 16, 2)
    told = threading.Event()
    copies.stage(0, 8, lambda *_: None, lambda _: told.set())
    assert memory.free_tokens == free - 8  # on its way, though no one has been given a reference
    copies.start(lambda *_: None)
    assert told.wait(WAIT_S)
    copies.close()
    assert memory.free_tokens == free


def test_no_pinned_memory_is_a_refusal_and_nothing_is_issued() -> None:
    memory = PinnedMemory(shape, torch.float32, SEGMENT, 16, lambda size: torch.zeros(size, dtype=torch.uint8))
    taken = memory.take(memory.free_tokens)
    run = Run(LateDevice())
    copies = DeviceCopies(run.device, memory, 16, 2)
    with pytest.raises(KvError) as raised:
        copies.stage(0, 4, lambda *_: pytest.fail("nothing is gathered"), run.results.put)
    assert raised.value.fault is KvFault.REFUSED
    assert taken
    run.copies.close()


def test_beside_a_cache_on_the_host_all_is_done_when_a_call_returns() -> None:
    copies, cache, results = Copies(HeapMemory(shape, torch.float32, SEGMENT)), torch.ones(shape(6)), list[Result]()
    copies.start(lambda *_: None)
    copies.stage(0, 6, lambda first, until, kv: kv.copy_(cache[:, :, first:until]), results.append)
    (staged,) = results
    assert isinstance(staged, list)
    assert [segment.kv.shape[2] for segment in staged] == [4, 2]
    assert all(bool((segment.kv == 1.0).all()) for segment in staged)
    with copies.writing(copies.freed()):
        assert copies.upload(cache) is cache
    copies.written()
    copies.join()
    copies.close()


def test_parts_follow_each_other() -> None:
    parts = parts_of(5, 9, HeapMemory(shape, torch.float32, 3), None)
    assert [(part.start, part.end, part.host.shape[2]) for part in parts] == [(5, 8, 3), (8, 9, 1)]


BLOCK, HEADS, DIM, TOKENS = 4, 2, 8, 10


class Decoder:
    """In the place of a device's codec."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, *_: Any) -> bool:
        self.decoded += 1
        return True


def destination(cache: torch.Tensor, numbers: list[int], decoder: Decoder | None = None) -> Blocks:
    layout = strided_layout(cache, DIM, BLOCK)
    copies = Copies(HeapMemory(lambda tokens: (1, 2, tokens, HEADS, DIM), cache.dtype, BLOCK))
    slots = slots_of(torch.tensor(numbers), BLOCK, 0, TOKENS)
    return Blocks([cache], layout, slots, 0, 0, 0, copies, None, False, cast(Any, decoder), null_slots=BLOCK)


@pytest.mark.parametrize(("numbers", "first"), [([3, 1, 2], 0), ([0, 1, 2], 4), ([0, 0, 2], 8), ([0, 0, 0], 10)])
def test_tokens_outside_of_a_window_are_not_written_to_the_null_block(numbers: list[int], first: int) -> None:
    cache, kv = torch.zeros(4, HEADS, BLOCK, 2 * DIM), torch.randn(2, TOKENS, HEADS, DIM)
    blocks = destination(cache, numbers)
    blocks.write(0, 0, 0, kv)
    assert not cache[0].any()
    out = torch.empty_like(kv)
    blocks.layout.gather(cache, torch.tensor(numbers), 0, TOKENS, out)
    assert torch.equal(out[:, first:], kv[:, first:])


@pytest.mark.parametrize(("numbers", "decoded"), [([3, 1, 2], 1), ([0, 1, 2], 0)])
def test_a_kernel_writes_payloads_of_which_all_tokens_have_blocks(numbers: list[int], decoded: int) -> None:
    cache, decoder = torch.zeros(4, HEADS, BLOCK, 2 * DIM), Decoder()
    payload = torch.zeros(1, dtype=torch.uint8)
    taken = destination(cache, numbers, decoder).take(
        (0, 1), (0, TOKENS), (0, HEADS), payload, torch.float32, Codec.RAW
    )
    assert (taken, decoder.decoded) == (bool(decoded), decoded)
