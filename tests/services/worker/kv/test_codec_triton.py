"""The Triton codecs without a GPU: Triton's interpreter gives the CPU codec's bits, kernels compile into instructions
that round as the CPU does, and where they do not work torch moves KV and the CPU codes it.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from services.worker.kv import KvError, KvFault, device_codec
from services.worker.kv.codec import encode
from services.worker.kv.device import Blocks, Copies
from services.worker.kv.device_codec import DeviceCodec
from services.worker.kv.layout import slots_of, strided_layout
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import HeapMemory, Rows
from services.worker.kv.vllm.connector import codec_on_device
from shared.domain.kv import Codec
from tests.services.worker.kv.rig import DIM, KV_HEADS, LAYERS, model_kv

PROJECT = Path(__file__).parents[4]
KERNELS = ("head_tops", "units", "grids", "encode_section", "decode_section", "scales_fp8", "encode_fp8", "decode_fp8",
           "move_raw")  # fmt: skip
CONSTANTS = {"DIM": 128, "TOKENS": 32, "HEADS": 8, "CHANNELS": 64, "TILE": 1024, "INTO_CACHES": True}
TYPES = {"pointers": "*i64", "slots": "*i64", "payload": "*u8", "tops": "*i32"}


@pytest.mark.parametrize(("file", "tests"), [("test_kv_codec", 55), ("test_kv_device_codec", 17)])
def test_tritons_interpreter_gives_the_bits_of_the_cpu_codec(file: str, tests: int) -> None:
    """In a process of its own: whether kernels are interpreted is settled when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/{file}.py"]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= tests


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_a_gpu_and_round_as_the_cpu_does(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for side, bits in ((0, 4), (1, 8)):
        code = compiled(name, dtype, {**CONSTANTS, "side": side, "bits": bits})
        floats = re.findall(r"\b(?:fma|div|mul|add|sub|sqrt|cvt)\.[\w.]*f\d\d[\w.]*", code)
        narrowing = [each for each in floats if not each.startswith("cvt.f32.")]
        assert all(".rn." in each and not each.startswith("fma") and ".ftz" not in each for each in narrowing), floats


def compiled(name: str, dtype: str, constants: dict[str, Any]) -> str:
    """PTX for an A100, which its assembler accepts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(device_codec, name)
    names = [each.name for each in kernel.params]
    types = {**TYPES, "like": f"*{dtype}", "flat": f"*{dtype}"}
    signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in names}
    values = {each: constants[each] for each in names if each in constants}
    target = GPUTarget("cuda", 80, 32)
    made = triton.compile(ASTSource(kernel, signature, values), target=target, options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


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


def raising(error: Exception) -> Callable[..., None]:
    def fails(*_: object, **__: object) -> None:
        raise error

    return fails


def start_codec() -> DeviceCodec | None:
    caches = [torch.empty(4, KV_HEADS, BLOCK, 2 * DIM, device="meta") for _ in range(LAYERS)]
    return codec_on_device(caches, strided_layout(caches[0], DIM, BLOCK), SHAPE, lambda tensor: tensor, lossy=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("fault", [*FAULTS, ""])
def test_an_instance_starts_without_kernels_or_triton(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault:
        monkeypatch.setattr(DeviceCodec, "prepare", raising(FAULTS[fault]))
    else:
        monkeypatch.setitem(sys.modules, "services.worker.kv.device_codec", None)
    assert start_codec() is None
    (warning,) = warnings(caplog)
    assert "KV is moved without Triton kernels" in warning
    assert str(FAULTS.get(fault, "")) in warning


def test_a_bug_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCodec, "prepare", raising(KeyError("layer")))
    with pytest.raises(KeyError):
        start_codec()


@pytest.mark.parametrize("use", ["decode", "gather", "code"])
def test_after_a_kernel_has_failed_torch_moves_kv_and_the_cpu_codes_it(
    use: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caches = [torch.zeros(6, KV_HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    layout = strided_layout(caches[0], DIM, BLOCK)
    kernels = DeviceCodec(caches, layout, SHAPE, lambda tensor: tensor)
    slots = slots_of(torch.tensor([3, 1, 5, 2, 4]), BLOCK, 0, TOKENS)
    launches = []

    def launch(*_: object) -> None:
        launches.append(1)
        raise FAULTS["shared memory"]

    for name in ("gather_places", "decode_places", "encode_into"):
        monkeypatch.setattr(device_codec, name, launch)
    coding = kernels.coding(Codec.INT8, TOKENS, lambda start, end: slots[start:end])
    assert coding is not None
    for _ in range(3):
        if use == "decode":
            copies = Copies(HeapMemory([Rows(SHAPE.chunk_shape, torch.float32, TOKENS)]))
            into = Blocks(
                caches=caches,
                layout=layout,
                slots=[slots] * len(caches),
                token_start=0,
                layer_start=0,
                head_start=0,
                copies=copies,
                freed=None,
                zero=False,
                codec=kernels,
            )
            payload = encode(model_kv(TOKENS), Codec.INT8)
            assert not into.take((0, LAYERS), (0, TOKENS), (0, KV_HEADS), payload, torch.float32, Codec.INT8)
        elif use == "gather":
            assert not kernels.gather(slots, torch.empty(SHAPE.chunk_shape(TOKENS)))
        else:  # the chunk that could not be coded fails
            with pytest.raises(KvError) as raised:
                coding.code(0, TOKENS, torch.empty(coding.size(TOKENS), dtype=torch.uint8))
            assert raised.value.fault is KvFault.CODEC
    assert kernels.coding(Codec.INT8, TOKENS, lambda start, end: slots[start:end]) is None
    assert len(launches) == 1
    (warning,) = warnings(caplog)
    assert "out of resource: shared memory" in warning
