"""The exporter's endpoint of one rank: a thread that serves pulls from the staging pool.

`Serving` is the state of one pull and decides which frame is sent next, without sockets or threads.
"""

import logging
import threading
import time
from collections.abc import Callable
from itertools import chain

import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.codec import decode_into, encode
from services.worker.kv.rank_messages import RankStats
from services.worker.kv.shards import RankShape
from services.worker.kv.staging import CodedSegment, Segment, StagingPool, Transfer
from services.worker.kv.wire import protocol
from services.worker.kv.wire.importing import dtype_name
from services.worker.kv.wire.protocol import Buffer, Frame
from services.worker.kv.wire.tcp_transport import TcpTransport

_log = logging.getLogger(__name__)
_MAX_SERVINGS = 1024
_MAX_CONSUMERS = 1024
_TURN_S = 0.5  # between two looks at leases and deadlines
_BURST = 256  # messages handled before pulls go on: a peer that floods does not hold up the others

_PullKey = tuple[bytes, int]  # the peer and the id that it gave the pull


class KvServer:
    def __init__(
        self,
        address: str,
        transport: TcpTransport,
        pool: StagingPool,
        shapes: tuple[RankShape, ...],
        generation: int,
        fingerprint: str,
        stats: RankStats,
        corrupt: Callable[[], bool],
        on_death: Callable[[str, BaseException], None],
        enter: Callable[[], None],
    ) -> None:
        """Binds at once. Raises OSError when the address is taken. `shapes`: of the rank, by component. `stats` counts
        pulls and bytes that were sent; `corrupt` is fault injection for tests.

        On the server's thread `enter` is called first, and `on_death(thread, error)` when a bug ends it.
        """
        self.stats = stats
        self.dropped = 0  # messages that are malformed
        self._transport = transport
        self._listener = transport.listen(address)
        self._pool = pool
        self._shapes = shapes
        self._generation = generation
        self._fingerprint = fingerprint
        self._corrupt = corrupt
        self._on_death = on_death
        self._enter = enter
        self._servings: dict[_PullKey, Serving] = {}
        self._stopping = False
        self._expire_mono = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-server", daemon=True)

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def serving(self) -> int:
        return len(self._servings)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._transport.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._enter()
            while not self._stopping:
                self._transport.wait(_TURN_S)
                self._receive()
                while self._pump() and not self._stopping:
                    self._transport.wait(0.0)
                    self._receive()
                self._expire()
        except Exception as error:
            _log.exception("the KV server of rank %d ended", self._shapes[0].rank)
            self._on_death("server", error)
        finally:
            self._transport.close()

    def _receive(self) -> None:
        for _ in range(_BURST):
            if (message := self._listener.receive()) is None:
                return
            peer, body = message
            request = protocol.decode_request(body)
            if request is None:
                self.dropped += 1
                self._send(peer, protocol.Unread())
            else:
                self._handle(peer, request)

    def _handle(self, peer: bytes, request: protocol.Request) -> None:
        match request:
            case protocol.Pull():
                fault = self._objection(request)
                if fault is None:
                    shape = self._shapes[request.component]
                    self._servings[peer, request.pull_id] = Serving(request, shape, time.monotonic())
                else:
                    self.stats.pulls_refused += 1
                    self._refuse(peer, request.pull_id, KvError(fault))
            case protocol.Credit():
                serving = self._servings.get((peer, request.pull_id))
                if serving is None:  # an importer that repeats its grant has not received all frames
                    self._refuse(peer, request.pull_id, KvError(KvFault.PROTOCOL, "no such pull is under way"))
                elif not serving.grant(request.granted_bytes, time.monotonic()):
                    self._send(peer, protocol.Sent(request.pull_id, serving.frames))
            case protocol.Cancel():
                self._servings.pop((peer, request.pull_id), None)
            case protocol.Confirm():
                if request.generation == self._generation and request.consumers <= _MAX_CONSUMERS:
                    self._pool.confirm(request.transfer_id, request.rank, request.consumers)
            case protocol.Renew():
                if request.generation == self._generation:
                    self._pool.renew(request.transfer_id)

    def _objection(self, pull: protocol.Pull) -> KvFault | None:
        if pull.generation != self._generation:
            return KvFault.STALE
        if pull.fingerprint != self._fingerprint:
            return KvFault.FINGERPRINT
        if not 0 <= pull.component < len(self._shapes):
            return KvFault.INVALID
        shape = self._shapes[pull.component]
        tokens = 0 <= pull.token_start < pull.token_end
        (first_layer, last_layer), (first_head, last_head) = shape.layers, shape.heads
        layers = first_layer <= pull.layer_start < pull.layer_end <= last_layer
        heads = first_head <= pull.head_start < pull.head_end <= last_head
        credit = 0 < pull.credit_bytes <= protocol.MAX_WINDOW_BYTES
        timeout = 0 < pull.timeout_s < protocol.MAX_LIFE_S
        if not (tokens and layers and heads and credit and timeout) or len(self._servings) >= _MAX_SERVINGS:
            return KvFault.INVALID
        return None

    def _pump(self) -> bool:
        """Send one frame of each pull that can go on; whether any was sent and pulls remain."""
        sent = False
        for key, serving in list(self._servings.items()):
            try:
                sent |= self._pump_one(key, serving)
            except KvError as error:
                self._fail(key, error)
            except Exception:
                _log.exception("a pull of %s failed", serving.pull.transfer_id)
                self._fail(key, KvError(KvFault.INTERNAL))
        return sent and bool(self._servings)

    def _pump_one(self, key: _PullKey, serving: "Serving") -> bool:
        peer, _ = key
        transfer = self._pool.open(serving.pull.transfer_id)
        if transfer is None or not self._listener.sends_at_once(peer):
            return False
        corrupt = self._corrupt()
        next_frame = serving.next_frame(transfer, self._generation, seal=corrupt or not self._listener.seals)
        if next_frame is None:
            return False
        frame, payload, digest = next_frame
        payload, digest = (_corrupted(payload), None) if corrupt else (payload, digest)
        if not self._send(peer, frame, payload, digest):
            self._servings.pop(key, None)
            return False
        self.stats.sent_bytes += len(payload)
        if serving.finished:
            self._servings.pop(key, None)
            self.stats.pulls_served += 1
        else:
            self._servings[key] = self._servings.pop(key)  # other pulls on the same connection come first the next time
        return True

    def _fail(self, key: _PullKey, error: KvError) -> None:
        serving = self._servings.pop(key)
        self.stats.pulls_refused += 1
        self._refuse(key[0], serving.pull.pull_id, error)

    def _refuse(self, peer: bytes, pull_id: int, error: KvError) -> None:
        self._send(peer, protocol.Failed(pull_id, error.fault.value, error.message))

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._expire_mono:
            return
        self._expire_mono = now + _TURN_S
        self._pool.expire()
        for key, serving in list(self._servings.items()):
            if serving.deadline_mono <= now:
                self._fail(key, KvError(KvFault.TIMEOUT, "the importer sent nothing for too long"))

    def _send(
        self, peer: bytes, message: protocol.Message, payload: Buffer | None = None, digest: int | None = None
    ) -> bool:
        return self._listener.send(peer, protocol.encode_message(message), payload, digest)


