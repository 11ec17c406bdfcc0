"""One peer's pull, as the exporter sees it: which frame is next. No sockets, no threads."""

import math
from dataclasses import dataclass

import torch

from services.worker.kv.codec import decode_into, encode, payload_bytes
from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.shards import Shards
from services.worker.kv.staging import CodedSegment, Segment, Transfer
from services.worker.kv.wire.frames import FRAME_BYTES, MAX_WINDOW_BYTES, Buffer, Frame, Pull, checksum
from shared.domain.kv import Codec


@dataclass(frozen=True, slots=True)
class ExportShape:
    """What this rank holds: its layers and heads of the model's, in `dtype`."""

    shards: Shards
    head_dim: int
    dtype: torch.dtype
    rank: int = 0

    @property
    def layers(self) -> tuple[int, int]:
        """Those of the rank: [start, end)."""
        return self.shards.layers_of(self.rank)

    @property
    def heads(self) -> tuple[int, int]:
        """Those of the rank: [start, end). Raises KvError(INVALID)."""
        return self.shards.heads_of(self.rank)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: K and V, all heads of the rank."""
        start, end = self.heads
        return 2 * (end - start) * self.head_dim * self.dtype.itemsize

    def chunk_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """[layers, 2, tokens, heads, head_dim] of that many tokens."""
        (first_layer, last_layer), (first_head, last_head) = self.layers, self.heads
        return last_layer - first_layer, 2, tokens, last_head - first_head, self.head_dim

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of that many tokens over all layers of the rank."""
        return math.prod(self.chunk_shape(tokens)) * self.dtype.itemsize

    def segment_tokens(self) -> int:
        """Tokens of a segment: as many as leave one layer within a frame, in whole groups of 32 where that
        fits.
        """
        tokens = max(1, FRAME_BYTES // self.token_bytes)
        return tokens // 32 * 32 or tokens

    def layers_a_frame(self, tokens: int, heads: int, codec: Codec) -> int:
        """Whose coded KV of so many tokens and heads goes into one payload."""
        return max(1, FRAME_BYTES // payload_bytes((1, 2, tokens, heads, self.head_dim), self.dtype, codec))


class Serving:
    """State of one pull: a cursor over segments and layers, and what the importer still grants."""

    def __init__(self, pull: Pull, shape: ExportShape, now_s: float) -> None:
        """`now_s` is monotonic."""
        self.pull = pull
        self.frames = 0
        self.sent_bytes = 0
        self._granted_bytes = pull.credit_bytes
        self._renew(now_s)
        self._shape = shape
        self._segment = 0
        self._restored: Segment | None = None
        self._token = pull.token_start
        self._layer = pull.layer_start

    def grant(self, granted_bytes: int, now_s: float) -> bool:
        """The importer has spoken: it still wants this, and grants so much in all. Whether that is more than before."""
        before, most = self._granted_bytes, self.sent_bytes + MAX_WINDOW_BYTES
        self._granted_bytes = max(before, min(granted_bytes, most))
        self._renew(now_s)
        return self._granted_bytes > before

    def _renew(self, now_s: float) -> None:
        self.deadline_s = now_s + self.pull.timeout_s

    @property
    def finished(self) -> bool:
        """Whether all that was wanted has been sent."""
        return self._token >= self.pull.token_end

    def next_frame(self, transfer: Transfer, generation: int, *, seal: bool) -> tuple[Frame, Buffer] | None:
        """The next frame and its payload; None while nothing is staged for it or the grant is used up. `seal`: the
        frame tells the payload's checksum.

        Raises KvError when the transfer is complete and shorter than what is wanted, or cannot be coded.
        """
        if self.sent_bytes >= self._granted_bytes or self.finished:
            return None
        segment = self._find(transfer)
        if segment is None:
            if transfer.complete:
                raise KvError(KvFault.INVALID, f"only {transfer.token_end} tokens were exported")
            return None
        end = min(segment.token_end, self.pull.token_end)
        staged = self._staged(segment, end) if isinstance(segment, CodedSegment) else None
        if staged is not None:
            last_layer, payload = staged
        else:
            segment = self._decoded(segment) if isinstance(segment, CodedSegment) else segment
            heads = self.pull.head_end - self.pull.head_start
            layers = self._shape.layers_a_frame(end - self._token, heads, self.pull.codec)
            last_layer = min(self.pull.layer_end, self._layer + layers)
            payload = self._payload(segment, last_layer, end)
        frame = self._header(transfer, generation, last_layer, end, checksum(payload) if seal else 0)
        self._advance(last_layer, end, len(payload))
        return frame, payload

    def _find(self, transfer: Transfer) -> Segment | CodedSegment | None:
        while self._segment < len(transfer.segments):
            segment = transfer.segments[self._segment]
            if segment.token_end > self._token:
                return segment
            self._segment += 1
        return None

    def _staged(self, segment: CodedSegment, end: int) -> tuple[int, Buffer] | None:
        """The last layer of what is staged as the next frame, and its payload; None where the pull divides tokens,
        heads or layers in another way.
        """
        pull, first = self.pull, self._shape.layers[0]
        whole = self._token == segment.token_start and end == segment.token_end
        if pull.codec is not segment.codec:
            raise KvError(KvFault.CODEC, f"staged as {segment.codec.value}")
        if not whole or (pull.head_start, pull.head_end) != self._shape.heads:
            return None
        for each in segment.payloads:
            if first + each.start == self._layer and first + each.end <= pull.layer_end:
                return first + each.end, each.payload.numpy().data
        return None

    def _decoded(self, segment: CodedSegment) -> Segment:
        """To be coded again in other pieces: an error of a step in all, at most, where one coding makes half."""
        if self._restored is None or self._restored.token_start != segment.token_start:
            layers, sides, tokens, heads, dim = self._shape.chunk_shape(segment.token_end - segment.token_start)
            kv = torch.empty(layers, sides, tokens, heads, dim, dtype=self._shape.dtype)
            for each in segment.payloads:
                decode_into(each.payload, kv.dtype, segment.codec, kv[each.start : each.end])
            self._restored = Segment(segment.token_start, segment.token_end, kv)
        return self._restored

    def _payload(self, segment: Segment, last_layer: int, end: int) -> Buffer:
        """Of layers up to `last_layer` and tokens up to `end`, coded. A view, where whole segments and all heads are
        wanted as they are.
        """
        pull = self.pull
        whole = self._token == segment.token_start and end == segment.token_end
        if pull.codec.lossy or not whole or (pull.head_start, pull.head_end) != self._shape.heads:
            return encode(self._cut(segment, self._layer, last_layer, end), pull.codec).numpy().data
        first, layer_bytes = self._shape.layers[0], self._shape.token_bytes * (end - self._token)
        return segment.data[(self._layer - first) * layer_bytes : (last_layer - first) * layer_bytes]

    def _cut(self, segment: Segment, layer: int, last_layer: int, end: int) -> torch.Tensor:
        first_layer, first_head = self._shape.layers[0], self._shape.heads[0]
        first = self.pull.head_start - first_head
        heads = slice(first, first + self.pull.head_end - self.pull.head_start)
        tokens = slice(self._token - segment.token_start, end - segment.token_start)
        return segment.kv[layer - first_layer : last_layer - first_layer, :, tokens, heads]

    def _header(self, transfer: Transfer, generation: int, last_layer: int, end: int, digest: int) -> Frame:
        return Frame(
            pull_id=self.pull.pull_id,
            sequence=self.frames,
            transfer_id=transfer.transfer_id,
            generation=generation,
            codec=self.pull.codec,
            dtype=str(self._shape.dtype).removeprefix("torch."),
            layer_start=self._layer,
            layer_end=last_layer,
            layers=self._shape.shards.layers,
            token_start=self._token,
            token_end=end,
            head_start=self.pull.head_start,
            head_end=self.pull.head_end,
            head_dim=self._shape.head_dim,
            rank=self._shape.rank,
            ranks=self._shape.shards.ranks,
            checksum=digest,
        )

    def _advance(self, last_layer: int, end: int, size_bytes: int) -> None:
        self.frames += 1
        self.sent_bytes += size_bytes
        self._layer = last_layer
        if last_layer == self.pull.layer_end:
            self._layer = self.pull.layer_start
            self._token = end
