"""The KV codecs: formats, errors, bit equality with torch, and their measured speed."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import KvError, KvFault, codec
from services.worker.kv import codec as compiled
from services.worker.kv.codec import codec_speeds, decode, encode, payload_bytes
from shared.domain.instance import KvGeometry
from shared.domain.kv import TOKEN_GROUP, Codec
from tests.services.worker.kv import codec_reference as reference

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


SHAPES = st.tuples(
    st.integers(1, 3), st.just(2), st.integers(1, 70), st.integers(1, 3), st.sampled_from([8, 64, 80, 128])
)


def random_kv(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def roundtrip(kv: torch.Tensor, codec: Codec, out: torch.dtype | None = None) -> torch.Tensor:
    payload = encode(kv, codec)
    shape = tuple(kv.shape)
    assert payload.numel() == payload_bytes(shape, kv.dtype, codec)
    return decode(payload, shape, kv.dtype, codec, out or kv.dtype)


@given(SHAPES, DTYPES, st.integers(0, 9))
def test_raw_is_exact(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    kv = random_kv(shape, dtype, seed)
    assert torch.equal(roundtrip(kv, Codec.RAW), kv)


def test_raw_keeps_bits_of_nan_and_infinity() -> None:
    kv = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=torch.bfloat16).view(1, 2, 1, 1, 2)
    assert torch.equal(roundtrip(kv, Codec.RAW).view(torch.int16), kv.view(torch.int16))


def test_raw_of_contiguous_kv_is_not_a_copy() -> None:
    kv = random_kv((2, 2, 5, 2, 8), torch.bfloat16)
    assert encode(kv, Codec.RAW).data_ptr() == kv.data_ptr()


@given(SHAPES, st.sampled_from([Codec.INT8, Codec.INT4]), st.integers(0, 9), st.floats(-30, 30))
def test_integers_stay_within_half_a_step(shape: tuple[int, ...], codec: Codec, seed: int, offset: float) -> None:
    """A step is (max - min + what rounding the zero to float16 may add) / levels, per group."""
    kv = random_kv(shape, torch.float32, seed) + offset
    error = (roundtrip(kv, codec) - kv).abs()
    steps = 255 if codec is Codec.INT8 else 15
    top = kv.abs().max()
    slack = top * 2**-9  # of the zero, in float16

    for first in range(0, shape[2], TOKEN_GROUP):
        keys = kv[:, 0, first : first + TOKEN_GROUP]
        spread = keys.amax(1, keepdim=True) - keys.amin(1, keepdim=True) + slack
        bound = spread / steps / 2 * 1.002 + top * 1e-6
        assert (error[:, 0, first : first + TOKEN_GROUP] <= bound).all()
    values = kv[:, 1]
    spread = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True) + slack
    assert (error[:, 1] <= spread / steps / 2 * 1.002 + top * 1e-6).all()


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e37])
def test_lossy_codecs_survive_any_magnitude(codec: Codec, scale: float) -> None:
    kv = random_kv((2, 2, 40, 2, 64), torch.float32, scale=scale)
    error = (roundtrip(kv, codec) - kv).abs().max()
    relative = {Codec.INT8: 0.02, Codec.INT4: 0.3, Codec.FP8: 0.3}[codec]
    assert error <= relative * scale


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
@pytest.mark.parametrize("value", [0.0, 3.3, -7000.0, 1e-20])
def test_constant_groups_come_back(codec: Codec, value: float) -> None:
    kv = torch.full((1, 2, 33, 1, 64), value)
    assert torch.allclose(roundtrip(kv, codec), kv, rtol=1e-3, atol=0.0)


@given(SHAPES)
def test_fp8_error_is_relative_to_the_head(shape: tuple[int, ...]) -> None:
    kv = random_kv(shape, torch.bfloat16)
    error = (roundtrip(kv, Codec.FP8).float() - kv.float()).abs()
    top = kv.float().abs().amax(dim=(2, 4), keepdim=True)
    # e4m3 has 3 bits of mantissa; below 2^-6 * top / 448 its steps are absolute. bfloat16 rounds once more.
    assert (error <= kv.float().abs() * (2**-4 + 2**-8) + top * 2**-9 / 448 * 1.01).all()


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_lossy_codecs_refuse_values_that_are_not_finite(codec: Codec, bad: float) -> None:
    kv = random_kv((1, 2, 4, 1, 64), torch.bfloat16)
    kv[0, 0, 1, 0, 3] = bad
    with pytest.raises(KvError) as raised:
        encode(kv, codec)
    assert raised.value.fault is KvFault.CODEC


@pytest.mark.parametrize("codec", list(Codec))
def test_precision_is_cast_at_the_receiver(codec: Codec) -> None:
    kv = random_kv((2, 2, 10, 2, 64), torch.bfloat16)
    assert roundtrip(kv, codec, torch.float32).dtype is torch.float32
    assert torch.allclose(roundtrip(kv, codec, torch.float32), kv.float(), atol=0.5)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_payload_of_the_wrong_size_is_refused(codec: Codec) -> None:
    kv = random_kv((1, 2, 4, 1, 64), torch.bfloat16)
    payload = encode(kv, codec)[:-1]
    with pytest.raises(KvError) as raised:
        decode(payload, (1, 2, 4, 1, 64), torch.bfloat16, codec, torch.bfloat16)
    assert raised.value.fault is KvFault.PROTOCOL


def test_payloads_may_lie_at_odd_addresses() -> None:
    kv = random_kv((1, 2, 3, 1, 64), torch.float32)
    for each in Codec:
        payload = encode(kv, each)
        shifted = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:]
        shifted.copy_(payload)
        plain = decode(payload, (1, 2, 3, 1, 64), torch.float32, each, torch.float32)
        assert torch.equal(decode(shifted, (1, 2, 3, 1, 64), torch.float32, each, torch.float32), plain)


def test_sizes_against_bfloat16() -> None:
    shape = (4, 2, 64, 8, 128)
    raw = payload_bytes(shape, torch.bfloat16, Codec.RAW)
    ratios = {codec: payload_bytes(shape, torch.bfloat16, codec) / raw for codec in Codec}
    assert ratios[Codec.INT8] < 0.56
    assert ratios[Codec.INT4] < 0.31
    assert ratios[Codec.FP8] < 0.51


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


def test_every_lossy_codec_has_its_speeds() -> None:
    rates = codec_speeds(KvGeometry(2, 4, 64), torch.bfloat16)
    assert set(rates) == {"int8", "int4", "fp8"}
    for rate in rates.values():  # between a thousandth and a thousand times of what any machine does
        assert 1e5 < rate.encode_bytes_s < 1e13
        assert 1e5 < rate.decode_bytes_s < 1e13


def test_int4_needs_an_even_head() -> None:
    assert set(codec_speeds(KvGeometry(2, 4, 63), torch.float32)) == {"int8", "fp8"}


def test_what_only_the_first_calls_cost_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, lasts_s = 0.0, iter([0.5, 0.4, 0.3, 0.2, *[0.1] * 8, *[0.3] * 7])

    def work() -> None:
        nonlocal now_s
        now_s += next(lasts_s)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    assert codec._time_s(work) == pytest.approx(0.1)
    assert next(lasts_s, None) is None