def _corrupted(payload: Buffer) -> Buffer:
    copy = bytearray(payload)
    copy[len(copy) // 2] ^= 0x40
    return copy


class Serving:
    """State of one pull: a cursor over segments and layers, and the remaining grant."""

    def __init__(self, pull: protocol.Pull, shape: RankShape, now_mono: float) -> None:
        self.pull = pull
        self.frames = 0
        self.sent_bytes = 0
        self._granted_bytes = pull.credit_bytes
        self._renew(now_mono)
        self._shape = shape
        self._segment = 0
        self._restored: Segment | None = None
        self._token = pull.token_start
        self._layer = pull.layer_start

    def grant(self, granted_bytes: int, now_mono: float) -> bool:
        """The importer still wants the pull and grants that much in total; whether that is more than before."""
        before, most = self._granted_bytes, self.sent_bytes + protocol.MAX_WINDOW_BYTES
        self._granted_bytes = max(before, min(granted_bytes, most))
        self._renew(now_mono)
        return self._granted_bytes > before

    def _renew(self, now_mono: float) -> None:
        self.deadline_mono = now_mono + self.pull.timeout_s

    @property
    def finished(self) -> bool:
        return self._token >= self.pull.token_end

    def next_frame(self, transfer: Transfer, generation: int, *, seal: bool) -> tuple[Frame, Buffer, int | None] | None:
        """The next frame, its payload and, where it is known, the checksum of that; None while nothing is staged for it
        or the grant is used up. `seal`: the frame carries the checksum.

        Raises KvError when the transfer is complete and has not all tokens of the pull, or cannot be coded.
        """
        if self.sent_bytes >= self._granted_bytes or self.finished:
            return None
        segment = self._find(transfer)
        if segment is None:
            if transfer.complete:
                raise KvError(KvFault.INVALID, f"only {transfer.token_end} tokens were exported")
            return None
        end = min(segment.token_end, self.pull.token_end)
        digest = None
        staged = self._staged(segment, end) if isinstance(segment, CodedSegment) else None
        if staged is not None:
            last_layer, payload = staged
        else:
            segment = self._decoded(segment) if isinstance(segment, CodedSegment) else segment
            heads = self.pull.head_end - self.pull.head_start
            layers = self._shape.layers_a_frame(end - self._token, heads, self.pull.codec)
            last_layer = min(self.pull.layer_end, self._layer + layers)
            payload, digest = self._payload(segment, last_layer, end)
        if seal and digest is None:
            digest = protocol.checksum(payload)
        frame = self._header(transfer, generation, last_layer, end, digest or 0 if seal else 0)
        self._advance(last_layer, end, len(payload))
        return frame, payload, digest

    def _find(self, transfer: Transfer) -> Segment | CodedSegment | None:
        segments = transfer.segments.get(self.pull.component, [])
        while self._segment < len(segments):
            segment = segments[self._segment]
            if segment.token_start > self._token:
                raise KvError(KvFault.INVALID, f"token {self._token} was not exported, only from {segment.token_start}")
            if segment.token_end > self._token:
                return segment
            self._segment += 1
        return None

    def _staged(self, segment: CodedSegment, end: int) -> tuple[int, Buffer] | None:
        """The last layer of a staged payload that is the next frame, and the payload; None where the pull divides
        tokens, heads or layers in another way.
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
        """The segment decoded, to be coded again in other pieces. The two codings together err by at most a step,
        one alone by half a step.
        """
        if self._restored is None or self._restored.token_start != segment.token_start:
            layers, sides, tokens, heads, dim = self._shape.chunk_shape(segment.token_end - segment.token_start)
            kv = torch.empty(layers, sides, tokens, heads, dim, dtype=self._shape.dtype)
            for each in segment.payloads:
                decode_into(each.payload, kv.dtype, segment.codec, kv[each.start : each.end])
            self._restored = Segment(segment.token_start, segment.token_end, kv)
        return self._restored

    def _payload(self, segment: Segment, last_layer: int, end: int) -> tuple[Buffer, int | None]:
        """The coded KV of layers up to `last_layer` and tokens up to `end`, and its checksum where that is known. It is
        a view where whole segments and all heads are wanted unchanged.
        """
        pull = self.pull
        whole = self._token == segment.token_start and end == segment.token_end
        if pull.codec.lossy or not whole or (pull.head_start, pull.head_end) != self._shape.heads:
            return encode(self._cut(segment, self._layer, last_layer, end), pull.codec).numpy().data, None
        first, layer_bytes = self._shape.layers[0], self._shape.token_bytes * (end - self._token)
        start, last = self._layer - first, last_layer - first
        return segment.data[start * layer_bytes : last * layer_bytes], segment.digest(start, last)

    def _cut(self, segment: Segment, layer: int, last_layer: int, end: int) -> torch.Tensor:
        first_layer, first_head = self._shape.layers[0], self._shape.heads[0]
        first = self.pull.head_start - first_head
        heads = slice(first, first + self.pull.head_end - self.pull.head_start)
        tokens = slice(self._token - segment.token_start, end - segment.token_start)
        return segment.kv[layer - first_layer : last_layer - first_layer, :, tokens, heads]

    def _header(self, transfer: Transfer, generation: int, last_layer: int, end: int, digest: int) -> Frame:
        pull, shape = self.pull, self._shape
        first = shape.layers[0]
        return Frame(
            pull_id=pull.pull_id,
            sequence=self.frames,
            transfer_id=transfer.transfer_id,
            generation=generation,
            codec=pull.codec,
            dtype=dtype_name(shape.dtype),
            layer_start=self._layer,
            layer_end=last_layer,
            layers=shape.shards.layers,
            token_start=self._token,
            token_end=end,
            head_start=pull.head_start,
            head_end=pull.head_end,
            head_dim=shape.head_dim,
            rank=shape.rank,
            ranks=shape.shards.ranks,
            checksum=digest,
            component=pull.component,
            sides=shape.sides,
            scales=tuple(chain.from_iterable(shape.scales[self._layer - first : last_layer - first])),
        )

    def _advance(self, last_layer: int, end: int, size_bytes: int) -> None:
        self.frames += 1
        self.sent_bytes += size_bytes
        self._layer = last_layer
        if last_layer == self.pull.layer_end:
            self._layer = self.pull.layer_start
            self._token = end
