"""The KV side of an instance as its prefill and decode services use it."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from services.worker.kv.rank_links import (
    KvControl,
    KvEvents,
    PullEnded,
    StagedChunk,
    StagingFailed,
    ThreadEnded,
    TransferEnded,
)
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background

# MERGED ledger.py
# What an instance exports: for whom, and how much of each rank's staging pool it may take. Decided when the engine
# would begin to compute it, so that what it computes always has room.


@dataclass(slots=True)
class _Export:
    owner: bytes
    size_bytes: int
    ranks: set[int]  # that may hold some of it
    has_room: bool = False


class ExportLedger:
    """Exports from the moment in which they are announced until every rank has dropped them.

    `reserve` is the engine's thread's, all else the event loop's.
    """

    def __init__(self, limit_bytes: int, ranks: int) -> None:
        """`limit_bytes` is the bound of one rank's pool; all sizes are those of one rank."""
        self._limit_bytes = limit_bytes
        self._ranks = ranks
        self._exports: dict[str, _Export] = {}
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        self._when_room: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._exports)

    @property
    def reserved_bytes(self) -> int:
        """What those that have room may take."""
        return self._reserved_bytes

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back whenever there is more room than before."""
        self._when_room = callback

    def announce(self, transfer_id: str, size_bytes: int, owner: bytes) -> None:
        """An export will want room. One that is larger than the pool wants none: the pool refuses its first chunk."""
        self.end(transfer_id)  # an id is used once; if not, the later export counts
        size_bytes = size_bytes if size_bytes <= self._limit_bytes else 0
        with self._lock:
            self._exports[transfer_id] = _Export(owner, size_bytes, set(range(self._ranks)))

    def reserve(self, transfer_id: str) -> bool:
        """Whether there is room for all of an announced export; from then on it has it.

        One that is not announced, or has ended, waits for nothing and gets nothing: it is given up, or will be.
        """
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is None or export.has_room:
                return True
            if self._reserved_bytes + export.size_bytes > self._limit_bytes:
                return False
            export.has_room = True
            self._reserved_bytes += export.size_bytes
            return True

    def dropped(self, transfer_id: str, rank: int) -> None:
        """A rank holds nothing of it any more, and never will."""
        export = self._exports.get(transfer_id)
        if export is not None:
            export.ranks.discard(rank)
            if not export.ranks:
                self.end(transfer_id)

    def end(self, transfer_id: str) -> None:
        """No rank holds anything of it; unknown ones are ignored."""
        with self._lock:
            export = self._exports.pop(transfer_id, None)
            freed = export is not None and export.has_room
            if export is not None and freed:
                self._reserved_bytes -= export.size_bytes
        if freed:
            self._when_room()

    def of(self, owner: bytes) -> list[str]:
        """The exports that this peer asked for."""
        return [transfer_id for transfer_id, export in self._exports.items() if export.owner == owner]


log = get_log(__name__)
_REFRESH_S = 0.25
_REPORT_S = 1.0  # the engine may end a short job before the ranks' events are here
_RENEW_SHARE = 1 / 3  # of a lease: two renewals may be lost before it ends


@dataclass(slots=True, eq=False)
class ExpectedImport:
    """An import of a decode that runs here: from `expect` to `end` its reports are kept and its lease is renewed."""

    handle: KvHandle
    pulls: list[PullEnded] = field(default_factory=list)  # one a rank, once it has ended there
    complete: asyncio.Event = field(default_factory=asyncio.Event)  # every rank has reported
    renew_s: float = 0.0  # on the port's clock, when the lease is renewed next


class KvPort(Protocol):
    """Exports and imports by transfer id."""

    @property
    def staged_bytes(self) -> int:
        """Bytes that wait for an importer, over all ranks."""
        ...

    @property
    def nixl_failures(self) -> int:
        """Pairs that both have NIXL and went on over TCP, since the start."""
        ...

    def handle(self, transfer_id: str, tokens: int, codec: Codec) -> KvHandle:
        """The reference by which a peer can pull that export."""
        ...

    def announce(self, transfer_id: str, tokens: int, owner: bytes) -> None:
        """An export of so many tokens will want room."""
        ...

    def reserve(self, transfer_id: str) -> bool:
        """Whether an announced export has room now; it then has it until it ends. Any thread may ask."""
        ...

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back whenever there is more room than before."""
        ...

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        """Call back once, when the first chunk of an export can be pulled."""
        ...

    def forget(self, transfer_id: str) -> None:
        """Never call back for that export."""
        ...

    def start(self, tasks: Background) -> None:
        """Begin what runs in the background."""
        ...

    def expect(self, handle: KvHandle) -> ExpectedImport:
        """A decode that imports the handle begins. Until its import has begun the exporter's lease is renewed."""
        ...

    def end(self, expected: ExpectedImport) -> None:
        """The decode is over, however it ended: what its import reports from now on is dropped. Idempotent."""
        ...

    async def import_report(self, expected: ExpectedImport) -> TransferReport:
        """What became of an import; asked for after the engine is done with the job."""
        ...

    def known_report(self, expected: ExpectedImport) -> TransferReport | None:
        """The same, if all of it is known by now."""
        ...

    async def release(self, transfer_ids: list[str]) -> None:
        """Free what is staged or prefetched; unknown ids are ignored."""
        ...

    async def release_of(self, owner: bytes) -> None:
        """Free all exports that this owner has reserved."""
        ...

    async def prefetch(self, handle: KvHandle, keep_s: float) -> None:
        """Start pulling into host memory; what comes is kept for so long, if no import takes it."""
        ...

    async def drop(self, transfer_id: str) -> None:
        """Forget a prefetch."""
        ...


