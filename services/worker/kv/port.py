"""The KV side of an instance as its prefill and decode services use it."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from services.worker.kv.control import KvControl
from services.worker.kv.events import KvEvents, PullEnded, StagedChunk, StagingFailed, ThreadEnded, TransferEnded
from services.worker.kv.ledger import ExportLedger
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background

log = get_log(__name__)
_REFRESH_S = 0.25
_REPORT_S = 1.0  # the engine may end a short job before the ranks' events are here
_KEPT = 1000  # reports that nobody asked for


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
        """No more interest in callbacks or reports of that transfer."""
        ...

    def start(self, tasks: Background) -> None:
        """Begin what runs in the background."""
        ...

    async def import_report(self, transfer_id: str) -> TransferReport:
        """What became of an import; asked for after the engine is done with the job."""
        ...

    def known_report(self, transfer_id: str) -> TransferReport | None:
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
        self, control: KvControl, events: KvEvents, template: KvHandle, ledger: ExportLedger, token_bytes: int
    ) -> None:
        """`template`: a handle whose transfer id, tokens and codec are replaced. `token_bytes`: KV of one token on the
        rank that holds the most.
        """
        self._control = control
        self._events = events
        self._template = template
        self._ledger = ledger
        self._token_bytes = token_bytes
        self._staged: dict[int, int] = {}
        self.nixl_failures = 0
        self._callbacks: dict[str, Callable[[], None]] = {}
        self._pulls: dict[str, list[PullEnded]] = {}
        self._reports: dict[str, asyncio.Event] = {}  # who waits for the last of them

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
        """Drop the callback and the reports."""
        self._callbacks.pop(transfer_id, None)
        self._pulls.pop(transfer_id, None)

    def start(self, tasks: Background) -> None:
        """Follow events, and ask for what they do not tell."""
        tasks.start("kv-events", self._follow())
        tasks.every("kv-stats", _REFRESH_S, self._refresh)

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
        pulls = self._pulls.setdefault(event.transfer_id, [])
        pulls.append(event)
        if (waiting := self._reports.get(event.transfer_id)) and len(pulls) == len(self._template.endpoints):
            waiting.set()
        if len(self._pulls) > _KEPT:
            del self._pulls[next(iter(self._pulls))]

    async def import_report(self, transfer_id: str) -> TransferReport:
        """All ranks in one: it failed if one failed, it lasted from the first start to the last end."""
        if len(self._pulls.get(transfer_id, ())) < len(self._template.endpoints):
            complete = self._reports[transfer_id] = asyncio.Event()
            try:
                async with asyncio.timeout(_REPORT_S):
                    await complete.wait()
            except TimeoutError:
                log.warning("not every rank told how its import ended", transfer_id=transfer_id)
            finally:
                del self._reports[transfer_id]
        return _summed(self._pulls.pop(transfer_id, []))

    def known_report(self, transfer_id: str) -> TransferReport | None:
        """Once every rank has told."""
        if len(self._pulls.get(transfer_id, ())) < len(self._template.endpoints):
            return None
        return _summed(self._pulls.pop(transfer_id))

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
