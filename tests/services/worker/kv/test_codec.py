"""The KV codecs on the CPU: formats, errors, bit equality with torch, and their measured speed."""

import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from services.worker.kv import KvError, KvFault, codec
from services.worker.kv.codec import codec_speeds, decode, decode_into, encode, payload_bytes, prepare
from shared.domain.instance import KvGeometry
from shared.domain.kv import TOKEN_GROUP, Codec, channel_group

LOSSY = [Codec.INT8, Codec.INT4, Codec.FP8]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = st.tuples(
    st.integers(1, 3), st.just(2), st.integers(1, 70), st.integers(1, 3), st.sampled_from([8, 64, 80, 128])
)
lossy = pytest.mark.parametrize("codec", LOSSY)


def random_kv(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def roundtrip(kv: torch.Tensor, codec: Codec, out: torch.dtype | None = None) -> torch.Tensor:
    payload = encode(kv, codec)
    assert payload.numel() == payload_bytes(kv.shape, kv.dtype, codec)
    return decode(payload, tuple(kv.shape), kv.dtype, codec, out or kv.dtype)


@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 9))
def test_raw_is_exact(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    kv = random_kv(shape, dtype, seed)
    kv.view(-1)[:3] = torch.tensor([float("nan"), -float("inf"), -0.0])
    assert torch.equal(roundtrip(kv, Codec.RAW).view(torch.uint8), kv.view(torch.uint8))
    assert encode(kv, Codec.RAW).data_ptr() == kv.data_ptr()  # not a copy


@given(SHAPES, st.sampled_from([Codec.INT8, Codec.INT4]), st.integers(0, 9), st.floats(-30, 30))
def test_integers_stay_within_half_a_step(shape: tuple[int, ...], codec: Codec, seed: int, offset: float) -> None:
    """A step is (max - min + what rounding the zero to float16 may add) / levels, per group."""
    kv = random_kv(shape, torch.float32, seed) + offset
    error = (roundtrip(kv, codec) - kv).abs()
    steps = 255 if codec is Codec.INT8 else 15
    top = kv.abs().max()

    def bound(values: torch.Tensor, axis: int) -> torch.Tensor:
        spread = values.amax(axis, keepdim=True) - values.amin(axis, keepdim=True) + top * 2**-9
        return spread / steps / 2 * 1.002 + top * 1e-6

    for first in range(0, shape[2], TOKEN_GROUP):
        tokens = slice(first, first + TOKEN_GROUP)
        assert (error[:, 0, tokens] <= bound(kv[:, 0, tokens], 1)).all()
    assert (error[:, 1] <= bound(kv[:, 1], -1)).all()


@given(SHAPES)
def test_fp8_error_is_relative_to_the_head(shape: tuple[int, ...]) -> None:
    kv = random_kv(shape, torch.bfloat16)
    error = (roundtrip(kv, Codec.FP8).float() - kv.float()).abs()
    top = kv.float().abs().amax(dim=(2, 4), keepdim=True)
    # e4m3 has 3 bits of mantissa; below 2^-6 * top / 448 its steps are absolute. bfloat16 rounds once more.
    assert (error <= kv.float().abs() * (2**-4 + 2**-8) + top * 2**-9 / 448 * 1.01).all()


@lossy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_lossy_codecs_refuse_values_that_are_not_finite(codec: Codec, bad: float) -> None:
    kv = random_kv((1, 2, 4, 1, 64), torch.bfloat16)
    kv[0, 0, 1, 0, 3] = bad
    with pytest.raises(KvError) as raised:
        encode(kv, codec)
    assert raised.value.fault is KvFault.CODEC


@pytest.mark.parametrize("codec", list(Codec))
def test_precision_is_cast_and_sizes_are_checked_at_the_receiver(codec: Codec) -> None:
    kv = random_kv((2, 2, 10, 2, 64), torch.bfloat16)
    cast = roundtrip(kv, codec, torch.float32)
    assert cast.dtype is torch.float32
    assert torch.allclose(cast, kv.float(), atol=0.5)
    payload = encode(kv, codec)
    shifted = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:]  # payloads may lie at odd addresses
    shifted.copy_(payload)
    assert torch.equal(decode(shifted, tuple(kv.shape), kv.dtype, codec, torch.float32), cast)
    with pytest.raises(KvError) as raised:
        decode(payload[:-1], tuple(kv.shape), kv.dtype, codec, kv.dtype)
    assert raised.value.fault is KvFault.PROTOCOL


