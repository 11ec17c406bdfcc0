"""The KV side of an instance, as its prefill and decode services use it.

Its ledger decides before a prompt is computed whether the prompt's KV fits into the staging pool of each rank.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from services.worker.engines.base import CacheExport
from services.worker.kv import rank_messages
from services.worker.kv.rank_control import KvControl
from services.worker.kv.rank_events import KvEvents
from services.worker.kv.rank_messages import PullEnded
from shared.domain.adapters import digest_of_key
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background

log = get_log(__name__)
_REFRESH_S = 0.2  # a multiple of the heartbeats' period: they share wake-ups
_REPORT_S = 1.0  # the engine may end a short job before the events of its ranks arrive
_RENEW_SHARE = 1 / 3  # of a lease: two renewals may be lost before it expires


@dataclass(slots=True, eq=False)
class ExpectedImport:
    """An import of a decode that runs here: from `expect` to `end` its reports are kept and its lease is renewed."""

    handle: KvHandle
    pulls: list[PullEnded] = field(default_factory=list)  # one for each rank on which it has ended
    complete: asyncio.Event = field(default_factory=asyncio.Event)  # every rank has reported
    renew_mono: float = 0.0  # on the port's clock, when the lease is renewed next


class KvPort:
    """Exports and imports by transfer id. This base stages nothing and moves nothing: an emulated instance needs no
    more; `ConnectorPort` is the one of a real engine.
    """

    staged_bytes = 0  # over all ranks
    nixl_failures = 0  # pairs that both have NIXL and fell back to TCP, since the start
    host_block_s = 0.0  # that the load of a block from the host tier takes, on the slowest rank; 0: not measured

    def __init__(self, template: KvHandle, adapters: Mapping[str, str] | None = None) -> None:
        """`template`: a handle of this instance, whose transfer id, tokens, codec and adapter are replaced. adapters:
        digests of the cluster file's LoRA adapters, by name.
        """
        self._template = template
        self._adapters = adapters or {}

    def start(self, tasks: Background) -> None:
        """Start what runs in the background."""

    def handle(self, transfer_id: str, tokens: int, codec: Codec, adapter: str = "") -> KvHandle:
        """The reference by which a peer can pull that export, of KV that the adapter of that key computed."""
        digest = digest_of_key(adapter, self._adapters)
        return msgspec.structs.replace(
            self._template, transfer_id=transfer_id, tokens=tokens, codec=codec, adapter=digest
        )

    def announce(self, transfer_id: str, tokens: int, owner: bytes) -> None:
        """An export of that many tokens will need room. Any thread may call this."""

    def reserve(self, transfer_id: str) -> bool:
        """Whether an announced export has room now, which it then keeps until it ends. Any thread may call this."""
        return True

    def cache_export(self, transfer_id: str, start: int, owner: bytes) -> CacheExport:
        """An export of KV that the engine holds, from token `start` on."""
        return CacheExport(
            transfer_id,
            start,
            announce=lambda tokens: self.announce(transfer_id, tokens, owner),
            has_room=lambda: self.reserve(transfer_id),
        )

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back whenever there is more room than before."""

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        """Call back once, when the first chunk of an export can be pulled before the rest is computed."""

    def forget(self, transfer_id: str) -> None:
        """Withdraw the callback of `when_staged`."""

    def expect(self, handle: KvHandle) -> ExpectedImport:
        """A decode that imports the handle begins. Until its import has begun the exporter's lease is renewed."""
        return ExpectedImport(handle)

    def end(self, expected: ExpectedImport) -> None:
        """The decode is over, however it ended: later reports of its import are dropped. Idempotent."""

    async def import_report(self, expected: ExpectedImport) -> TransferReport:
        """How an import ended; to be called after the engine is done with the job."""
        return self.known_report(expected) or TransferReport(TransferOutcome.PULLED)

    def known_report(self, expected: ExpectedImport) -> TransferReport | None:
        """How an import ends, if that is known by now. An emulated import is known once it begins, and its end may
        lie in the future.
        """
        return None

    async def release(self, transfer_ids: list[str]) -> None:
        """Free what is staged or prefetched; unknown ids are ignored. A failure is logged: leases expire anyway."""

    async def release_of(self, owner: bytes) -> None:
        """Free all exports that this owner has announced."""

    async def prefetch(self, handle: KvHandle, keep_s: float) -> None:
        """Start pulling into host memory, on all ranks; it is kept for `keep_s` unless an import takes it over."""

    async def accepted(self, transfer_id: str) -> None:
        """The decode of a prefetch was accepted: its exporters may free it once it is here. A failure is logged: they
        free it when the engine has imported it, or when their lease ends.
        """

    async def drop(self, transfer_id: str) -> None:
        """Forget a prefetch, on all ranks. A failure is logged: prefetches end by themselves."""


