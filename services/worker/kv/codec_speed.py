"""What coding KV costs on this machine, measured once at the start on a little random KV."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from services.worker.kv.codec import decode, encode
from shared.domain.instance import KvGeometry
from shared.domain.kv import Codec
from shared.domain.rates import CodecRate

_BYTES = 1 << 20  # of KV as it is stored: about a frame
_WARM_UP = 4  # calls that meet cold caches, and memory that the kernel has yet to give
_ROUNDS = 15


def codec_speeds(geometry: KvGeometry, dtype: torch.dtype) -> dict[str, CodecRate]:
    """Of each lossy codec, in one thread, as the connector's threads code and decode. Takes tens of milliseconds."""
    token_bytes = 2 * geometry.kv_heads * geometry.head_dim * dtype.itemsize
    shape = (1, 2, max(1, _BYTES // token_bytes), geometry.kv_heads, geometry.head_dim)
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
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return max(1e-9, median(times[_WARM_UP:]))
