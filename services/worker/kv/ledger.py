"""What an instance exports: for whom, and how much of each rank's staging pool it may take. Decided when the engine
would begin to compute it, so that what it computes always has room.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass


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