@dataclass(slots=True)
class _Export:
    owner: bytes
    size_bytes: int
    ranks: set[int]  # that may hold some of it
    has_room: bool = False


class ExportLedger:
    """Exports from their announcement until every rank has dropped them.

    Any thread may call `announce` and `reserve`; the event loop calls everything else.
    """

    def __init__(self, limit_bytes: int, ranks: int) -> None:
        """`limit_bytes` is the bound of one rank's pool; all sizes are those of one rank."""
        self._limit_bytes = limit_bytes
        self._ranks = ranks
        self._exports: dict[str, _Export] = {}
        self.reserved_bytes = 0
        self._lock = threading.Lock()
        self.when_room: Callable[[], None] = lambda: None  # called whenever there is more room than before

    def __len__(self) -> int:
        return len(self._exports)

    def announce(self, transfer_id: str, size_bytes: int, owner: bytes) -> None:
        """An export will need room. One that is larger than the pool needs none: the pool refuses its first chunk."""
        self.end(transfer_id)  # an id is used once; if it is not, the later export counts
        size_bytes = size_bytes if size_bytes <= self._limit_bytes else 0
        with self._lock:
            self._exports[transfer_id] = _Export(owner, size_bytes, set(range(self._ranks)))

    def reserve(self, transfer_id: str) -> bool:
        """Whether there is room for all of an announced export, which it then has.

        An export that is not announced, or has ended, need not wait: it has been given up and stages nothing.
        """
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is None or export.has_room:
                return True
            if self.reserved_bytes + export.size_bytes > self._limit_bytes:
                return False
            export.has_room = True
            self.reserved_bytes += export.size_bytes
            return True

    def dropped(self, transfer_id: str, rank: int) -> None:
        """A rank holds nothing of the export any more and will stage nothing more of it."""
        export = self._exports.get(transfer_id)
        if export is not None:
            export.ranks.discard(rank)
            if not export.ranks:
                self.end(transfer_id)

    def end(self, transfer_id: str) -> None:
        """No rank holds anything of the export; unknown ids are ignored."""
        with self._lock:
            export = self._exports.pop(transfer_id, None)
            freed = export is not None and export.has_room
            if export is not None and freed:
                self.reserved_bytes -= export.size_bytes
        if freed:
            self.when_room()

    def owned_by(self, owner: bytes) -> list[str]:
        return [transfer_id for transfer_id, export in self._exports.items() if export.owner == owner]


