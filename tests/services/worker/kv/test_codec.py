import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.codec import decode, encode, payload_bytes
from services.worker.kv.errors import KvError, KvFault
from shared.domain.kv import TOKEN_GROUP, Codec

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
    for codec in Codec:
        payload = encode(kv, codec)
        shifted = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:]
        shifted.copy_(payload)
        plain = decode(payload, (1, 2, 3, 1, 64), torch.float32, codec, torch.float32)
        assert torch.equal(decode(shifted, (1, 2, 3, 1, 64), torch.float32, codec, torch.float32), plain)


def test_sizes_against_bfloat16() -> None:
    shape = (4, 2, 64, 8, 128)
    raw = payload_bytes(shape, torch.bfloat16, Codec.RAW)
    ratios = {codec: payload_bytes(shape, torch.bfloat16, codec) / raw for codec in Codec}
    assert ratios[Codec.INT8] < 0.56
    assert ratios[Codec.INT4] < 0.31
    assert ratios[Codec.FP8] < 0.51
