"""One rank's KV side put together: staging pool, server and puller, and the events about them.

This is all that a connector needs, whatever the engine. Emulated instances move no KV and have none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.kv.codec import prepare
from services.worker.kv.device import Copies, Fill, HostCopies
from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.host_memory import HeapMemory, PinnedMemory, plain
from services.worker.kv.rank_links import EventSender, PullEnded, StagedChunk, StagingFailed, ThreadEnded, TransferEnded
from services.worker.kv.staging import LEASE_RENEWALS, Coding, Staged, StagingPool
from services.worker.kv.wire.importing import ImportShape, Load, PullLimits, PullResult
from services.worker.kv.wire.nixl_agent import NIXL_SCHEME, NixlCounters, NixlUse
from services.worker.kv.wire.nixl_transport import NixlTransport
from services.worker.kv.wire.protocol import MAX_LIFE_S, MAX_WINDOW_BYTES, Link, Listener, Place, RankStats, Transport
from services.worker.kv.wire.puller import Puller
from services.worker.kv.wire.server import ExportIdentity, ExportShape, KvServer, ServerCounters
from services.worker.kv.wire.tcp_transport import TcpTransport
from services.worker.kv.wire.zmq_transport import ZmqTransport
from shared.domain.kv import KvHandle

# MERGED transports.py
# All transports behind one: the scheme of an address says which. `kv://` is TCP, `tcp://` and `ipc://` are ZeroMQ;
# `nixl://` is TCP, too, from an exporter whose memory can be read by NIXL, by whoever has it.


_TCP_SCHEMES = ("kv://", f"{NIXL_SCHEME}://")
_TURN_S = 0.001  # ZeroMQ's sockets are looked at so often while NIXL is at it


class Transports:
    """See Transport. Every instance can connect by every scheme. What an exporter listens on is its setting, and so is
    whether it uses NIXL, in either direction.

    ZeroMQ's context, which has threads of its own, is made for the first address that needs it.
    """

    def __init__(
        self, curve: tuple[str, str] | None = None, nixl: NixlUse | None = None, *, encrypted: bool = True
    ) -> None:
        """`curve` is the cluster's key pair; `encrypted`: see TcpTransport. ZeroMQ is encrypted with any pair. Raises
        ValueError for one that is none.
        """
        self._curve = curve
        tcp = TcpTransport(curve, encrypted=encrypted)
        self._nixl = NixlTransport(tcp, nixl) if nixl is not None else None
        self._tcp = self._nixl or tcp
        self._zmq: ZmqTransport | None = None

    @property
    def nixl(self) -> NixlCounters:
        """What went by NIXL, and did not."""
        return self._nixl.counters if self._nixl is not None else NixlCounters()

    def listen(self, address: str) -> Listener:
        """See Transport."""
        return self._of(address).listen(address)

    def connect(self, address: str, place: Place | None = None) -> Link:
        """See Transport."""
        return self._of(address).connect(address, place)

    def wait(self, timeout_s: float) -> list[Link]:
        """See Transport."""
        if self._zmq is None:
            return self._tcp.wait(timeout_s)
        busy = self._tcp.busy
        others = self._zmq.wait(0.0 if busy else timeout_s)
        return others + self._tcp.wait(min(timeout_s, _TURN_S) if busy and not others else 0.0)

    def wake(self) -> None:
        """See Transport."""
        self._tcp.wake()

    def close(self) -> None:
        """See Transport."""
        if self._zmq is not None:
            self._zmq.close()
        self._tcp.close()

    def _of(self, address: str) -> Transport:
        if address.startswith(_TCP_SCHEMES):
            return self._tcp
        if self._zmq is None:
            self._zmq = ZmqTransport(self._curve)
            self._zmq.watch(self._tcp.fileno())
        return self._zmq


UNDER_WAY_BYTES = 64 << 20  # of staging that was released and that peers still get


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where one rank listens, who it is, and its bounds. The scheme of its address is the transport of what it exports;
    it imports by each, but by NIXL only where it exports by it, too. `control` is an address for the worker's control
    alone, where that comes over a socket.
    """

    address: str
    events: str
    identity: ExportIdentity
    staging_bytes: int = 256 << 20
    lease_s: float = 60.0
    lease_renewals: int = LEASE_RENEWALS
    limits: PullLimits = field(default_factory=PullLimits)
    curve: tuple[str, str] | None = None
    encrypted: bool = True  # with `curve`: TCP is TLS; else both sides prove that they have the pair, and that is all
    control: str = ""
    lossy: bool = False  # load the codecs before the first transfer needs one
    nixl_trusted: bool = False  # see NixlUse

    @property
    def nixl(self) -> bool:
        """Whether this rank uses NIXL, with those that do, too."""
        return self.address.startswith(f"{NIXL_SCHEME}://")


