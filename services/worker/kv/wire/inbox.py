"""What has come of prefetches, for which there are no blocks yet: bounded for the whole rank."""

from collections.abc import Mapping

from services.worker.kv.wire.frames import Buffer, Frame
from services.worker.kv.wire.importing import Import, PullCounters, PullLimits


class Inbox:
    """Each import holds its own frames; `counters` say how many bytes they are together."""

    def __init__(self, counters: PullCounters, limits: PullLimits, imports: Mapping[str, Import]) -> None:
        self._counters = counters
        self._limits = limits
        self._imports = imports

    def has_room(self, more_bytes: int) -> bool:
        """Whether it holds `more_bytes` on top of what it has and what prefetches may still send unasked."""
        prefetching = sum(each.load is None and not each.complete for each in self._imports.values())
        granted = prefetching * self._limits.window_bytes
        return self._counters.inbox_bytes + granted + more_bytes <= self._limits.inbox_bytes

    def put(self, known: Import, frame: Frame, payload: Buffer, size_bytes: int) -> None:
        """Keep a frame until its import has blocks."""
        known.inbox.append((frame, payload))
        known.inbox_bytes += size_bytes
        self._counters.inbox_bytes += size_bytes

    def empty(self, known: Import) -> None:
        """Forget what an import has in it."""
        self._counters.inbox_bytes -= known.inbox_bytes
        known.inbox_bytes = 0
        known.inbox.clear()
