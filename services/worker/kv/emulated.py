"""The KV side of an emulated instance: handles, times and reports without bytes."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from services.worker.kv.port import ExpectedImport
from shared.cost.catalogue import bytes_of
from shared.cost.geometry import ModelGeometry
from shared.cost.network import Link, rate_of, wire_bytes
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.runtime.tasks import Background


class EmulatedLink:
    """How long this instance's imports take: in turn through its port of `gbps` Gb/s; 0 takes no time.

    paths: by exporter, where the two stand on nodes; imports by one path take turns there. Counted as the simulator
    does (`shared.sim.wires`), but for what the exporters' ports would add. All of it `slowdown` times as slow.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        gbps: float,
        dtype: str,
        paths: Mapping[str, Link] = MappingProxyType({}),
        slowdown: float = 1.0,
    ) -> None:
        self._geometry = geometry
        self._link = Link(gbps * 1e9 / 8.0) if gbps > 0 else None
        self._paths = paths
        self._slowdown = slowdown
        self._width = bytes_of(dtype)
        self._free_s: dict[Link, float] = {}  # monotonic time from which a path, or the port, is idle
        self._reports: dict[str, TransferReport | None] = {}  # of expected imports; None: it has not begun

    def pull(self, handle: KvHandle, held_tokens: int = 0) -> float:
        """Begin an import of what is not held here; seconds until all of it is here."""
        tokens = max(0, handle.tokens - held_tokens)
        moved = wire_bytes(self._geometry, tokens, handle.codec, self._width)
        now, waits_s = time.monotonic(), 0.0
        link = self._paths.get(handle.instance_id, self._link)
        if link is not None:
            takes_s = self._slowdown * moved / rate_of(link)
            self._free_s[link] = max(self._free_s.get(link, 0.0), now) + takes_s
            waits_s = self._free_s[link] - now + link.latency_s
        started_s = time.time()
        if handle.transfer_id in self._reports:
            self._reports[handle.transfer_id] = TransferReport(
                TransferOutcome.PULLED, tokens, int(moved), started_s, started_s + waits_s, transport="emulated"
            )
        return waits_s

    def expect(self, transfer_id: str) -> None:
        """Keep the report of that import until it is forgotten."""
        self._reports[transfer_id] = None

    def known(self, transfer_id: str) -> TransferReport | None:
        """What became of an expected import, if it has begun."""
        return self._reports.get(transfer_id)

    def forget(self, transfer_id: str) -> None:
        """Nobody will ask."""
        self._reports.pop(transfer_id, None)


class EmulatedPort:
    """Exports are always ready; imports take their time in the engine. Nothing is moved."""

    staged_bytes = 0
    nixl_failures = 0

    def __init__(self, template: KvHandle, link: EmulatedLink) -> None:
        self._template = template
        self._link = link

    def start(self, tasks: Background) -> None:
        """Nothing runs in the background."""

    def handle(self, transfer_id: str, tokens: int, codec: Codec) -> KvHandle:
        """A handle of ours."""
        t = self._template
        return msgspec.structs.replace(t, transfer_id=transfer_id, tokens=tokens, codec=codec)

    def announce(self, transfer_id: str, tokens: int, owner: bytes) -> None:
        """Nothing is staged."""

    def reserve(self, transfer_id: str) -> bool:
        """Nothing is staged, so there is always room."""
        return True

    def when_room(self, callback: Callable[[], None]) -> None:
        """There never is more."""

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        """No chunk is ever staged ahead of the rest."""

    def forget(self, transfer_id: str) -> None:
        """No callback is kept."""

    def expect(self, handle: KvHandle) -> ExpectedImport:
        """See KvPort. Nothing is staged, so there is no lease."""
        self._link.expect(handle.transfer_id)
        return ExpectedImport(handle)

    def end(self, expected: ExpectedImport) -> None:
        """See KvPort."""
        self._link.forget(expected.handle.transfer_id)

    async def import_report(self, expected: ExpectedImport) -> TransferReport:
        """What the engine did."""
        return self.known_report(expected) or TransferReport(TransferOutcome.PULLED)

    def known_report(self, expected: ExpectedImport) -> TransferReport | None:
        """What the engine has done by now."""
        return self._link.known(expected.handle.transfer_id)

    async def release(self, transfer_ids: list[str]) -> None:
        """Nothing is staged."""

    async def release_of(self, owner: bytes) -> None:
        """Nothing is staged."""

    async def prefetch(self, handle: KvHandle, keep_s: float) -> None:
        """An import begins with the decode."""

    async def drop(self, transfer_id: str) -> None:
        """Nothing was fetched."""
