"""The KV side of one rank: staging pool, server, puller, transports, and the events that report on them.

A connector needs nothing else, whatever the engine. Emulated instances move no KV and have no endpoint.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from services.worker.kv import KvError, KvFault, rank_messages
from services.worker.kv.codec import prepare
from services.worker.kv.device import Copies
from services.worker.kv.rank_control import ControlServer
from services.worker.kv.rank_events import EventSender
from services.worker.kv.rank_messages import PullEnded, RankStats
from services.worker.kv.shards import RankShape, held_bytes
from services.worker.kv.staging import (
    LEASE_RENEWALS,
    Bytes,
    HeapMemory,
    Piece,
    PinnedMemory,
    Rows,
    Staged,
    StagingPool,
    plain,
)
from services.worker.kv.wire.importing import Load, PullLimits
from services.worker.kv.wire.nixl_agent import NIXL_SCHEME
from services.worker.kv.wire.nixl_transport import NixlTransport
from services.worker.kv.wire.protocol import MAX_LIFE_S, MAX_WINDOW_BYTES
from services.worker.kv.wire.puller import OnEnd, Puller
from services.worker.kv.wire.server import KvServer
from services.worker.kv.wire.tcp_transport import TcpTransport
from shared.domain.kv import Codec, KvHandle

UNDER_WAY_BYTES = 64 << 20  # staged KV that was released while frames of it are still being sent


class KvSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an instance's ranks export and import KV: vLLM's `kv_connector_extra_config`.

    The scheme of an endpoint is the transport: `kv` is TCP; `nixl` is TCP with NIXL for the payloads, in both
    directions, with peers that use it too.
    """

    endpoints: tuple[str, ...]  # one for each rank, stage by stage, as in KvHandle.endpoints
    events: str  # where the worker's KvEvents listens, which must be bound first
    generation: int  # InstanceInfo.generation
    fingerprint: str  # Compatibility.fingerprint
    control_key: str  # a random text that the worker's SocketControl presents
    instance_id: str = ""
    staging_bytes: int | None = None  # bound of one rank's export pool; None: in proportion to its KV
    lease_s: float = 60.0  # staged KV that is neither pulled nor renewed for so long is dropped
    lease_renewals: int = LEASE_RENEWALS  # of one transfer's lease, by importers that wait for blocks
    pull_timeout_s: float = 10.0  # an import without progress for so long fails
    connect_timeout_s: float = 2.0  # an import fails when an exporter cannot be reached for so long
    inbox_bytes: int = 64 << 20  # bound of one rank's prefetched KV
    controls: tuple[str, ...] = ()  # ZeroMQ addresses for SocketControl, one for each rank; empty where none is used
    connections: int = 1  # to each exporter rank, for imports of 8 MB and more
    lossy: bool = False  # load the codecs at the start, not with the first coded KV
    curve_public: str = ""  # CurveZMQ pair of the cluster (Z85)
    curve_secret: str = ""
    encrypted: bool = True  # with a pair: KV is sent over TLS; False: both sides prove that they have the pair
    nixl_trusted: bool = False  # NIXL with other hosts: only this cluster reaches the networks of UCX
    fault: str = ""  # fault injection for tests: "zero" or "corrupt"
    adapters: dict[str, str] = {}  # digests of the cluster file's LoRA adapters, by name
    precision: str = ""  # InstanceInfo.precision

    @property
    def nixl(self) -> bool:
        """Whether this instance uses NIXL with peers that use it too."""
        return any(each.startswith(f"{NIXL_SCHEME}://") for each in self.endpoints)

    @property
    def curve(self) -> tuple[str, str] | None:
        return (self.curve_public, self.curve_secret) if self.curve_public else None

    @property
    def limits(self) -> PullLimits:
        return PullLimits(self.connect_timeout_s, self.pull_timeout_s, self.inbox_bytes, connections=self.connections)


def rows_of(shapes: Sequence[RankShape]) -> list[Rows]:
    """What host memory holds for the components of a rank."""
    return [Rows(shape.chunk_shape, shape.dtype, shape.segment_tokens()) for shape in shapes]


