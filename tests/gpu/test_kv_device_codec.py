"""KV between two endpoints whose caches lie on a device: coded there, sent as the CPU codec would have coded it, and
decoded there. On a GPU, or in Triton's interpreter, with a device of our own making as the exporter's: see
`test_kv_codec`.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.kv import shards
from services.worker.kv.codec import decode, encode
from services.worker.kv.device import Blocks, Copies, DeviceCopies, TorchDevice
from services.worker.kv.layout import StridedLayout, slots_of, strided_layout
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import HeapMemory, Piece, PinnedMemory
from services.worker.kv.wire import server
from services.worker.kv.wire.endpoint import KvEndpoint, rows_of
from services.worker.kv.wire.importing import Load, PullLimits
from shared.domain.kv import Codec
from tests.services.worker.kv.late_device import LateDevice
from tests.services.worker.kv.rig import DIM, KV_HEADS, LAYERS, Rig, model_kv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
LOSSY = (Codec.INT8, Codec.INT4, Codec.FP8)
BLOCK, TOKENS, CUT = 16, 70, 40
FRAME = 5_000  # bytes: segments of 32 or 19 tokens, and one, two or three layers in a frame
PATIENT = PullLimits(stall_s=200.0)  # the interpreter is slow


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FRAME_BYTES", FRAME)


@pytest.fixture(autouse=True)
def _one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter knows one thread."""
    if INTERPRETED:
        from triton.runtime import interpreter

        lock, run = threading.RLock(), interpreter.GridExecutor.__call__

        def alone(*given: Any, **more: Any) -> Any:
            with lock:
                return run(*given, **more)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", alone)


def export_shape(dtype: torch.dtype) -> RankShape:
    return RankShape(Shards((LAYERS,), KV_HEADS, 1), DIM, dtype)