class ConnectorPort(KvPort):
    """The port of an engine with Polyphase's connector: operations to its ranks, events from them."""

    def __init__(
        self,
        control: KvControl,
        events: KvEvents,
        template: KvHandle,
        ledger: ExportLedger,
        size_of: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`size_of`: bytes of staging memory that so many tokens take on the rank that holds the most."""
        super().__init__(template, adapters)
        self._control = control
        self._events = events
        self._ledger = ledger
        self._size_of = size_of
        self._clock = clock
        self._staged: dict[int, int] = {}  # by rank, as of its last event or figures
        self._callbacks: dict[str, Callable[[], None]] = {}
        self.imports: dict[str, ExpectedImport] = {}  # by transfer id, of decodes that run

    @property
    def staged_bytes(self) -> int:  # type: ignore[override]
        return sum(self._staged.values())

    def start(self, tasks: Background) -> None:
        tasks.start("kv-events", self._follow())
        tasks.every("kv-stats", _REFRESH_S, self._refresh)
        tasks.every("kv-leases", _REFRESH_S, self.renew_leases)

    def announce(self, transfer_id: str, tokens: int, owner: bytes) -> None:
        self._ledger.announce(transfer_id, self._size_of(tokens), owner)

    def reserve(self, transfer_id: str) -> bool:
        return self._ledger.reserve(transfer_id)

    def when_room(self, callback: Callable[[], None]) -> None:
        self._ledger.when_room = callback

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        # The first rank's event counts: the others stage in the same step, and pulls from them wait.
        self._callbacks[transfer_id] = callback

    def forget(self, transfer_id: str) -> None:
        self._callbacks.pop(transfer_id, None)

    def expect(self, handle: KvHandle) -> ExpectedImport:
        # A second decode of the same transfer takes the place of the first.
        expected = self.imports[handle.transfer_id] = ExpectedImport(handle, renew_mono=self._clock())
        return expected

    def end(self, expected: ExpectedImport) -> None:
        if self.imports.get(expected.handle.transfer_id) is expected:
            del self.imports[expected.handle.transfer_id]

    async def import_report(self, expected: ExpectedImport) -> TransferReport:
        """All ranks in one: it failed if one failed, it lasted from the first start to the last end."""
        try:
            async with asyncio.timeout(_REPORT_S):
                await expected.complete.wait()
        except TimeoutError:
            log.warning("not every rank reported how its import ended", transfer_id=expected.handle.transfer_id)
        return _merged(expected.pulls)

    def known_report(self, expected: ExpectedImport) -> TransferReport | None:
        return _merged(expected.pulls) if expected.complete.is_set() else None

    async def release(self, transfer_ids: list[str]) -> None:
        for transfer_id in transfer_ids:
            try:
                await self._control.call(rank_messages.Release(transfer_id))
            except PolyphaseError as error:
                log.warning("release failed", transfer_id=transfer_id, error=error.message)
            finally:
                self._ledger.end(transfer_id)

    async def release_of(self, owner: bytes) -> None:
        if held := self._ledger.owned_by(owner):
            log.info("releasing the exports of a peer that is gone", transfers=len(held))
            await self.release(held)

    async def prefetch(self, handle: KvHandle, keep_s: float) -> None:
        await self._control.call(rank_messages.Prefetch(handle, handle.tokens, keep_s))

    async def accepted(self, transfer_id: str) -> None:
        try:
            await self._control.call(rank_messages.Accepted(transfer_id))
        except PolyphaseError as error:
            log.warning("exporters may free a prefetch only later", transfer_id=transfer_id, error=error.message)

    async def drop(self, transfer_id: str) -> None:
        try:
            await self._control.call(rank_messages.Drop(transfer_id))
        except PolyphaseError as error:
            log.warning("drop failed", transfer_id=transfer_id, error=error.message)

    async def renew_leases(self) -> None:
        """Renew the leases that are due, of imports that have not ended on any rank."""
        now = self._clock()
        for expected in list(self.imports.values()):
            if expected.pulls or not expected.handle.lease_s or now < expected.renew_mono:
                continue
            expected.renew_mono = now + max(_REFRESH_S, expected.handle.lease_s * _RENEW_SHARE)
            try:
                await self._control.call(rank_messages.RenewLease(expected.handle))
            except PolyphaseError as error:  # a rank does not answer; the next turn tries the next transfer
                log.debug("a lease was not renewed", transfer_id=expected.handle.transfer_id, error=error.message)
                return

    async def _follow(self) -> None:
        async for event in self._events:
            match event:
                case rank_messages.StagedChunk():
                    self._staged[event.rank] = event.staged_bytes
                    if callback := self._callbacks.pop(event.transfer_id, None):
                        # In a turn of its own: an exception in it is logged by the event loop and ends nothing here.
                        asyncio.get_running_loop().call_soon(callback)
                case rank_messages.TransferEnded():
                    self._staged[event.rank] = event.staged_bytes
                    self._ledger.dropped(event.transfer_id, event.rank)
                case rank_messages.StagingFailed():
                    log.warning("KV could not be staged", transfer_id=event.transfer_id, reason=event.reason)
                case rank_messages.ThreadEnded():
                    raise RuntimeError(f"the KV {event.thread} of rank {event.rank} died: {event.error}")
                case PullEnded():
                    expected = self.imports.get(event.transfer_id)
                    if expected is not None:  # else its decode has ended before its pull
                        expected.pulls.append(event)
                        if len(expected.pulls) == len(self._template.endpoints):
                            expected.complete.set()

    async def _refresh(self) -> None:
        """Between events, pulls and leases free some of what the ranks hold."""
        try:
            ranks = await self._control.call(rank_messages.Stats())
        except PolyphaseError as error:  # a rank in a long step; the next figures will do
            log.debug("no KV figures", error=error.message)
            return
        for rank, stats in enumerate(ranks):
            self._staged[rank] = stats.staged_bytes
        self.nixl_failures = sum(stats.nixl_failures for stats in ranks)
        self.host_block_s = max((stats.host_block_s for stats in ranks), default=0.0)


def _merged(pulls: list[PullEnded]) -> TransferReport:
    failed = next((pull for pull in pulls if not pull.ok), None)
    if failed is not None:
        return TransferReport(TransferOutcome.RECOMPUTED, error=failed.error)
    if not any(pull.tokens for pull in pulls):
        return TransferReport(TransferOutcome.CACHED)
    return TransferReport(
        TransferOutcome.PULLED,
        tokens=max(pull.tokens for pull in pulls),
        wire_bytes=sum(pull.wire_bytes for pull in pulls),
        started_s=min(pull.started_s for pull in pulls),
        ended_s=max(pull.ended_s for pull in pulls),
        transport="+".join(sorted({each for pull in pulls for each in pull.transport.split("+") if each})),
    )