@given(
    SHAPES,
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(LOSSY),
    st.integers(0, 99),
    st.sampled_from([1e-30, 1e-9, 1e-3, 1.0, 77.0, 1e4, 1e37]),
    st.sampled_from([0.0, 0.7, -20.0]),
)
def test_payloads_and_values_are_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, codec: Codec, seed: int, scale: float, offset: float
) -> None:
    kv = ((random_kv(shape, torch.float32, seed) + offset) * scale).to(dtype)
    assume(bool(kv.isfinite().all()))  # float16 ends at 65504
    payload = encode(kv, codec)
    assert torch.equal(payload, torch_encode(kv, codec))
    assert torch.equal(decode(payload, shape, dtype, codec, out), torch_decode(payload, shape, codec, out))


@lossy
@pytest.mark.parametrize(
    "values", [(0.0, -0.0), (-0.0, 0.0), (-1.0, 1.0), (65504.0, -65504.0), (2.0**-24, 0.0), (3.3, 3.3)]
)
def test_values_at_the_edges(codec: Codec, values: tuple[float, float]) -> None:
    kv = torch.tensor(values).repeat(2 * 2 * 33 * 32).view(1, 2, 66, 1, 64)
    for dtype in DTYPES:
        assert torch.equal(encode(kv.to(dtype), codec), torch_encode(kv.to(dtype), codec))


def test_every_number_of_fp8_comes_back() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[(every & 127) != 127].view(torch.float8_e4m3fn).float()
    kv = torch.cat([finite, torch.tensor([448.0, -448.0])]).view(1, 1, 1, 2, 128).repeat(1, 2, 1, 1, 1)
    kv[..., 0] = 448.0  # each head's greatest: a scale of 1
    assert torch.equal(roundtrip(kv, Codec.FP8), kv)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts_of_larger_kv_are_coded_and_decoded_in_place(codec: Codec, dtype: torch.dtype) -> None:
    """Layers, tokens and heads of a segment; the same of a destination, of which nothing else changes."""
    segment = random_kv((4, 2, 70, 6, 64), dtype)
    cuts = [(slice(1, 3), slice(None), slice(5, 69), slice(2, 4)), (slice(0, 1), slice(None), slice(69, 70))]
    for cut in cuts:
        wanted = segment[cut]
        payload = encode(wanted, codec)
        decoded = wanted
        if codec.lossy:
            assert torch.equal(payload, torch_encode(wanted.contiguous(), codec))
            decoded = torch_decode(payload, tuple(wanted.shape), codec, dtype)
        target, expected = torch.full_like(segment, 9.0), torch.full_like(segment, 9.0)
        decode_into(payload, dtype, codec, target[cut])
        expected[cut] = decoded
        assert torch.equal(target, expected)


def test_rows_that_do_not_lie_together_are_copied_first() -> None:
    kv = random_kv((2, 2, 40, 64, 4), torch.bfloat16).transpose(3, 4)
    payload = encode(kv, Codec.INT8)
    assert torch.equal(payload, torch_encode(kv.contiguous(), Codec.INT8))
    target = torch.zeros_like(kv.contiguous().transpose(3, 4)).transpose(3, 4)
    decode_into(payload, kv.dtype, Codec.INT8, target)
    assert torch.equal(target, torch_decode(payload, tuple(kv.shape), Codec.INT8, kv.dtype))