class Instance:
    """One rank of a device: caches in which a sequence lies in blocks that do not follow each other. An attention
    backend may have divided them into so many `parts`.
    """

    def __init__(self, dtype: torch.dtype, heads: int = KV_HEADS, *, late: bool = False, parts: int = 1) -> None:
        from services.worker.kv.device_codec import DeviceCodec

        self.block = BLOCK * parts
        blocks = -(-TOKENS // self.block) + 2
        shape = (blocks * parts, heads, BLOCK, 2 * DIM)
        self.caches = [torch.full(shape, 9.0, dtype=dtype, device=DEVICE) for _ in range(LAYERS)]
        self.layout: StridedLayout = strided_layout(self.caches[0], DIM, self.block)
        self.blocks = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(heads))
        self.shape = RankShape(Shards((LAYERS,), KV_HEADS, KV_HEADS // heads), DIM, dtype)
        self.late = LateDevice(1) if late else None
        self.copies = self._copies()
        self.codec = DeviceCodec(self.caches, self.layout, self.shape, self.copies.upload if not late else lambda t: t)

    def _copies(self) -> Copies:
        rows, segment_bytes = rows_of([self.shape]), self.shape.chunk_bytes(self.shape.segment_tokens())
        if self.late is not None:
            return DeviceCopies(self.late, HeapMemory(rows), segment_bytes, 2)
        if INTERPRETED:
            return Copies(HeapMemory(rows))
        return DeviceCopies(TorchDevice(self.caches[0]), PinnedMemory(rows, 4 << 20), segment_bytes, 2)

    def slots(self, start: int, end: int) -> torch.Tensor:
        return slots_of(self.blocks, self.block, start, end)

    def compute(self, kv: torch.Tensor) -> None:
        """What a forward does: [layers, 2, tokens, heads, dim], from token 0 on."""
        for cache, each in zip(self.caches, kv, strict=True):
            self.layout.scatter(cache, self.slots(0, kv.shape[2]), 0, each)

    def issue(self, work: Any) -> None:
        """The device does it in its own time, a late one no sooner than it must."""
        if self.late is None:
            work()
        else:
            self.late.issue(work)

    def stage(self, endpoint: KvEndpoint, start: int, end: int, codec: Codec) -> None:
        def fill(first: int, until: int, kv: torch.Tensor) -> None:
            self.issue(lambda: self.codec.gather(self.slots(first, until), kv))

        coding = self.codec.coding(codec, end - start, self.slots) if codec.lossy else None
        issued = Issued(self, coding) if coding is not None else None
        endpoint.stage("t", (start, end), TOKENS, [Piece(start, end, fill, issued)])

    def destination(self) -> Blocks:
        copies = self.copies
        slots = self.slots(0, TOKENS)
        return Blocks(
            caches=self.caches,
            layout=self.layout,
            slots=[slots] * len(self.caches),
            token_start=0,
            layer_start=0,
            head_start=0,
            copies=copies,
            freed=copies.freed(),
            zero=False,
            codec=self.codec,
        )

    def kv(self) -> torch.Tensor:
        """What lies in the caches by now: [layers, 2, tokens, heads, dim], on the host."""
        if not INTERPRETED:
            torch.cuda.synchronize()
        blocks = self.blocks.to(DEVICE)
        kv = torch.empty(self.shape.chunk_shape(TOKENS), dtype=self.shape.dtype, device=DEVICE)
        for cache, each in zip(self.caches, kv, strict=True):
            self.layout.gather(cache, blocks, 0, TOKENS, each)
        return kv.cpu()


class Issued:
    """A coding whose work a device gets."""

    def __init__(self, instance: Instance, coding: Any) -> None:
        self.total_bytes = coding.total_bytes
        self.size, self.staged = coding.size, coding.staged
        self._instance, self._coding = instance, coding

    def code(self, start: int, end: int, out: torch.Tensor) -> None:
        self._instance.issue(lambda: self._coding.code(start, end, out))


def as_the_cpu_does(kv: torch.Tensor, codec: Codec, heads: slice = slice(None)) -> torch.Tensor:
    """KV of these heads after a transfer whose frames are coded and decoded on CPUs."""
    shape, out = export_shape(kv.dtype), torch.empty_like(kv[..., heads, :])
    segment = shape.segment_tokens()
    for start in range(0, kv.shape[2], segment):
        tokens = slice(start, min(start + segment, kv.shape[2]))
        part = kv[:, :, tokens, heads]
        each = shape.layers_a_frame(part.shape[2], part.shape[3], codec)
        for first in range(0, LAYERS, each):
            layers = slice(first, first + each)
            payload = encode(part[layers], codec)
            out[layers, :, tokens] = decode(payload, tuple(part[layers].shape), kv.dtype, codec, kv.dtype)
    return out


def not_here(*_: Any, **__: Any) -> Any:
    raise AssertionError("on the CPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", [Codec.RAW, *LOSSY])
def test_kv_is_coded_and_decoded_where_it_lies(
    rig: Rig, codec: Codec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, source, target = model_kv(TOKENS, dtype), Instance(dtype, late=INTERPRETED), Instance(dtype)
    source.codec.prepare(lossy=codec is Codec.INT8)
    exporter = rig.endpoint(dtype=dtype, copies=source.copies)
    importer = rig.endpoint(dtype=dtype, copies=target.copies, limits=PATIENT)
    monkeypatch.setattr(Blocks, "write", not_here)
    if codec.lossy:
        monkeypatch.setattr(server, "encode", not_here)
    source.issue(lambda: source.compute(kv[:, :, :CUT]))
    source.stage(exporter, 0, CUT, codec)
    source.issue(lambda: source.compute(kv))
    source.stage(exporter, CUT, TOKENS, codec)
    source.issue(lambda: source.compute(torch.zeros_like(kv)))  # the blocks are used again at once
    name = str(dtype).removeprefix("torch.")
    load(rig, importer, target, rig.handle([exporter], TOKENS, dtype=name, codec=codec))
    result = rig.results.get(timeout=200)
    assert result.ok, result.error
    target.copies.join()
    assert torch.equal(target.kv(), expected_of_chunks(kv, codec))
    raw = export_shape(dtype).chunk_bytes(TOKENS)
    assert result.wire_bytes == raw if codec is Codec.RAW else result.wire_bytes < raw


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT8])
def test_blocks_that_a_backend_divides_are_moved_by_kernels(
    rig: Rig, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32
    kv, source, target = model_kv(TOKENS, dtype), Instance(dtype, parts=2), Instance(dtype, parts=4)
    exporter = rig.endpoint(copies=source.copies)
    importer = rig.endpoint(copies=target.copies, limits=PATIENT)
    monkeypatch.setattr(Blocks, "write", not_here)
    source.compute(kv)
    source.stage(exporter, 0, CUT, codec)
    source.stage(exporter, CUT, TOKENS, codec)
    load(rig, importer, target, rig.handle([exporter], TOKENS, codec=codec))
    result = rig.results.get(timeout=200)
    assert result.ok, result.error
    target.copies.join()
    assert torch.equal(target.kv(), expected_of_chunks(kv, codec))


def expected_of_chunks(kv: torch.Tensor, codec: Codec) -> torch.Tensor:
    if codec is Codec.RAW:
        return kv
    return torch.cat([as_the_cpu_does(kv[:, :, :CUT], codec), as_the_cpu_does(kv[:, :, CUT:], codec)], dim=2)


def load(rig: Rig, importer: KvEndpoint, target: Instance, handle: Any) -> None:
    importer.load(Load("r", handle, 0, TOKENS, (target.destination(),), 200.0))


@pytest.mark.parametrize("codec", LOSSY)
def test_what_another_division_of_heads_wants_is_coded_again(rig: Rig, codec: Codec) -> None:
    dtype = torch.float32
    kv, source = model_kv(TOKENS, dtype), Instance(dtype)
    exporter = rig.endpoint(dtype=dtype, copies=source.copies)
    importers = [rig.endpoint(rank, 2, dtype=dtype, limits=PATIENT) for rank in range(2)]
    source.compute(kv)
    source.stage(exporter, 0, TOKENS, codec)
    once = as_the_cpu_does(kv, codec)
    for rank, importer in enumerate(importers):
        heads = slice(2 * rank, 2 * rank + 2)
        capture = rig.load(importer, rig.handle([exporter], TOKENS, codec=codec))
        result = rig.results.get(timeout=200)
        assert result.ok, result.error
        got = capture.kv[..., heads, :]
        assert torch.equal(got, as_the_cpu_does(once, codec, heads))
        least = (kv[..., heads, :] - as_the_cpu_does(kv, codec, heads)).abs().max()
        assert (kv[..., heads, :] - got).abs().max() < 2.5 * least


def test_staged_kv_takes_the_room_of_its_payloads(rig: Rig) -> None:
    source = Instance(torch.float32)
    exporter = rig.endpoint(copies=source.copies)
    source.compute(model_kv(TOKENS))
    source.stage(exporter, 0, TOKENS, Codec.INT4)
    raw = export_shape(torch.float32).chunk_bytes(TOKENS)
    assert 0.1 * raw < exporter.stats().staged_bytes < 0.5 * raw


def test_tokens_that_coding_would_make_larger_stay_as_they_are() -> None:
    source = Instance(torch.bfloat16)
    assert source.codec.coding(Codec.INT8, 1, source.slots) is None
    assert source.codec.coding(Codec.INT8, 64, source.slots) is not None


def test_coded_kv_is_not_given_to_whom_wants_it_exact(rig: Rig) -> None:
    source = Instance(torch.float32)
    exporter, importer = rig.endpoint(copies=source.copies), rig.endpoint(limits=PATIENT)
    source.compute(model_kv(TOKENS))
    source.stage(exporter, 0, TOKENS, Codec.INT8)
    rig.load(importer, rig.handle([exporter], TOKENS))
    assert rig.results.get(timeout=200).error.startswith("codec")


def test_values_that_are_not_finite_fail_the_transfer(rig: Rig) -> None:
    source = Instance(torch.float32)
    exporter, importer = rig.endpoint(copies=source.copies), rig.endpoint(limits=PATIENT)
    kv = model_kv(TOKENS)
    kv[1, 0, 60, 2, 3] = float("inf")
    source.compute(kv)
    source.stage(exporter, 0, TOKENS, Codec.INT8)
    rig.load(importer, rig.handle([exporter], TOKENS, codec=Codec.INT8))
    assert rig.results.get(timeout=200).error.startswith("codec")
