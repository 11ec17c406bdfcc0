"""The compiled codecs, bit by bit against torch's: other engines' kernels are held against the same bits."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import codec as compiled
from shared.domain.kv import Codec
from tests.services.worker.kv import codec_reference as reference
from tests.services.worker.kv.test_codec import DTYPES, SHAPES, random_kv

LOSSY = st.sampled_from([Codec.INT8, Codec.INT4, Codec.FP8])
SCALES = st.sampled_from([1e-30, 1e-9, 1e-3, 1.0, 77.0, 1e4])


@given(SHAPES, DTYPES, DTYPES, LOSSY, st.integers(0, 99), SCALES, st.sampled_from([0.0, 0.7, -20.0]))
def test_payloads_and_values_are_torchs(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    out: torch.dtype,
    codec: Codec,
    seed: int,
    scale: float,
    offset: float,
) -> None:
    kv = ((random_kv(shape, torch.float32, seed) + offset) * scale).to(dtype)
    payload = compiled.encode(kv, codec)
    assert torch.equal(payload, reference.encode(kv, codec))
    assert torch.equal(compiled.decode(payload, shape, dtype, codec, out), reference.decode(payload, shape, codec, out))


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0), (-1.0, 1.0), (65504.0, -65504.0), (2.0**-24, 0.0)])
def test_values_at_the_edges(codec: Codec, values: tuple[float, float]) -> None:
    kv = torch.tensor(values).repeat(2 * 2 * 33 * 32).view(1, 2, 66, 1, 64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        payload = compiled.encode(kv.to(dtype), codec)
        assert torch.equal(payload, reference.encode(kv.to(dtype), codec))


def test_every_number_of_fp8_comes_back() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[(every & 127) != 127].view(torch.float8_e4m3fn).float()
    kv = torch.cat([finite, torch.tensor([448.0, -448.0])]).view(1, 1, 1, 2, 128).repeat(1, 2, 1, 1, 1)
    kv[..., 0] = 448.0  # each head's greatest: a scale of 1
    assert torch.equal(
        compiled.decode(compiled.encode(kv, Codec.FP8), tuple(kv.shape), kv.dtype, Codec.FP8, kv.dtype), kv
    )


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cuts_of_larger_kv_are_coded_and_decoded_in_place(codec: Codec, dtype: torch.dtype) -> None:
    """Layers, tokens and heads of a segment; the same of a destination, of which nothing else changes."""
    segment = random_kv((4, 2, 70, 6, 64), dtype)
    cuts = [(slice(1, 3), slice(None), slice(5, 69), slice(2, 4)), (slice(0, 1), slice(None), slice(69, 70))]
    for cut in cuts:
        wanted = segment[cut]
        payload = compiled.encode(wanted, codec)
        assert torch.equal(payload, reference.encode(wanted.contiguous(), codec))
        target, expected = torch.full_like(segment, 9.0), torch.full_like(segment, 9.0)
        compiled.decode_into(payload, dtype, codec, target[cut])
        expected[cut] = reference.decode(payload, tuple(wanted.shape), codec, dtype)
        assert torch.equal(target, expected)


def test_rows_that_do_not_lie_together_are_copied_first() -> None:
    kv = random_kv((2, 2, 40, 64, 4), torch.bfloat16).transpose(3, 4)
    payload = compiled.encode(kv, Codec.INT8)
    assert torch.equal(payload, reference.encode(kv.contiguous(), Codec.INT8))
    target = torch.zeros_like(kv.contiguous().transpose(3, 4)).transpose(3, 4)
    compiled.decode_into(payload, kv.dtype, Codec.INT8, target)
    assert torch.equal(target, reference.decode(payload, tuple(kv.shape), Codec.INT8, kv.dtype))


def test_raw_is_decoded_in_place_too() -> None:
    kv = random_kv((2, 2, 5, 2, 8), torch.bfloat16)
    target = torch.zeros(2, 2, 9, 2, 8)
    compiled.decode_into(compiled.encode(kv, Codec.RAW), kv.dtype, Codec.RAW, target[:, :, 2:7])
    assert torch.equal(target[:, :, 2:7], kv.float())
    assert not target[:, :, :2].any()


def test_two_threads_code_at_the_same_time() -> None:
    """The loops run without the GIL: while they do, another thread counts."""
    kv, done, counted = random_kv((16, 2, 512, 8, 64), torch.bfloat16), threading.Event(), 0
    compiled.prepare(torch.bfloat16)

    def work() -> None:
        for _ in range(5):
            compiled.encode(kv, Codec.INT8)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        counted += 1
    thread.join()
    assert counted > 5
