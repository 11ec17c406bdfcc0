"""The codecs of KV on the wire, and the measurement of their speed on this machine at start-up.

KV of a frame is one tensor [layers, sides, tokens, heads, head_dim]. Lossy codecs are for two sides: K is index 0 of
the second axis, V index 1.
A payload is its coded form, without a header: shape, dtype and codec travel in the frame's header.

int8 and int4 are asymmetric min/max quantisation, K per channel over groups of 32 tokens and V per token over
groups of at most 64 channels (KIVI, arXiv 2402.02750, section 3: outliers of K lie in channels, those of V do
not). Scales and zeros are float16. A float32 power of two per layer and per K or V brings all values into
float16's range first; zeros are rounded down and scales up, so that nothing is clamped and the error stays
within half a step whatever the offset. A payload is

- the units, float32 [layers, 2];
- of K's whole groups: scales [layers, groups, heads, head_dim], zeros alike, coded values [layers, tokens, heads,
  head_dim], one a byte, or for int4 two: the first half of all in the lower bits, the rest in the upper ones;
- the same of K's last group, where its tokens are fewer than 32;
- of V: scales [layers, tokens, heads, groups], zeros, and coded values in the same manner.

fp8 is e4m3fn: scales, float32 [layers, 2, heads], then the values.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from services.worker.kv import KvError, KvFault
from shared.domain.instance import KvGeometry
from shared.domain.kv import TOKEN_GROUP, Codec, channel_group
from shared.domain.rates import CodecRate

Shape = tuple[int, ...]  # layers, sides, tokens, heads, head_dim
_SPEED_BYTES = 1 << 20  # of the KV that is coded to measure the codecs: about a frame
_WARM_UP = 4  # calls that meet cold caches, and memory that the kernel still has to give
_ROUNDS = 15
_BITS = {Codec.INT8: 8, Codec.INT4: 4}
_WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}  # what the kernels take, by the bits of these


def prepare(dtype: torch.dtype) -> None:
    """Load and compile the codecs for KV of that dtype, so that no transfer waits for it: under a second, and some
    65 MB; the first time on a machine some 20 s.
    """
    kv = torch.zeros(1, 2, 1, 1, 2, dtype=dtype)
    for codec in Codec:
        decode(encode(kv, codec), (1, 2, 1, 1, 2), dtype, codec, dtype)


def encode(kv: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Payload of `kv` [layers, sides, tokens, heads, head_dim] (CPU), as contiguous uint8 [bytes].

    RAW is a view where `kv` is contiguous, and exact for any bits. Raises KvError(CODEC) when a lossy codec
    meets values that are not finite, or an odd head_dim with INT4.
    """
    if codec is Codec.RAW:
        return kv.contiguous().view(torch.uint8).reshape(-1)
    check_head_dim(kv.shape[-1], codec)
    payload = torch.empty(payload_bytes(tuple(kv.shape), kv.dtype, codec), dtype=torch.uint8)
    direct = kv.dtype in _WORDS and _has_rows(kv)
    if not _encode(kv if direct else kv.to(_kernel_dtype(kv.dtype)).contiguous(), codec, payload):
        raise KvError(KvFault.CODEC, "values that are not finite")
    return payload


def decode(payload: torch.Tensor, shape: Shape, wire: torch.dtype, codec: Codec, out: torch.dtype) -> torch.Tensor:
    """KV of `shape` in dtype `out` from a uint8 payload; `wire` is the exporter's dtype.

    RAW with `out` = `wire` is a view of the payload. Raises KvError(PROTOCOL) when the size does not fit the
    shape.
    """
    if codec is Codec.RAW:
        check_size(payload, shape, wire, codec)
        return _typed(payload, wire, shape).to(out)
    kv = torch.empty(shape, dtype=out)
    decode_into(payload, wire, codec, kv)
    return kv


def decode_into(payload: torch.Tensor, wire: torch.dtype, codec: Codec, kv: torch.Tensor) -> None:
    """As `decode`, into `kv` [layers, sides, tokens, heads, head_dim] of any strides; fastest where the values of all
    heads of a token lie together.
    """
    check_size(payload, tuple(kv.shape), wire, codec)
    if codec is Codec.RAW:
        kv.copy_(_typed(payload, wire, tuple(kv.shape)))
        return
    direct = kv.dtype in _WORDS and _has_rows(kv)
    target = kv if direct else torch.empty(kv.shape, dtype=_kernel_dtype(kv.dtype))
    _decode(payload, codec, target)
    if not direct:
        kv.copy_(target)


