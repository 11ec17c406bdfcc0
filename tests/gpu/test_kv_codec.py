"""The Triton codecs against the CPU's, bit by bit: on a GPU, or, less of it, in Triton's interpreter.

`tests/services/worker/kv/test_codec_triton.py` runs this file with TRITON_INTERPRET=1.
"""

import os
from typing import Any

import pytest
import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.codec import decode, encode, payload_bytes
from services.worker.kv.layout import slots_of, strided_layout
from shared.domain.kv import Codec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda"

BLOCK = 16
LOSSY = (Codec.INT8, Codec.INT4, Codec.FP8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Layers, tokens, heads, head_dim: whole groups of 32 tokens, rests of them, and head sizes that are no powers of two.
SHAPES = ((1, 1, 1, 64), (2, 32, 2, 64), (1, 37, 1, 128), (2, 66, 2, 80), (1, 95, 3, 96), (3, 64, 1, 32))
if INTERPRETED:
    SHAPES = ((1, 1, 1, 64), (2, 33, 2, 24))


class Paged:
    """Caches of some layers in which one sequence lies in blocks that do not follow each other."""

    def __init__(self, kv: torch.Tensor, start: int = 0) -> None:
        """`kv`: [layers, 2, tokens, heads, dim], which becomes tokens from `start` on; elsewhere lies 9."""
        from services.worker.kv.device_codec import Places, pointers_of

        layers, _, tokens, heads, dim = kv.shape
        blocks = -(-(start + tokens) // BLOCK) + 3
        shape = (blocks, heads, BLOCK, 2 * dim)
        self.caches = [torch.full(shape, 9.0, dtype=kv.dtype, device=DEVICE) for _ in range(layers)]
        layout = strided_layout(self.caches[0], dim, BLOCK)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
        self.slots = slots_of(order, BLOCK, start, start + tokens)
        for cache, each in zip(self.caches, kv, strict=True):
            layout.scatter(cache, self.slots, 0, each)
        views = [view for cache in self.caches for view in layout.views(cache)]
        self.places = Places(views, pointers_of(views).to(DEVICE), self.slots.to(DEVICE))


def random_kv(shape: tuple[int, int, int, int], dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    layers, tokens, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(layers, 2, tokens, heads, dim, generator=generator)
    kv[..., :: max(1, dim // 3)] *= 11.0  # outliers lie in channels
    return (kv * scale).to(dtype)


def encode_places(places: Any, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload of all layers, and what `require_finite` judges."""
    from services.worker.kv.device_codec import encode_into

    layers, _, _, heads, _ = places.shape
    dtype = places.views[0].dtype
    payload = torch.empty(payload_bytes(places.shape, dtype, codec), dtype=torch.uint8, device=DEVICE)
    tops = torch.empty((layers, 2, heads), dtype=torch.int32, device=DEVICE)
    encode_into(places, codec, layers, payload, tops)
    return payload, tops


def same_payload(kv: torch.Tensor, codec: Codec, start: int = 0) -> torch.Tensor:
    from services.worker.kv.device_codec import require_finite

    payload, tops = encode_places(Paged(kv, start).places, codec)
    require_finite(tops.cpu())
    expected = encode(kv, codec)
    wrong = (payload.cpu() != expected).nonzero().flatten()
    assert not wrong.numel(), f"{wrong.numel()} of {expected.numel()} bytes differ, from byte {wrong[0]} on"
    return payload


def same_values(payload: torch.Tensor, kv: torch.Tensor, codec: Codec, out: torch.dtype) -> None:
    from services.worker.kv.device_codec import decode_places

    shape = tuple(kv.shape)
    expected = Paged(decode(payload.cpu(), shape, kv.dtype, codec, out), 5)
    paged = Paged(torch.zeros(shape, dtype=out), 5)
    decode_places(payload, paged.places, kv.dtype, codec)
    for got, wanted in zip(paged.caches, expected.caches, strict=True):
        assert torch.equal(got, wanted)  # also where nothing was to be written


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_payloads_and_values_are_those_of_the_cpu(
    codec: Codec, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    kv = random_kv(shape, dtype)
    payload = same_payload(kv, codec, start=7)
    for out in (dtype,) if INTERPRETED else DTYPES:
        same_values(payload, kv, codec, out)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(("layers", "each"), [(3, 2), (2, 3)] if INTERPRETED else [(5, 2), (4, 2), (3, 1), (2, 3)])
def test_layers_in_several_payloads(codec: Codec, layers: int, each: int) -> None:
    from services.worker.kv.device_codec import encode_into, require_finite, spacing

    kv = random_kv((layers, 37, 2, 40), torch.bfloat16)
    spaced = spacing((each, 2, 37, 2, 40), kv.dtype, codec)
    payloads = torch.full((spaced * (-(-layers // each)),), 77, dtype=torch.uint8, device=DEVICE)
    tops = torch.empty(layers, 2, 2, dtype=torch.int32, device=DEVICE)
    encode_into(Paged(kv, 3).places, codec, each, payloads, tops)
    require_finite(tops.cpu())
    for number, first in enumerate(range(0, layers, each)):
        expected = encode(kv[first : first + each], codec)
        got = payloads.cpu()[number * spaced :][: expected.numel()]
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_values_are_moved_bit_by_bit(dtype: torch.dtype) -> None:
    from services.worker.kv.device_codec import decode_places, gather_places

    bits = torch.randint(0, 256, (3, 2, 50, 2, 24 * dtype.itemsize), generator=torch.Generator().manual_seed(2))
    kv = bits.to(torch.uint8).view(dtype)  # among them what is no number
    paged, out = Paged(kv, 9), torch.zeros(kv.shape, dtype=dtype, device=DEVICE)
    gather_places(paged.places, out)
    assert torch.equal(out.cpu().view(torch.uint8), kv.view(torch.uint8))
    other = Paged(torch.zeros_like(kv), 5)
    decode_places(out.view(torch.uint8).reshape(-1), other.places, dtype, Codec.RAW)
    for got, wanted in zip(other.caches, Paged(kv, 5).caches, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("scale", [1e-30, 1e4] if INTERPRETED else [1e-30, 1e-9, 1e-3, 77.0, 1e4])
def test_all_magnitudes(codec: Codec, scale: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        kv = random_kv((1, 40, 1, 64), dtype, scale, seed=3) + torch.tensor(-20.0 * scale, dtype=dtype)
        same_values(same_payload(kv, codec), kv, codec, dtype)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0), (-1.0, 1.0), (65504.0, -65504.0), (2.0**-24, 0.0)])
def test_values_at_the_edges(codec: Codec, values: tuple[float, float]) -> None:
    kv = torch.tensor(values).repeat(2 * 34 * 32).view(1, 2, 34, 1, 64)
    for dtype in DTYPES[:1] if INTERPRETED else DTYPES:
        same_values(same_payload(kv.to(dtype), codec), kv.to(dtype), codec, dtype)


def test_every_number_of_fp8() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[(every & 127) != 127].view(torch.float8_e4m3fn).float()
    kv = torch.cat([finite, torch.tensor([448.0, -448.0])]).view(1, 1, 1, 2, 128).repeat(1, 2, 1, 1, 1)
    kv[..., 0] = 448.0  # each head's greatest: a scale of 1
    same_values(same_payload(kv, Codec.FP8), kv, Codec.FP8, torch.float32)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(codec: Codec, bad: float) -> None:
    from services.worker.kv.device_codec import require_finite

    kv = random_kv((2, 33, 2, 64), torch.bfloat16)
    kv[1, 1, 32, 1, 63] = bad
    _, tops = encode_places(Paged(kv).places, codec)
    with pytest.raises(KvError) as raised:
        require_finite(tops.cpu())
    assert raised.value.fault is KvFault.CODEC


@pytest.mark.skipif(INTERPRETED, reason="a matter of size, and the interpreter is slow")
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frame_of_a_large_model(codec: Codec, dtype: torch.dtype) -> None:
    kv = random_kv((4, 600, 8, 128), dtype)
    same_values(same_payload(kv, codec), kv, codec, dtype)
