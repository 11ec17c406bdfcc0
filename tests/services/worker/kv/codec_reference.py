"""The codecs as torch computes them, step by step as `services.worker.kv.codec` describes them."""

import torch

from shared.domain.kv import TOKEN_GROUP, Codec, channel_group

_TOP_EXPONENT = 14  # magnitudes up to 2^14 after normalisation: max - min then fits into float16
_ULP = 2.0**-10  # spacing of float16 numbers, relative
_TINY = 2.0**-24  # smallest positive float16
_FP8_MAX = 448.0  # torch.float8_e4m3fn

Shape = tuple[int, int, int, int, int]


def encode(kv: torch.Tensor, codec: Codec) -> torch.Tensor:
    if codec is Codec.FP8:
        return _encode_fp8(kv.float())
    return _encode_int(kv.float(), 8 if codec is Codec.INT8 else 4)


def decode(payload: torch.Tensor, shape: Shape, codec: Codec, out: torch.dtype) -> torch.Tensor:
    if codec is Codec.FP8:
        return _decode_fp8(payload, shape, out)
    return _decode_int(payload, shape, 8 if codec is Codec.INT8 else 4, out)


def _encode_fp8(kv: torch.Tensor) -> torch.Tensor:
    top = torch.maximum(kv.amax(dim=(2, 4), keepdim=True), -kv.amin(dim=(2, 4), keepdim=True))
    scale = (top / _FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)  # [layers, 2, 1, heads, 1]
    coded = (kv / scale).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat([_bytes(scale), _bytes(coded)])


def _decode_fp8(payload: torch.Tensor, shape: Shape, out: torch.dtype) -> torch.Tensor:
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


def _decode_int(payload: torch.Tensor, shape: Shape, bits: int, out: torch.dtype) -> torch.Tensor:
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
