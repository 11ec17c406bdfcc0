"""KV in the paged caches of one rank's device, moved by Triton kernels: as it is, coded on its way out, decoded on its
way in. What goes over the wire is what the CPU codec makes of the same KV, bit for bit.

Triton is imported with this: where the caches lie in host memory nobody needs it.
"""

import logging
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.errors import TritonError

from services.worker.kv.codec import payload_bytes
from services.worker.kv.codec_triton import (
    Places,
    decode_places,
    encode_into,
    gather_places,
    pointers_of,
    require_finite,
    spacing,
)
from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.layout import StridedLayout
from services.worker.kv.staging import CodedLayers, CodedSegment
from services.worker.kv.wire.serving import ExportShape
from shared.domain.kv import TOKEN_GROUP, Codec

_log = logging.getLogger(__name__)

# What a kernel raises that cannot be compiled or loaded here: Triton's own errors (a compile error, too little shared
# memory), those of the compilers that it runs and cannot find or write for, and its drivers'. A device that has failed
# altogether raises a RuntimeError, too, and raises it again in torch's kernels.
KERNEL_FAULTS = (TritonError, subprocess.SubprocessError, OSError, RuntimeError)
Upload = Callable[[torch.Tensor], torch.Tensor]
_WARM_TOKENS = TOKEN_GROUP + 1  # a whole group and a rest


def warn_of_fallback(error: BaseException) -> None:
    """KV is moved by torch's own kernels from now on."""
    _log.warning("KV is moved without Triton kernels, and coded on the CPU: %s: %s", type(error).__name__, error)


