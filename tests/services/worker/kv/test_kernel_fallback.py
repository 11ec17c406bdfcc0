"""Without Triton's kernels, at the start or later, torch moves KV and the CPU codes it; one warning says why."""

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from services.worker.kv import KvError, KvFault, device_codec
from services.worker.kv.codec import encode
from services.worker.kv.device import Blocks, Copies
from services.worker.kv.device_codec import DeviceCodec
from services.worker.kv.layout import slots_of, strided_layout
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import HeapMemory
from services.worker.kv.vllm.connector import codec_on_device
from shared.domain.kv import Codec
from tests.services.worker.kv.rig import DIM, KV_HEADS, LAYERS, model_kv

BLOCK, TOKENS = 16, 70
SHAPE = RankShape(Shards((LAYERS,), KV_HEADS, 1), DIM, torch.float32)
FAULTS = {
    "compile error": CompilationError("x = y", None, "y is not defined"),  # type: ignore[arg-type]
    "shared memory": OutOfResources(300_000, 101_376, "shared memory"),
    "assembler": PTXASError("ptxas fatal: sm_121 is not defined"),
    "C compiler fails": subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    "no assembler": FileNotFoundError(2, "No such file or directory", "ptxas"),
    "no driver": RuntimeError("0 active drivers ([]). There should only be one."),
    "strides": ValueError("KV caches with unlike strides"),
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def raising(error: Exception) -> Callable[..., None]:
    def fails(*_: object, **__: object) -> None:
        raise error

    return fails


@pytest.mark.parametrize("fault", FAULTS)
def test_an_instance_starts_without_kernels(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DeviceCodec, "prepare", raising(FAULTS[fault]))
    caches = [torch.empty(4, KV_HEADS, BLOCK, 2 * DIM, device="meta") for _ in range(LAYERS)]
    layout = strided_layout(caches[0], DIM, BLOCK)
    assert codec_on_device(caches, layout, SHAPE, lambda tensor: tensor, lossy=True) is None
    assert len(warnings(caplog)) == 1
    assert "KV is moved without Triton kernels" in warnings(caplog)[0]
    assert str(FAULTS[fault]) in warnings(caplog)[0]


def test_an_instance_starts_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "services.worker.kv.device_codec", None)
    caches = [torch.empty(4, KV_HEADS, BLOCK, 2 * DIM, device="meta")]
    layout = strided_layout(caches[0], DIM, BLOCK)
    assert codec_on_device(caches, layout, SHAPE, lambda tensor: tensor, lossy=True) is None
    assert len(warnings(caplog)) == 1


def test_a_bug_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCodec, "prepare", raising(KeyError("layer")))
    caches = [torch.empty(4, KV_HEADS, BLOCK, 2 * DIM, device="meta")]
    with pytest.raises(KeyError):
        codec_on_device(caches, strided_layout(caches[0], DIM, BLOCK), SHAPE, lambda tensor: tensor, lossy=True)


class Rank:
    """A rank with a sequence in its caches, whose kernels have been compiled; later ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.caches = [torch.zeros(6, KV_HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
        self.layout = strided_layout(self.caches[0], DIM, BLOCK)
        self.codec = DeviceCodec(self.caches, self.layout, SHAPE, lambda tensor: tensor)
        self.slots = slots_of(torch.tensor([3, 1, 5, 2, 4]), BLOCK, 0, TOKENS)
        self.launches = 0

        def launched(*_: object) -> None:
            self.launches += 1
            raise error

        for name in ("gather_places", "decode_places", "encode_into"):
            monkeypatch.setattr(device_codec, name, launched)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch, FAULTS["shared memory"])


def test_a_payload_that_no_kernel_takes_is_left_to_the_cpu(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    copies = Copies(HeapMemory(SHAPE.chunk_shape, torch.float32, TOKENS))
    into = Blocks(rank.caches, rank.layout, rank.slots, 0, 0, 0, copies, None, False, rank.codec)
    payload = encode(model_kv(TOKENS), Codec.INT8)
    for _ in range(3):
        assert not into.take((0, LAYERS), (0, TOKENS), (0, KV_HEADS), payload, torch.float32, Codec.INT8)
    assert rank.launches == 1
    assert len(warnings(caplog)) == 1
    assert "out of resource: shared memory" in warnings(caplog)[0]


def test_an_export_goes_on_by_torch(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    out = torch.empty(SHAPE.chunk_shape(TOKENS))
    assert [rank.codec.gather(rank.slots, out) for _ in range(3)] == [False] * 3
    assert rank.launches == 1
    assert len(warnings(caplog)) == 1


def test_a_chunk_that_cannot_be_coded_fails_and_later_ones_are_not_coded_on_the_device(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    coding = rank.codec.coding(Codec.INT8, TOKENS, lambda start, end: rank.slots[start:end])
    assert coding is not None
    with pytest.raises(KvError) as raised:
        coding.code(0, TOKENS, torch.empty(coding.size(TOKENS), dtype=torch.uint8))
    assert raised.value.fault is KvFault.CODEC
    assert rank.codec.coding(Codec.INT8, TOKENS, lambda start, end: rank.slots[start:end]) is None
    assert len(warnings(caplog)) == 1
