"""The KV side of one rank: staging pool, server, puller, transports, and the events that report on them.

A connector needs nothing else, whatever the engine. Emulated instances move no KV and have no endpoint.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.kv.codec import prepare
from services.worker.kv.device import Copies, Fill, HostCopies
from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.host_memory import Bytes, HeapMemory, PinnedMemory, plain
from services.worker.kv.rank_links import (
    ControlServer,
    Drop,
    EventSender,
    Operation,
    Prefetch,
    PullEnded,
    RankStats,
    Release,
    RenewLease,
    StagedChunk,
    StagingFailed,
    Stats,
    ThreadEnded,
    TransferEnded,
)
from services.worker.kv.staging import LEASE_RENEWALS, Coding, Staged, StagingPool
from services.worker.kv.wire.importing import ImportShape, Load, PullLimits, PullResult
from services.worker.kv.wire.nixl_agent import NIXL_SCHEME, NixlCounters, NixlUse
from services.worker.kv.wire.nixl_transport import NixlTransport
from services.worker.kv.wire.protocol import MAX_LIFE_S, MAX_WINDOW_BYTES, Transport
from services.worker.kv.wire.puller import Puller
from services.worker.kv.wire.server import ExportIdentity, ExportShape, KvServer, ServerCounters
from services.worker.kv.wire.tcp_transport import TcpTransport
from shared.domain.kv import KvHandle

UNDER_WAY_BYTES = 64 << 20  # staged KV that was released while frames of it are still being sent


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The addresses, identity and bounds of one rank.

    The scheme of `address` is the transport: `kv` is TCP; `nixl` is TCP with NIXL for the payloads, in both directions,
    with peers that use it too. `control`, where it is set, is the ZeroMQ address at which `SocketControl` reaches the
    rank, and `control_key` the key that it must present.
    """

    address: str
    events: str
    identity: ExportIdentity
    staging_bytes: int = 256 << 20
    lease_s: float = 60.0
    lease_renewals: int = LEASE_RENEWALS
    limits: PullLimits = field(default_factory=PullLimits)
    curve: tuple[str, str] | None = None
    encrypted: bool = True  # with `curve`: TLS; otherwise both sides prove that they have the pair, and KV is plain
    control: str = ""
    control_key: str = ""
    lossy: bool = False  # load the codecs before the first transfer needs one
    nixl_trusted: bool = False  # see NixlUse

    @property
    def nixl(self) -> bool:
        """Whether this rank uses NIXL with peers that use it too."""
        return self.address.startswith(f"{NIXL_SCHEME}://")


def host_copies(export: ExportShape, staging_bytes: int, *, fixed: bool) -> HostCopies:
    """For a cache in host memory. `fixed`: into memory that is allocated once, so that NIXL can register it."""
    shape, dtype, segment = export.chunk_shape, export.dtype, export.segment_tokens()
    if not fixed:
        return HostCopies(HeapMemory(shape, dtype, segment))
    return HostCopies(PinnedMemory(shape, dtype, segment, staging_bytes + UNDER_WAY_BYTES, plain))


@dataclass(slots=True)
class Faults:
    """Fault injection for tests: corrupt exported payloads on the wire."""

    corrupt: bool = False


