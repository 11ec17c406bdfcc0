"""What a machine without a GPU can say of the Triton codecs: Triton's interpreter gives the CPU codec's bits, and the
kernels compile for GPUs into instructions that round as the CPU does.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

PROJECT = Path(__file__).parents[4]
KERNELS = (
    "tops",
    "units",
    "grids",
    "encode_section",
    "decode_section",
    "scales_fp8",
    "encode_fp8",
    "decode_fp8",
    "gather_raw",
    "scatter_raw",
)
CONSTANTS = {"DIM": 128, "TOKENS": 32, "HEADS": 8, "CHANNELS": 64, "TILE": 1024}
TYPES = {"pointers": "*i64", "slots": "*i64", "payload": "*u8", "tops": "*i32"}


@pytest.mark.parametrize(("file", "tests"), [("test_kv_codec", 70), ("test_kv_device_codec", 17)])
def test_the_interpreter_gives_the_bits_of_the_cpu_codec(file: str, tests: int) -> None:
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
    """PTX for an A100, which its assembler takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from services.worker.kv import triton_kernels

    kernel = getattr(triton_kernels, name)
    names = [each.name for each in kernel.params]
    signature = {each: TYPES.get(each, "i32") for each in names} | {"like": f"*{dtype}"}
    signature |= {"flat": f"*{dtype}"} if "flat" in names else {}
    signature = {each: "constexpr" if each in constants else signature[each] for each in names}
    values = {each: constants[each] for each in names if each in constants}
    target = GPUTarget("cuda", 80, 32)
    made = triton.compile(ASTSource(kernel, signature, values), target=target, options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    return str(made.asm["ptx"])
