"""Where the frames of an import land: in their destination, once they are what was sent."""

import logging
import math

import numpy as np
import torch

from services.worker.kv.codec import decode
from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.wire.frames import Buffer, Frame, verify
from services.worker.kv.wire.importing import DTYPES, Load
from services.worker.kv.wire.transport import Received

_log = logging.getLogger(__name__)


def write_frame(frame: Frame, payload: Buffer, load: Load) -> None:
    """Decode a verified frame and write what the load wants of it. Raises KvError when it cannot be decoded."""
    start, end = max(frame.token_start, load.token_start), min(frame.token_end, load.token_end)
    if start >= end:
        return
    raw, dtype, to = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8)), DTYPES[frame.dtype], load.destination
    if (start, end) == (frame.token_start, frame.token_end):
        layers, heads = (frame.layer_start, frame.layer_end), (frame.head_start, frame.head_end)
        if to.take(layers, (start, end), heads, raw, dtype, frame.codec):
            return
    kv = decode(raw, frame.shape, dtype, frame.codec, to.dtype)
    kv = kv[:, :, start - frame.token_start : end - frame.token_start]
    for layer in range(frame.layer_start, frame.layer_end):
        to.write(layer, start, frame.head_start, kv[layer - frame.layer_start])


def room_of(frame: Frame, size_bytes: int, load: Load) -> list[memoryview]:
    """Where its payload may be received straight into; empty: nowhere."""
    dtype = DTYPES.get(frame.dtype)
    inside = load.token_start <= frame.token_start < frame.token_end <= load.token_end
    if frame.codec.lossy or dtype is None or dtype is not load.destination.dtype or not inside:
        return []
    tokens, heads = (frame.token_start, frame.token_end), (frame.head_start, frame.head_end)
    views: list[memoryview] = []
    for layer in range(frame.layer_start, frame.layer_end):
        room = load.destination.room(layer, tokens, heads)
        if not room:
            return []
        views.extend(room)
    return views if sum(view.nbytes for view in views) == size_bytes == math.prod(frame.shape) * dtype.itemsize else []


def check(frame: Frame, received: Received) -> None:
    """Raise KvError unless the frame is one that we understand, and its payload what was sent."""
    if frame.dtype not in DTYPES:
        raise KvError(KvFault.PROTOCOL, f"unknown dtype {frame.dtype}")
    verify(frame, received.checksum, received.sent_checksum)


def finished(load: Load, error: KvError | None) -> KvError | None:
    """How a load ends, once nothing is written for it any more, a failed one included: its blocks are the engine's."""
    try:
        load.destination.finish()
    except Exception as failure:
        return error or as_kv_error(failure)
    return error


def as_kv_error(error: Exception) -> KvError:
    """What a failed import is told; anything unforeseen is logged here, since it goes no further."""
    if isinstance(error, KvError):
        return error
    _log.error("an import failed", exc_info=error)
    return KvError(KvFault.INTERNAL, repr(error))