class KvEndpoint:
    """Exports and imports KV for one rank. `fill(segment, kv)` of `stage` runs on the caller's thread."""

    def __init__(
        self,
        settings: EndpointSettings,
        export: ExportShape,
        import_: ImportShape,
        on_end: Callable[[PullResult], None],
        faults: Faults | None = None,
        copies: Copies | None = None,
    ) -> None:
        """Binds and starts at once. `copies`: how KV leaves the cache, by default one in host memory; closed with this.
        Raises OSError when an address cannot be bound.
        """
        if settings.lossy:
            prepare(export.dtype)
        faults = faults or Faults()
        self._settings = settings
        self._export = export
        self._on_end = on_end
        self._rank = export.rank
        self._copies = copies or host_copies(export, settings.staging_bytes, fixed=settings.nixl)
        # The server's and the puller's thread have a transport each. Prefetched KV stays where NIXL has read it to; the
        # window is for KV that passes through.
        exporting, self._sent_by_nixl = self._transport(staging=self._copies.slabs)
        receiving_bytes = settings.limits.inbox_bytes + MAX_WINDOW_BYTES
        importing, self._received_by_nixl = self._transport(receiving_bytes=receiving_bytes)
        self._events = EventSender(settings.events)
        self._pool = StagingPool(
            settings.staging_bytes,
            settings.lease_s,
            on_change=exporting.wake,
            on_end=lambda transfer_id, left: self._events.send(TransferEnded(transfer_id, self._rank, left)),
            renewals=settings.lease_renewals,
        )
        self._server = KvServer(
            settings.address,
            exporting,
            self._pool,
            export,
            settings.identity,
            corrupt=lambda: faults.corrupt,
            on_death=self._thread_ended,
            enter=self._copies.enter,
        )
        self._puller = Puller(
            importing, import_, self._ended, settings.limits, on_death=self._thread_ended, enter=self._copies.enter
        )
        self._control = (
            ControlServer(settings.control, settings.control_key, settings.curve, self.carry_out, self._thread_ended)
            if settings.control
            else None
        )
        self._copies.start(self._thread_ended)
        self._server.start()
        self._puller.start()

    def _transport(self, staging: Sequence[Bytes] = (), receiving_bytes: int = 0) -> tuple[Transport, NixlCounters]:
        tcp = TcpTransport(self._settings.curve, encrypted=self._settings.encrypted)
        if not self._settings.nixl:
            return tcp, NixlCounters()
        transport = NixlTransport(tcp, NixlUse(self._settings.nixl_trusted, staging, receiving_bytes))
        return transport, transport.counters

    @property
    def address(self) -> str:
        """Where the rank listens, with the port that it was given."""
        return self._server.address

    @property
    def staged_bytes(self) -> int:
        return self._pool.staged_bytes

    @property
    def server_counters(self) -> ServerCounters:
        return self._server.counters

    def stage(
        self, transfer_id: str, start: int, end: int, total: int, fill: Fill, coding: Coding | None = None
    ) -> None:
        """Stage tokens [start, end) of a transfer of `total` tokens: `fill(start, end, kv)` copies KV into `kv`
        [layers, 2, tokens, heads, dim], of this rank's layers and heads; or a `coding` brings it to the host coded.

        Without room the transfer fails, which an event reports; this neither waits nor raises for it. `fill` may only
        issue the copies, and KV can be pulled once they are done: see `device.Copies`.
        """
        size = self._export.chunk_bytes(end - start) if coding is None else coding.total_bytes
        whole, last = self._export.chunk_bytes(total), end == total
        try:
            self._pool.admit(transfer_id, size, whole)
        except KvError as error:
            if error.fault is KvFault.REFUSED and error.message:  # the first refusal, not an echo of it
                self._events.send(StagingFailed(transfer_id, self._rank, str(error)))
            return

        def done(result: Staged | Exception) -> None:
            if isinstance(result, Exception):
                self._not_staged(transfer_id, size, result)
            else:
                self._commit(transfer_id, result, size, end, last)

        try:
            self._copies.stage(start, end, fill, done, coding)
        except KvError as error:
            self._not_staged(transfer_id, size, error)
        except BaseException:
            self._pool.abandon(transfer_id, size)
            raise

    def _commit(self, transfer_id: str, segments: Staged, size: int, end: int, last: bool) -> None:
        try:
            staged_bytes = self._pool.commit(transfer_id, segments, size, last)
        except KvError:  # the transfer ended meanwhile, and its end has been reported
            return
        self._events.send(StagedChunk(transfer_id, self._rank, end, last, staged_bytes))

    def _not_staged(self, transfer_id: str, size: int, error: Exception) -> None:
        self._pool.abandon(transfer_id, size, error.fault if isinstance(error, KvError) else KvFault.INTERNAL)
        self._events.send(StagingFailed(transfer_id, self._rank, str(error)))

    def carry_out(self, operation: Operation) -> RankStats | None:
        """An operation of the worker. Any thread may call it; it does not wait. Raises KvError for a prefetch that is
        not valid.
        """
        match operation:
            case Release(transfer_id):
                self.release(transfer_id)
            case Prefetch(handle, tokens, keep_s):
                if handle.fingerprint != self._settings.identity.fingerprint:
                    raise KvError(KvFault.FINGERPRINT)
                if not handle.endpoints or not 0 < tokens <= handle.tokens or not 0 < keep_s < MAX_LIFE_S:
                    raise KvError(KvFault.INVALID)
                self._puller.post(lambda imports: imports.prefetch(handle, tokens, keep_s))
            case Drop(transfer_id):
                self._puller.post(lambda imports: imports.cancel(transfer_id, prefetch_only=True))
            case RenewLease(handle):
                self._puller.post(lambda imports: imports.renew(handle))
            case Stats():
                return self.stats()
        return None

    def release(self, transfer_id: str) -> None:
        """Drop what is staged or prefetched for the transfer."""
        self._pool.release(transfer_id)
        self._puller.post(lambda imports: imports.cancel(transfer_id, prefetch_only=True))

    def stats(self) -> RankStats:
        served, pulled, pool = self._server.counters, self._puller.counters, self._pool
        return RankStats(
            rank=self._rank,
            staged_bytes=pool.staged_bytes,
            staging_limit_bytes=pool.limit_bytes,
            transfers=len(pool),
            staging_failed=pool.staging_failed,
            leases_expired=pool.leases_expired,
            leases_renewed=pool.leases_renewed,
            serving=self._server.serving,
            sent_bytes=served.sent_bytes,
            pulls_served=served.served,
            pulls_refused=served.refused,
            pulling=pulled.pulling,
            inbox_bytes=pulled.inbox_bytes,
            received_bytes=pulled.received_bytes,
            pulls_ok=pulled.ok,
            pulls_failed=pulled.failed,
            prefetches=pulled.prefetches,
            events_lost=self._events.lost,
            dropped_messages=served.dropped + pulled.dropped + (self._control.dropped if self._control else 0),
            nixl_sent_bytes=self._sent_by_nixl.sent_bytes,
            nixl_received_bytes=self._received_by_nixl.received_bytes,
            nixl_failures=self._received_by_nixl.failures,
            nixl_refused=self._received_by_nixl.refused,
        )

    def load(self, load: Load) -> None:
        """Import into an engine's blocks; `on_end` follows, once."""
        self._puller.load(load)

    def cancel(self, transfer_id: str) -> None:
        """End an import; its `on_end` follows promptly."""
        self._puller.post(lambda imports: imports.cancel(transfer_id))

    def skip(self, handle: KvHandle, error: str) -> None:
        """Nothing will be pulled: all of it is cached here (`error` empty), or it cannot be used. The exporters are
        told, and an event reports it.
        """
        self._puller.post(lambda imports: imports.cancel(handle.transfer_id))
        self._puller.post(lambda imports: imports.confirm(handle))
        now = time.time()
        self._events.send(PullEnded(handle.transfer_id, self._rank, not error, error, 0, 0, now, now, False))

    def stop(self) -> None:
        self._copies.close()
        self._server.stop()
        self._puller.stop()
        if self._control is not None:
            self._control.close()
        self._events.close()

    def _thread_ended(self, thread: str, error: BaseException) -> None:
        self._events.send(ThreadEnded(self._rank, thread, f"{type(error).__name__}: {error}"))

    def _ended(self, result: PullResult) -> None:
        self._on_end(result)
        self._events.send(
            PullEnded(
                result.transfer_id,
                self._rank,
                result.ok,
                result.error,
                result.tokens,
                result.wire_bytes,
                result.started_s,
                result.ended_s,
                result.prefetched,
                result.transport,
            )
        )