def test_two_threads_code_at_the_same_time() -> None:
    """The loops run without the GIL: within one of them, another thread has many turns."""
    kv, end, number = random_kv((16, 2, 2048, 8, 64), torch.bfloat16), threading.Event(), 0
    prepare(torch.bfloat16)

    def work() -> None:
        nonlocal number
        while not end.is_set() and number < 500:
            encode(kv, Codec.INT8)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    turns, pause = Counter[int](), threading.Event()
    while thread.is_alive() and (not turns or max(turns.values()) <= 5):  # a busy machine gives few in most
        turns[number] += 1
        pause.wait(0.001)
    end.set()
    thread.join()
    assert max(turns.values()) > 5


def test_codecs_have_their_speeds_int4_for_even_heads_only() -> None:
    rates = codec_speeds(KvGeometry(2, 4, 64), torch.bfloat16)
    assert set(rates) == {"int8", "int4", "fp8"}
    for rate in rates.values():  # between a thousandth and a thousand times of what any machine does
        assert 1e5 < rate.encode_bytes_s < 1e13
        assert 1e5 < rate.decode_bytes_s < 1e13
    assert set(codec_speeds(KvGeometry(2, 4, 63), torch.float32)) == {"int8", "fp8"}


def test_a_model_without_k_and_v_has_no_speeds() -> None:
    assert codec_speeds(KvGeometry(2, 0, 0), torch.float32) == {}


def test_the_cost_of_the_first_calls_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, lasts_s = 0.0, iter([0.5, 0.4, 0.3, 0.2, *[0.1] * 8, *[0.3] * 7])

    def work() -> None:
        nonlocal now_s
        now_s += next(lasts_s)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    assert codec._time_s(work) == pytest.approx(0.1)
    assert next(lasts_s, None) is None


# The codecs as torch computes them, step by step as `services.worker.kv.codec` describes them.

_TOP_EXPONENT = 14  # magnitudes up to 2^14 after normalisation: max - min then fits into float16
_ULP = 2.0**-10  # spacing of float16 numbers, relative
_TINY = 2.0**-24  # smallest positive float16
_FP8_MAX = 448.0  # torch.float8_e4m3fn


def torch_encode(kv: torch.Tensor, codec: Codec) -> torch.Tensor:
    if codec is Codec.FP8:
        return _encode_fp8(kv.float())
    return _encode_int(kv.float(), 8 if codec is Codec.INT8 else 4)


def torch_decode(payload: torch.Tensor, shape: tuple[int, ...], codec: Codec, out: torch.dtype) -> torch.Tensor:
    if codec is Codec.FP8:
        return _decode_fp8(payload, shape, out)
    return _decode_int(payload, shape, 8 if codec is Codec.INT8 else 4, out)


def _encode_fp8(kv: torch.Tensor) -> torch.Tensor:
    top = torch.maximum(kv.amax(dim=(2, 4), keepdim=True), -kv.amin(dim=(2, 4), keepdim=True))
    scale = (top / _FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)  # [layers, 2, 1, heads, 1]
    coded = (kv / scale).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat([_bytes(scale), _bytes(coded)])


def _decode_fp8(payload: torch.Tensor, shape: tuple[int, ...], out: torch.dtype) -> torch.Tensor:
    layers, _, _, heads, _ = shape
    head = layers * 2 * heads * 4
    scale = _typed(payload[:head], torch.float32, (layers, 2, 1, heads, 1))
    return payload[head:].view(torch.float8_e4m3fn).float().view(shape).mul_(scale).to(out)


def _encode_int(kv: torch.Tensor, bits: int) -> torch.Tensor:
    keys, values = _by_tokens(kv[:, 0]), [(_by_channels(kv[:, 1]), 4)]
    units = []
    parts = []
    for side in (keys, values):
        # amin and amax: torch.aminmax takes ten times as long (seen)
        ranges = [(x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)) for x, axis in side]
        unit = _unit(ranges)
        units.append(unit)
        for (x, _), (low, high) in zip(side, ranges, strict=True):
            zero, scale = _grid(low / unit + 0.0, high / unit, bits)  # -0 becomes 0
            coded = x.sub(zero.float() * unit).div_(scale.float() * unit).round_().to(torch.uint8)
            parts += [_bytes(scale), _bytes(zero), _pack(coded, bits)]
    return torch.cat([_bytes(torch.stack(units, dim=1)), *parts])