class DeviceCodec:
    """All calls issue work on the calling thread's stream, but `prepare`, which waits for it.

    A kernel is compiled anew for other sizes than those of `prepare`. Where that fails, a warning names the reason, and
    from then on nothing is moved here: see the results of `gather`, `decode` and `coding`.
    """

    def __init__(self, caches: list[torch.Tensor], layout: StridedLayout, shape: ExportShape, upload: Upload) -> None:
        """`upload` brings a tensor to where caches are. Raises ValueError for caches that kernels cannot address."""
        self._layout = layout
        self._shape = shape
        self._upload = upload
        self._views = [view for cache in caches for view in layout.views(cache)]
        self._pointers = pointers_of(self._views).to(caches[0].device)
        self._failed = False
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        """Of the caches."""
        return self._views[0].dtype

    def prepare(self, *, lossy: bool) -> None:
        """Have the kernels compiled, so that no step and no transfer waits for them. Block 0 is written to: vLLM has
        it for nothing. Raises KERNEL_FAULTS.
        """
        slots = torch.arange(_WARM_TOKENS) % self._layout.block_size
        places = self._places((0, len(self._views) // 2), (0, self._layout.kv_heads), slots)
        kv = torch.zeros(places.shape, dtype=self.dtype, device=self._pointers.device)
        gather_places(places, kv)
        decode_places(kv.view(torch.uint8).reshape(-1), places, self.dtype, Codec.RAW)
        for codec in (each for each in Codec if lossy and self.codes(each)):
            out = torch.empty(self.size(codec, _WARM_TOKENS), dtype=torch.uint8, device=kv.device)
            self._encode(places, codec, out)
            for each in self._coded(codec, 0, _WARM_TOKENS, out).payloads:
                decode_places(each.payload, places.of(each.start, each.end), self.dtype, codec)
        if kv.device.type != "cpu":  # the CPU is that of Triton's interpreter
            torch.get_device_module(kv.device).synchronize(kv.device)

    def codes(self, codec: Codec) -> bool:
        """Whether KV can be coded by it here."""
        return codec.lossy and not (codec is Codec.INT4 and self._shape.head_dim % 2)

    def gather(self, slots: torch.Tensor, out: torch.Tensor) -> bool:
        """KV of those slots (int64, on the host) as it is into `out` [layers, 2, tokens, heads, head_dim]; False where
        kernels have failed.
        """
        return self._moved(lambda: gather_places(self._places((0, out.shape[0]), (0, out.shape[3]), slots), out))

    def coding(self, codec: Codec, tokens: int, slots: Callable[[int, int], torch.Tensor]) -> "DeviceCoding | None":
        """How so many tokens are coded that lie in `slots(first, until)`; None where that would not make them smaller,
        as with few tokens that share scales, and where kernels have failed.
        """
        segment = self._shape.segment_tokens()
        sizes = [self.size(codec, min(segment, tokens - first)) for first in range(0, tokens, segment)]
        fits = self.size(codec, min(segment, tokens)) <= self._shape.chunk_bytes(segment)
        if self._failed or not self.codes(codec) or not fits or sum(sizes) >= self._shape.chunk_bytes(tokens):
            return None
        return DeviceCoding(self, codec, sum(sizes), slots)

    def size(self, codec: Codec, tokens: int) -> int:
        """See Coding.size: payloads, spaced, and behind them what tells whether all was finite."""
        layers, _, _, heads, dim = self._shape.chunk_shape(tokens)
        each = self._shape.layers_a_frame(tokens, heads, codec)
        spaces = spacing((min(each, layers), 2, tokens, heads, dim), self.dtype, codec) * (layers // each)
        if left := layers % each:
            spaces += spacing((left, 2, tokens, heads, dim), self.dtype, codec)
        return spaces + 8 * layers * heads

    def decode(
        self,
        layers: tuple[int, int],
        heads: tuple[int, int],
        slots: torch.Tensor,
        payload: torch.Tensor,
        dtype: torch.dtype,
        codec: Codec,
    ) -> bool:
        """Write what a payload (uint8, on the host, there until this returns) holds to those slots; layers and heads
        are this rank's. `dtype` is the exporter's: RAW takes the caches' only. False where kernels have failed: some of
        it may have been written.
        """
        return self._moved(
            lambda: decode_places(self._upload(payload), self._places(layers, heads, slots), dtype, codec)
        )

    def _moved(self, issue: Callable[[], None]) -> bool:
        with self._lock:
            if self._failed:
                return False
        try:
            issue()
        except KERNEL_FAULTS as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            warn_of_fallback(error)

    def _places(self, layers: tuple[int, int], heads: tuple[int, int], slots: torch.Tensor) -> Places:
        sides = slice(2 * layers[0], 2 * layers[1])
        views = [view[:, :, slice(*heads)] for view in self._views[sides]]
        past = heads[0] * views[0].stride(2) * views[0].element_size()
        pointers = self._pointers[sides]
        return Places(views, pointers + past if past else pointers, self._upload(slots))

    def encode(self, codec: Codec, slots: torch.Tensor, out: torch.Tensor) -> None:
        """See Coding.code. Raises KvError(CODEC) where kernels have failed: the importer computes this KV, and what
        comes after it is coded on the CPU.
        """
        layers, _, _, heads, _ = self._shape.chunk_shape(1)
        if not self._moved(lambda: self._encode(self._places((0, layers), (0, heads), slots), codec, out)):
            raise KvError(KvFault.CODEC, "the kernels that code KV cannot be compiled on this device")

    def _encode(self, places: Places, codec: Codec, out: torch.Tensor) -> None:
        layers, _, tokens, heads, _ = places.shape
        tops = out[out.numel() - 8 * layers * heads :].view(torch.int32).view(layers, 2, heads)
        encode_into(places, codec, self._shape.layers_a_frame(tokens, heads, codec), out, tops)

    def staged(self, codec: Codec, start: int, end: int, coded: torch.Tensor) -> CodedSegment:
        """See Coding.staged."""
        layers, _, _, heads, _ = self._shape.chunk_shape(1)
        require_finite(coded[coded.numel() - 8 * layers * heads :].view(torch.int32))
        return self._coded(codec, start, end, coded)

    def _coded(self, codec: Codec, start: int, end: int, coded: torch.Tensor) -> CodedSegment:
        layers, _, tokens, heads, dim = self._shape.chunk_shape(end - start)
        each = self._shape.layers_a_frame(tokens, heads, codec)
        spaced = spacing((each, 2, tokens, heads, dim), self.dtype, codec)
        payloads = []
        for number, first in enumerate(range(0, layers, each)):
            last = min(first + each, layers)
            size = payload_bytes((last - first, 2, tokens, heads, dim), self.dtype, codec)
            payloads.append(CodedLayers(first, last, coded[number * spaced : number * spaced + size]))
        return CodedSegment(start, end, codec, tuple(payloads))


@dataclass(frozen=True, slots=True)
class DeviceCoding:
    """See Coding. `total_bytes`: of all tokens."""

    device: DeviceCodec
    codec: Codec
    total_bytes: int
    slots: Callable[[int, int], torch.Tensor]

    def size(self, tokens: int) -> int:
        """See Coding."""
        return self.device.size(self.codec, tokens)

    def code(self, start: int, end: int, out: torch.Tensor) -> None:
        """See Coding."""
        self.device.encode(self.codec, self.slots(start, end), out)

    def staged(self, start: int, end: int, coded: torch.Tensor) -> CodedSegment:
        """See Coding."""
        return self.device.staged(self.codec, start, end, coded)
