"""The blocks of an engine's cache as the destination of an import, by the slots of its tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from services.worker.kv.device import Copies
from services.worker.kv.layout import KvLayout
from shared.domain.kv import Codec

if TYPE_CHECKING:
    from services.worker.kv.device_codec import DeviceCodec


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where one import goes: see Destination."""

    caches: list[torch.Tensor]
    layout: KvLayout
    slots: torch.Tensor
    token_start: int
    layer_start: int  # of this rank's, in the model
    head_start: int
    copies: Copies
    freed: Any  # what the blocks were used for before is done after this
    zero: bool  # fault injection: proves that tests would notice wrong KV
    codec: "DeviceCodec | None"
    null_slots: int = 0  # slots below are of the engine's null block, which stands for tokens outside of a window

    @property
    def dtype(self) -> torch.dtype:
        """Of the caches."""
        return self.caches[0].dtype

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        """See Destination."""
        first = token_start - self.token_start
        slots = self.slots[first : first + kv.shape[1]]
        if self.null_slots and not bool((kept := slots >= self.null_slots).all()):
            slots, kv = slots[kept], kv[:, kept]
            if not len(slots):
                return
        with self.copies.writing(self.freed):
            slots = self.copies.upload(slots)
            kv = self.copies.upload(kv * 0 if self.zero else kv)
            cache = self.caches[layer - self.layer_start]
            self.layout.scatter(cache, slots, head_start - self.head_start, kv)

    def take(
        self,
        layers: tuple[int, int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
        payload: torch.Tensor,
        dtype: torch.dtype,
        codec: Codec,
    ) -> bool:
        """See Destination: kernels decode it into the blocks, all layers and tokens of it at once."""
        if self.codec is None or self.zero or (codec is Codec.RAW and dtype is not self.dtype):
            return False
        head, wanted = self.head_start, slice(tokens[0] - self.token_start, tokens[1] - self.token_start)
        if self.null_slots and bool((self.slots[wanted] < self.null_slots).any()):
            return False  # what is left of it is written a layer at a time
        own = (layers[0] - self.layer_start, layers[1] - self.layer_start), (heads[0] - head, heads[1] - head)
        with self.copies.writing(self.freed):
            return self.codec.decode(*own, self.slots[wanted], payload, dtype, codec)

    def room(self, layer: int, tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        """None: blocks hold KV in an order of their own."""
        return []

    def finish(self) -> None:
        """See Destination."""
        self.copies.written()
