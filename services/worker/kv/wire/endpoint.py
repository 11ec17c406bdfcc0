"""One rank's KV side put together: staging pool, server and puller, and the events about them.

This is all that a connector needs, whatever the engine; the emulated engine uses it as well as vLLM's
connector.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.events import EventSender, PullEnded, StagedChunk, StagingFailed
from services.worker.kv.staging import Segment, StagingPool
from services.worker.kv.wire.frames import Prefetch, RankStats
from services.worker.kv.wire.importing import ImportShape, Load, PullLimits, PullResult
from services.worker.kv.wire.puller import Puller
from services.worker.kv.wire.server import ControlHooks, ExportIdentity, KvServer, ServerCounters
from services.worker.kv.wire.serving import ExportShape
from services.worker.kv.wire.transport import ZmqTransport
from shared.domain.kv import Codec, KvHandle


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where one rank listens, who it is, and its bounds."""

    address: str
    events: str
    identity: ExportIdentity
    staging_bytes: int = 256 << 20
    stage_wait_s: float = 0.05
    lease_s: float = 60.0
    limits: PullLimits = field(default_factory=PullLimits)
    curve: tuple[str, str] | None = None


@dataclass(slots=True)
class Faults:
    """Fault injection for tests: corrupt exported payloads on the wire."""

    corrupt: bool = False


class KvEndpoint:
    """Exports and imports KV for one rank. `fill(segment, kv)` of `stage` runs on the caller's thread."""

    def __init__(
        self, settings: EndpointSettings, export: ExportShape, import_: ImportShape,
        on_end: Callable[[PullResult], None], faults: Faults | None = None,
    ) -> None:  # fmt: skip
        """Binds and starts at once. Raises OSError when an address cannot be had."""
        faults = faults or Faults()
        self._settings = settings
        self._export = export
        self._on_end = on_end
        self._rank = export.rank
        self._events = EventSender(settings.events)
        self._pool = StagingPool(settings.staging_bytes, settings.lease_s, on_change=self._staged)
        hooks = ControlHooks(prefetch=self._prefetch, drop=self._drop, stats=self._import_stats)
        self._server = KvServer(
            settings.address, ZmqTransport(settings.curve), self._pool, export, settings.identity, hooks,
            corrupt=lambda: faults.corrupt,
        )  # fmt: skip
        self._puller = Puller(ZmqTransport(settings.curve), import_, self._ended, settings.limits)
        self._server.start()
        self._puller.start()

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

    def check_alive(self) -> None:
        """Raise RuntimeError when a thread of this endpoint has ended: the rank cannot do its work any more."""
        if not (self._server.alive and self._puller.alive):
            raise RuntimeError(f"the KV endpoint of rank {self._rank} has lost a thread; see its log")

    def stage(
        self, transfer_id: str, codec: Codec, start: int, end: int, last: bool,
        fill: Callable[[int, int, torch.Tensor], None],
    ) -> None:  # fmt: skip
        """Stage tokens [start, end): `fill(start, end, kv)` copies KV into `kv` [layers, 2, tokens, heads,
        dim].

        Never raises for want of room: the transfer then fails, and an event says so.
        """

        def segments() -> Iterator[Segment]:
            step = self._export.segment_tokens()
            for first in range(start, end, step):
                until = min(end, first + step)
                shape = (self._export.layers, 2, until - first, self._heads, self._export.head_dim)
                kv = torch.empty(shape, dtype=self._export.dtype)
                fill(first, until, kv)
                yield Segment(first, until, kv)

        size = self._export.chunk_bytes(end - start)
        try:
            total = self._pool.append(transfer_id, codec, segments, size, last, self._settings.stage_wait_s)
        except KvError as error:
            if error.fault is KvFault.REFUSED and error.message:  # the first refusal, not an echo of it
                self._events.send(StagingFailed(transfer_id, self._rank, str(error)))
            return
        self._events.send(StagedChunk(transfer_id, self._rank, end, last, total))

    def release(self, transfer_id: str) -> None:
        """Drop what is staged for the transfer."""
        self._pool.release(transfer_id)

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
        self._server.stop()
        self._puller.stop()
        self._events.close()

    @property
    def _heads(self) -> int:
        return self._export.head_end - self._export.head_start

    def _staged(self) -> None:
        self._server.wake()

    def _prefetch(self, prefetch: Prefetch) -> None:
        if prefetch.handle.fingerprint != self._settings.identity.fingerprint:
            raise KvError(KvFault.FINGERPRINT)
        if not 0 < prefetch.tokens <= prefetch.handle.tokens or not 0 < prefetch.timeout_s < 3600:
            raise KvError(KvFault.INVALID)
        self._puller.prefetch(prefetch)

    def _drop(self, transfer_id: str) -> None:
        self._puller.cancel(transfer_id, prefetch_only=True)

    def _ended(self, result: PullResult) -> None:
        self._on_end(result)
        self._events.send(PullEnded(
            result.transfer_id, self._rank, result.ok, result.error, result.tokens, result.wire_bytes,
            result.started_s, result.ended_s, result.prefetched,
        ))  # fmt: skip

    def _import_stats(self) -> RankStats:
        counters = self._puller.counters
        return RankStats(
            pulling=counters.pulling, inbox_bytes=counters.inbox_bytes, received_bytes=counters.received_bytes,
            pulls_ok=counters.ok, pulls_failed=counters.failed, prefetches=counters.prefetches,
            events_lost=self._events.lost, dropped_messages=counters.dropped,
        )  # fmt: skip