class ConnectorPort:
    """The port of an engine with our connector: events from its ranks, control to them."""

    def __init__(
        self,
        control: KvControl,
        events: KvEvents,
        template: KvHandle,
        ledger: ExportLedger,
        token_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`template`: a handle whose transfer id, tokens and codec are replaced. `token_bytes`: KV of one token on the
        rank that holds the most.
        """
        self._control = control
        self._events = events
        self._template = template
        self._ledger = ledger
        self._token_bytes = token_bytes
        self._clock = clock
        self._staged: dict[int, int] = {}
        self.nixl_failures = 0
        self._callbacks: dict[str, Callable[[], None]] = {}
        self._imports: dict[str, ExpectedImport] = {}  # by transfer id, of decodes that run

    @property
    def staged_bytes(self) -> int:
        """As of the last event of each rank."""
        return sum(self._staged.values())

    def handle(self, transfer_id: str, tokens: int, codec: Codec) -> KvHandle:
        """A handle of ours."""
        t = self._template
        return msgspec.structs.replace(t, transfer_id=transfer_id, tokens=tokens, codec=codec)

    def announce(self, transfer_id: str, tokens: int, owner: bytes) -> None:
        """See ExportLedger."""
        self._ledger.announce(transfer_id, tokens * self._token_bytes, owner)

    def reserve(self, transfer_id: str) -> bool:
        """See ExportLedger."""
        return self._ledger.reserve(transfer_id)

    def when_room(self, callback: Callable[[], None]) -> None:
        """See ExportLedger."""
        self._ledger.when_room(callback)

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        """The first rank speaks for all: the others stage in the same step, and who pulls from them waits."""
        self._callbacks[transfer_id] = callback

    def forget(self, transfer_id: str) -> None:
        """Drop the callback."""
        self._callbacks.pop(transfer_id, None)

    def expect(self, handle: KvHandle) -> ExpectedImport:
        """See KvPort. A second decode of the same transfer takes the place of the first."""
        expected = self._imports[handle.transfer_id] = ExpectedImport(handle, renew_s=self._clock())
        return expected

    def end(self, expected: ExpectedImport) -> None:
        """See KvPort."""
        if self._imports.get(expected.handle.transfer_id) is expected:
            del self._imports[expected.handle.transfer_id]

    def start(self, tasks: Background) -> None:
        """Follow events, ask for what they do not tell, and renew the leases of imports that have not begun."""
        tasks.start("kv-events", self._follow())
        tasks.every("kv-stats", _REFRESH_S, self._refresh)
        tasks.every("kv-leases", _REFRESH_S, self.renew_leases)

    async def _follow(self) -> None:
        async for event in self._events:
            match event:
                case StagedChunk():
                    self._staged[event.rank] = event.staged_bytes
                    if callback := self._callbacks.pop(event.transfer_id, None):
                        # In a turn of its own: what it raises is logged by the event loop, and ends nothing here.
                        asyncio.get_running_loop().call_soon(callback)
                case TransferEnded():
                    self._staged[event.rank] = event.staged_bytes
                    self._ledger.dropped(event.transfer_id, event.rank)
                case StagingFailed():
                    log.warning("KV could not be staged", transfer_id=event.transfer_id, reason=event.reason)
                case ThreadEnded():
                    raise RuntimeError(f"the KV {event.thread} of rank {event.rank} died: {event.error}")
                case PullEnded():
                    self._take(event)

    def _take(self, event: PullEnded) -> None:
        expected = self._imports.get(event.transfer_id)
        if expected is None:  # its decode has ended before its pull
            return
        expected.pulls.append(event)
        if len(expected.pulls) == len(self._template.endpoints):
            expected.complete.set()

    async def import_report(self, expected: ExpectedImport) -> TransferReport:
        """All ranks in one: it failed if one failed, it lasted from the first start to the last end."""
        try:
            async with asyncio.timeout(_REPORT_S):
                await expected.complete.wait()
        except TimeoutError:
            log.warning("not every rank told how its import ended", transfer_id=expected.handle.transfer_id)
        return _summed(expected.pulls)

    def known_report(self, expected: ExpectedImport) -> TransferReport | None:
        """Once every rank has told."""
        return _summed(expected.pulls) if expected.complete.is_set() else None

    async def renew_leases(self) -> None:
        """Renew what is due, of imports that have not ended on any rank. A rank that pulls sends nothing for it: its
        pull renews the lease by itself.
        """
        now = self._clock()
        for expected in list(self._imports.values()):
            if expected.pulls or not expected.handle.lease_s or now < expected.renew_s:
                continue
            expected.renew_s = now + max(_REFRESH_S, expected.handle.lease_s * _RENEW_SHARE)
            try:
                await self._control.renew(expected.handle)
            except PolyphaseError as error:  # a rank does not answer; the next turn tries the next transfer
                log.debug("a lease was not renewed", transfer_id=expected.handle.transfer_id, error=error.message)
                return

    async def release(self, transfer_ids: list[str]) -> None:
        """Leases end by themselves, so a failure is logged and left."""
        for transfer_id in transfer_ids:
            try:
                await self._control.release(transfer_id)
            except PolyphaseError as error:
                log.warning("release failed", transfer_id=transfer_id, error=error.message)
            finally:
                self._ledger.end(transfer_id)

    async def release_of(self, owner: bytes) -> None:
        """Who asked for them is gone."""
        if held := self._ledger.of(owner):
            log.info("releasing what a peer that is gone held", transfers=len(held))
            await self.release(held)

    async def _refresh(self) -> None:
        """Ask the ranks what they hold: between events, pulls and leases free some of it."""
        try:
            told = await self._control.stats()
            for rank, stats in enumerate(told):
                self._staged[rank] = stats.staged_bytes
            self.nixl_failures = sum(stats.nixl_failures for stats in told)
        except PolyphaseError as error:  # a rank in a long step; the next answer will do
            log.debug("no KV figures", error=error.message)

    async def prefetch(self, handle: KvHandle, keep_s: float) -> None:
        """Start pulling on all ranks."""
        await self._control.prefetch(handle, keep_s=keep_s)

    async def drop(self, transfer_id: str) -> None:
        """Forget a prefetch on all ranks; a failure is logged, since prefetches end by themselves."""
        try:
            await self._control.drop(transfer_id)
        except PolyphaseError as error:
            log.warning("drop failed", transfer_id=transfer_id, error=error.message)


def _summed(pulls: list[PullEnded]) -> TransferReport:
    """What the ranks told, in one report."""
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