def host_copies(export: ExportShape, staging_bytes: int, *, fixed: bool) -> HostCopies:
    """For a cache in host memory. `fixed`: into memory that is had once and for all, so that it can be registered."""
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
        Raises OSError when an address cannot be had.
        """
        if settings.lossy:
            prepare(export.dtype)
        faults = faults or Faults()
        self._settings = settings
        self._export = export
        self._on_end = on_end
        self._rank = export.rank
        self._copies = copies or host_copies(export, settings.staging_bytes, fixed=settings.nixl)
        self._exporting, self._importing = self._transports()
        self._events = EventSender(settings.events)
        self._pool = StagingPool(
            settings.staging_bytes,
            settings.lease_s,
            on_change=self._staged,
            on_end=self._transfer_ended,
            renewals=settings.lease_renewals,
        )
        self._server = KvServer(
            settings.address,
            self._exporting,
            self._pool,
            export,
            settings.identity,
            self,
            corrupt=lambda: faults.corrupt,
            on_death=self._thread_ended,
            control_address=settings.control,
            enter=self._copies.enter,
        )
        self._puller = Puller(
            self._importing,
            import_,
            self._ended,
            settings.limits,
            on_death=self._thread_ended,
            enter=self._copies.enter,
        )
        self._copies.start(self._thread_ended)
        self._server.start()
        self._puller.start()

    def _transports(self) -> tuple[Transports, Transports]:
        """One for each thread."""
        s = self._settings
        if not s.nixl:
            return Transports(s.curve, encrypted=s.encrypted), Transports(s.curve, encrypted=s.encrypted)
        # Prefetched KV stays where it was read into; the rest is for what passes through.
        receiving_bytes = s.limits.inbox_bytes + MAX_WINDOW_BYTES
        exporting = NixlUse(s.nixl_trusted, staging=self._copies.slabs)
        importing = NixlUse(s.nixl_trusted, receiving_bytes=receiving_bytes)
        return (
            Transports(s.curve, exporting, encrypted=s.encrypted),
            Transports(s.curve, importing, encrypted=s.encrypted),
        )

    @property
    def address(self) -> str:
        """Where the rank listens."""
        return self._server.address

    @property
    def staged_bytes(self) -> int:
        """Bytes in the staging pool."""
        return self._pool.staged_bytes

    @property
    def server_counters(self) -> ServerCounters:
        """What the export side has done."""
        return self._server.counters

    def stage(
        self, transfer_id: str, start: int, end: int, total: int, fill: Fill, coding: Coding | None = None
    ) -> None:
        """Stage tokens [start, end) of a transfer of `total` tokens: `fill(start, end, kv)` copies KV into `kv`
        [layers, 2, tokens, heads, dim], of this rank's layers and heads; or a `coding` brings it to the host coded.

        Neither waits nor raises for want of room: the transfer then fails, and an event says so. `fill` may only issue
        the copies, and KV can be pulled once they are done: see `device.Copies`.
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
        except KvError:  # it ended meanwhile, and whoever ended it said so
            return
        self._events.send(StagedChunk(transfer_id, self._rank, end, last, staged_bytes))

    def _not_staged(self, transfer_id: str, size: int, error: Exception) -> None:
        self._pool.abandon(transfer_id, size, error.fault if isinstance(error, KvError) else KvFault.INTERNAL)
        self._events.send(StagingFailed(transfer_id, self._rank, str(error)))

    def release(self, transfer_id: str) -> None:
        """Drop what is staged or prefetched for the transfer."""
        self._pool.release(transfer_id)
        self._puller.cancel(transfer_id, prefetch_only=True)

    def prefetch(self, handle: KvHandle, tokens: int, timeout_s: float) -> None:
        """Pull tokens [0, tokens) before the engine has blocks for them. Raises KvError for what makes no sense."""
        if handle.fingerprint != self._settings.identity.fingerprint:
            raise KvError(KvFault.FINGERPRINT)
        if not handle.endpoints or not 0 < tokens <= handle.tokens or not 0 < timeout_s < MAX_LIFE_S:
            raise KvError(KvFault.INVALID)
        self._puller.prefetch(handle, tokens, timeout_s)

    def drop(self, transfer_id: str) -> None:
        """Forget a prefetch."""
        self._puller.cancel(transfer_id, prefetch_only=True)

    def renew(self, handle: KvHandle) -> None:
        """Tell the exporters that a decode waits for blocks to pull the handle into; nothing where it is being pulled,
        which renews its lease by itself.
        """
        self._puller.renew(handle)

    def stats(self) -> RankStats:
        """Counters and levels of both sides."""
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
            dropped_messages=served.dropped + pulled.dropped,
            nixl_sent_bytes=self._exporting.nixl.sent_bytes,
            nixl_received_bytes=self._importing.nixl.received_bytes,
            nixl_failures=self._importing.nixl.failures,
            nixl_refused=self._importing.nixl.refused,
        )

    def load(self, load: Load) -> None:
        """Import into an engine's blocks; `on_end` follows, once."""
        self._puller.load(load)

    def cancel(self, transfer_id: str) -> None:
        """End an import; its `on_end` follows promptly."""
        self._puller.cancel(transfer_id)

    def skip(self, handle: KvHandle, error: str) -> None:
        """Nothing will be pulled: all of it is cached here (`error` empty), or it cannot be used. Tells both
        sides.
        """
        self._puller.cancel(handle.transfer_id)
        self._puller.confirm(handle)
        now = time.time()
        self._events.send(PullEnded(handle.transfer_id, self._rank, not error, error, 0, 0, now, now, False))

    def stop(self) -> None:
        """End all that is under way and close."""
        self._copies.close()
        self._server.stop()
        self._puller.stop()
        self._events.close()

    def _staged(self) -> None:
        self._server.wake()

    def _transfer_ended(self, transfer_id: str, staged_bytes: int) -> None:
        self._events.send(TransferEnded(transfer_id, self._rank, staged_bytes))

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