def host_copies(shapes: Sequence[RankShape], staging_bytes: int, *, fixed: bool) -> Copies:
    """For a cache in host memory. `fixed`: into memory that is allocated once, so that NIXL can register it."""
    rows = rows_of(shapes)
    return Copies(PinnedMemory(rows, staging_bytes + UNDER_WAY_BYTES, plain) if fixed else HeapMemory(rows))


@dataclass(slots=True)
class Faults:
    """Fault injection for tests: corrupt exported payloads on the wire."""

    corrupt: bool = False


class KvEndpoint:
    """Exports and imports KV for one rank."""

    def __init__(
        self,
        settings: KvSettings,
        shapes: tuple[RankShape, ...],
        on_end: OnEnd,
        staging_bytes: int,
        faults: Faults | None = None,
        copies: Copies | None = None,
        limits: PullLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds and starts at once. `shapes`: of the rank, by component. `copies`: how KV leaves the cache, by default
        one in host memory; closed with this. `limits` are those of the settings by default; `clock` is that of the
        leases. Raises OSError when an address cannot be bound.
        """
        if settings.lossy:
            for dtype in {shape.dtype for shape in shapes if shape.codec(Codec.INT8) is Codec.INT8}:
                prepare(dtype)
        faults, limits = faults or Faults(), limits or settings.limits
        self.settings = settings
        self._shapes = shapes
        self._on_end = on_end
        self._rank = shapes[0].rank
        self._stats = RankStats(rank=self._rank, staging_limit_bytes=staging_bytes)
        self.copies = copies or host_copies(shapes, staging_bytes, fixed=settings.nixl)
        # The server's and the puller's thread have a transport each. Prefetched KV stays where NIXL has read it to; the
        # window is for KV that passes through.
        self.exporting = self._transport(staging=self.copies.memory.slabs)
        self.importing = self._transport(receiving_bytes=limits.inbox_bytes + MAX_WINDOW_BYTES)
        self.host_block_s: Callable[[], float] = lambda: 0.0  # of the rank's store, once it has one
        self._events = EventSender(settings.events)
        self.pool = StagingPool(
            staging_bytes,
            settings.lease_s,
            clock,
            on_change=self.exporting.wake,
            on_end=lambda transfer_id, left: self._events.send(
                rank_messages.TransferEnded(transfer_id, self._rank, left)
            ),
            renewals=settings.lease_renewals,
            stats=self._stats,
        )
        enter, died = self.copies.enter, self._thread_ended
        self.server = KvServer(
            address=settings.endpoints[self._rank],
            transport=self.exporting,
            pool=self.pool,
            shapes=shapes,
            generation=settings.generation,
            fingerprint=settings.fingerprint,
            stats=self._stats,
            corrupt=lambda: faults.corrupt,
            on_death=died,
            enter=enter,
        )
        self.puller = Puller(self.importing, shapes, self._ended, limits, self._stats, died, enter)
        self._control = (
            ControlServer(settings.controls[self._rank], settings.control_key, settings.curve, self.carry_out, died)
            if settings.controls
            else None
        )
        self.copies.start(died)
        self.server.start()
        self.puller.start()

    def _transport(self, staging: Sequence[Bytes] = (), receiving_bytes: int = 0) -> TcpTransport:
        settings = self.settings
        if not settings.nixl:
            return TcpTransport(settings.curve, encrypted=settings.encrypted)
        return NixlTransport(
            settings.curve,
            self._stats,
            encrypted=settings.encrypted,
            trusted=settings.nixl_trusted,
            staging=staging,
            receiving_bytes=receiving_bytes,
        )

    @property
    def address(self) -> str:
        """Where the rank listens, with the port that it was given."""
        return self.server.address

    @property
    def staged_bytes(self) -> int:
        return self.pool.staged_bytes

    def stage(
        self, transfer_id: str, tokens: tuple[int, int], total: int, pieces: Sequence[Piece], first: int = 0
    ) -> None:
        """Stage tokens [start, end) of a transfer of tokens [first, total): of each component the piece that
        `RankShape.kept` names.

        Without room the transfer fails, which an event reports; this neither waits nor raises for it. Pieces may only
        issue their copies, and KV can be pulled once they are done: see `device.Copies`.
        """
        size = sum(map(self._size_of, pieces))
        whole, last = held_bytes(self._shapes, total, first), tokens[1] == total
        try:
            self.pool.admit(transfer_id, size, whole, first)
        except KvError as error:
            if error.fault is KvFault.REFUSED and error.message:  # the first refusal, not an echo of it
                self._events.send(rank_messages.StagingFailed(transfer_id, self._rank, str(error)))
            return

        def done(result: Staged | Exception) -> None:
            if isinstance(result, Exception):
                self._not_staged(transfer_id, size, result)
                return
            try:
                staged_bytes = self.pool.commit(transfer_id, tokens, result, size, last)
            except KvError:  # the transfer ended meanwhile, and its end has been reported
                return
            self._events.send(rank_messages.StagedChunk(transfer_id, self._rank, tokens[1], last, staged_bytes))

        try:
            self.copies.stage(pieces, done)
        except KvError as error:
            self._not_staged(transfer_id, size, error)
        except BaseException:
            self.pool.abandon(transfer_id, size)
            raise

    def _size_of(self, piece: Piece) -> int:
        if piece.coding is not None:
            return piece.coding.total_bytes
        return self._shapes[piece.component].chunk_bytes(piece.end - piece.start)

    def _not_staged(self, transfer_id: str, size: int, error: Exception) -> None:
        self.pool.abandon(transfer_id, size, error.fault if isinstance(error, KvError) else KvFault.INTERNAL)
        self._events.send(rank_messages.StagingFailed(transfer_id, self._rank, str(error)))

    def carry_out(self, operation: rank_messages.Operation) -> RankStats | None:
        """An operation of the worker. Any thread may call it; it does not wait. Raises KvError for a prefetch that is
        not valid.
        """
        match operation:
            case rank_messages.Release(transfer_id):
                self.release(transfer_id)
            case rank_messages.Prefetch(handle, tokens, keep_s):
                if handle.fingerprint != self.settings.fingerprint:
                    raise KvError(KvFault.FINGERPRINT)
                if not handle.endpoints or not handle.start < tokens <= handle.tokens or not 0 < keep_s < MAX_LIFE_S:
                    raise KvError(KvFault.INVALID)
                self.puller.post(lambda imports: imports.prefetch(handle, tokens, keep_s))
            case rank_messages.Accepted(transfer_id):
                self.puller.post(lambda imports: imports.accept(transfer_id))
            case rank_messages.Drop(transfer_id):
                self.puller.post(lambda imports: imports.cancel(transfer_id, prefetch_only=True))
            case rank_messages.RenewLease(handle):
                self.puller.post(lambda imports: imports.renew(handle))
            case rank_messages.Stats():
                return self.stats()
        return None

    def release(self, transfer_id: str) -> None:
        self.pool.release(transfer_id)
        self.puller.post(lambda imports: imports.cancel(transfer_id, prefetch_only=True))

    def stats(self) -> RankStats:
        control = self._control.dropped if self._control is not None else 0
        return msgspec.structs.replace(
            self._stats,
            staged_bytes=self.pool.staged_bytes,
            transfers=len(self.pool),
            serving=self.server.serving,
            host_block_s=self.host_block_s(),
            events_lost=self._events.lost,
            dropped_messages=self.server.dropped + self.puller.imports.dropped + control,
        )

    def load(self, load: Load) -> None:
        """Import into an engine's blocks; `on_end` follows, once."""
        self.puller.load(load)

    def cancel(self, transfer_id: str) -> None:
        """End an import; its `on_end` follows promptly."""
        self.puller.post(lambda imports: imports.cancel(transfer_id))

    def skip(self, handle: KvHandle, error: str) -> None:
        """Nothing will be pulled: all of it is cached here (`error` empty), or it cannot be used. The exporters are
        notified, and an event reports it.
        """
        self.cancel(handle.transfer_id)
        self.puller.post(lambda imports: imports.peers.confirm(handle))
        self._events.send(PullEnded.without_pull(handle.transfer_id, self._rank, error))

    def stop(self) -> None:
        self.copies.close()
        self.server.stop()
        self.puller.stop()
        if self._control is not None:
            self._control.close()
        self._events.close()

    def _thread_ended(self, thread: str, error: BaseException) -> None:
        self._events.send(rank_messages.ThreadEnded(self._rank, thread, f"{type(error).__name__}: {error}"))

    def _ended(self, request_id: str, ended: PullEnded) -> None:
        self._on_end(request_id, ended)
        self._events.send(ended)