def check_head_dim(dim: int, codec: Codec) -> None:
    """Raise KvError(CODEC) for an odd head_dim with INT4, which packs two values into a byte."""
    if codec is Codec.INT4 and dim % 2:
        raise KvError(KvFault.CODEC, f"int4 needs an even head_dim, got {dim}")


def payload_bytes(shape: Shape, wire: torch.dtype, codec: Codec) -> int:
    if codec is Codec.RAW:
        return math.prod(shape) * wire.itemsize
    layers, _, tokens, heads, dim = shape
    values = tokens * heads * dim  # of one layer's K, or V
    if codec is Codec.FP8:
        return layers * 2 * (values + heads * 4)
    packed = values if codec is Codec.INT8 else values // 2
    groups = -(-tokens // TOKEN_GROUP) * heads * dim + tokens * heads * (dim // channel_group(dim))
    return layers * (2 * packed + 4 * groups + 2 * 4)


# Kernels are loaded where lossy KV is met: numba costs time and memory, and most clusters never meet any.


def _encode(kv: torch.Tensor, codec: Codec, payload: torch.Tensor) -> bool:
    """Fill `payload`; False when a value is not finite."""
    from services.worker.kv import numba_kernels as kernels

    values, steps, shape = _flat(kv)
    if codec is Codec.FP8:
        return kernels.encode_fp8(values, steps, shape, kv.shape[-1], payload.numpy())
    return kernels.encode_ints(values, steps, shape, channel_group(kv.shape[-1]), _BITS[codec], payload.numpy())


def _decode(payload: torch.Tensor, codec: Codec, kv: torch.Tensor) -> None:
    from services.worker.kv import numba_kernels as kernels

    values, steps, shape = _flat(kv)
    if codec is Codec.FP8:
        kernels.decode_fp8(payload.numpy(), steps, shape, kv.shape[-1], values)
    else:
        kernels.decode_ints(payload.numpy(), steps, shape, channel_group(kv.shape[-1]), _BITS[codec], values)


def check_size(payload: torch.Tensor, shape: Shape, wire: torch.dtype, codec: Codec) -> None:
    """Raise KvError(PROTOCOL) unless the payload is as large as that of KV of that shape."""
    if payload.numel() != payload_bytes(shape, wire, codec):
        raise KvError(KvFault.PROTOCOL, "payload size does not fit its header")


def _kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which KV of that dtype is computed: float16 becomes float32."""
    return dtype if dtype in _WORDS else torch.float32


def _has_rows(kv: torch.Tensor) -> bool:
    """Whether the values of all heads of a token lie together."""
    return kv.stride(4) == 1 and (kv.shape[3] == 1 or kv.stride(3) == kv.shape[4])


def _flat(kv: torch.Tensor) -> tuple["np.ndarray[Any, Any]", tuple[int, int, int], tuple[int, int, int]]:
    """All values from the first to the last one as whole numbers of their bits; the steps of layers, of K and V, and of
    tokens; layers, tokens, and values of a token.
    """
    layers, _, tokens, heads, dim = kv.shape
    steps = (kv.stride(0), kv.stride(1), kv.stride(2))
    size = (layers - 1) * steps[0] + steps[1] + (tokens - 1) * steps[2] + heads * dim
    values = kv.view(_WORDS[kv.dtype]).as_strided((size,), (1,))
    return values.numpy(), steps, (layers, tokens, heads * dim)


def _typed(payload: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if payload.data_ptr() % dtype.itemsize or payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()  # a payload received behind a header may lie at any address
    return payload.view(dtype).view(shape)


def codec_speeds(geometry: KvGeometry, dtype: torch.dtype) -> dict[str, CodecRate]:
    """The rates of each lossy codec in one thread, as the connector's threads encode and decode. Takes tens of
    milliseconds. Empty for a model without K and V.
    """
    token_bytes = 2 * geometry.kv_heads * geometry.head_dim * dtype.itemsize
    if not token_bytes:
        return {}
    shape = (1, 2, max(1, _SPEED_BYTES // token_bytes), geometry.kv_heads, geometry.head_dim)
    kv = torch.randn(shape).to(dtype)
    size, rates = kv.numel() * dtype.itemsize, {}
    for codec in Codec:
        if not codec.lossy or (codec is Codec.INT4 and geometry.head_dim % 2):
            continue
        payload = encode(kv, codec)
        encode_s = _time_s(partial(encode, kv, codec))
        decode_s = _time_s(partial(decode, payload, shape, dtype, codec, dtype))
        rates[codec.value] = CodecRate(size / encode_s, size / decode_s)
    return rates


def _time_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_WARM_UP + _ROUNDS):
        started_mono = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_mono)
    return max(1e-9, median(times[_WARM_UP:]))