def _unit(ranges: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """By what a layer's values are divided: a power of two, [layers, 1, 1, 1, 1]."""
    top = torch.stack([torch.maximum(-low, high).amax(dim=(1, 2, 3, 4)) for low, high in ranges]).amax(dim=0)
    fraction, exponent = torch.frexp(top.clamp_(min=2.0**-80))  # a fraction of 1/2 is a power of two
    exponent = exponent - (fraction == 0.5).int() - _TOP_EXPONENT
    return torch.exp2(exponent.float()).view(-1, 1, 1, 1, 1)


def _decode_int(payload: torch.Tensor, shape: tuple[int, ...], bits: int, out: torch.dtype) -> torch.Tensor:
    layers = shape[0]
    kv = torch.empty(shape, dtype=out)
    reader = _Reader(payload)
    units = reader.take(torch.float32, (layers, 2, 1, 1, 1, 1)).unbind(1)
    targets = [(view, 2, 0) for view, _ in _by_tokens(kv[:, 0])] + [(_by_channels(kv[:, 1]), 4, 1)]
    for target, axis, side in targets:
        stats = (*target.shape[:axis], 1, *target.shape[axis + 1 :])
        scale = reader.take(torch.float16, stats).float() * units[side]
        zero = reader.take(torch.float16, stats).float() * units[side]
        coded = _unpack(reader.take(torch.uint8, (target.numel() * bits // 8,)), bits, tuple(target.shape))
        target.copy_(coded.float().mul_(scale).add_(zero))
    return kv


def _by_tokens(k: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """K [layers, tokens, heads, dim] as [layers, groups, group, heads, dim], axis 2: whole groups, then the
    rest.
    """
    layers, tokens, *rest = k.shape
    whole = tokens // TOKEN_GROUP * TOKEN_GROUP
    views = []
    if whole:
        views.append((k[:, :whole].view(layers, whole // TOKEN_GROUP, TOKEN_GROUP, *rest), 2))
    if tokens > whole:
        views.append((k[:, whole:].unsqueeze(1), 2))
    return views


def _by_channels(v: torch.Tensor) -> torch.Tensor:
    """V [layers, tokens, heads, dim] as [layers, tokens, heads, groups, group]."""
    group = channel_group(v.shape[-1])
    return v.view(*v.shape[:-1], v.shape[-1] // group, group)


def _grid(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros, rounded down, and scales, rounded up, in float16: (x - zero) / scale rounds to 0 … 2^bits - 1."""
    zero = low.half()
    zero = torch.where(zero.float() > low, (low - low.abs() * _ULP - _TINY).half(), zero)
    exact = (high - zero.float()) / ((1 << bits) - 1)
    scale = exact.half()
    scale = torch.where(scale.float() < exact, (exact * (1 + _ULP) + _TINY).half(), scale).clamp_(min=_TINY)
    return zero, scale


def _pack(coded: torch.Tensor, bits: int) -> torch.Tensor:
    flat = coded.reshape(-1)
    if bits == 8:
        return flat
    low, high = flat.chunk(2)
    return low | (high << 4)


def _unpack(packed: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    if bits == 8:
        return packed.view(shape)
    return torch.cat([packed & 15, packed >> 4]).view(shape)


class _Reader:
    """Takes typed sections off a payload, in order."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._payload = payload
        self._at = 0

    def take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        size = dtype.itemsize
        for length in shape:
            size *= length
        part = self._payload[self._at : self._at + size]
        self._at += size
        return _typed(part, dtype, shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).reshape(-1)


def _typed(payload: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if payload.data_ptr() % dtype.itemsize or payload.storage_offset() % dtype.itemsize:
        # libzmq gives small messages any address, and packed sections have odd lengths.
        payload = payload.clone()
    return payload.view(dtype).view(shape)
