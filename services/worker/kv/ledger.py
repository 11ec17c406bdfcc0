"""What an instance exports: for whom, and how much of each rank's staging pool it may take. Decided before the engine
computes it, so that the engine never has to wait for room.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Export:
    owner: bytes
    size_bytes: int
    ranks: set[int]  # that may hold some of it


class ExportLedger:
    """Exports from the moment in which they are let in until every rank has dropped them."""

    def __init__(self, limit_bytes: int, ranks: int) -> None:
        """`limit_bytes` is the bound of one rank's pool; all sizes are those of one rank."""
        self._limit_bytes = limit_bytes
        self._ranks = ranks
        self._exports: dict[str, _Export] = {}
        self._reserved_bytes = 0
        self._when_room: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._exports)

    @property
    def reserved_bytes(self) -> int:
        """What all of them may take."""
        return self._reserved_bytes

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back whenever there is more room than before."""
        self._when_room = callback

    def reserve(self, transfer_id: str, size_bytes: int, owner: bytes) -> bool:
        """Let an export in, if there is room for all of it.

        One that is larger than the pool is let in at once and given nothing: the pool refuses its first chunk.
        """
        size_bytes = size_bytes if size_bytes <= self._limit_bytes else 0
        if self._reserved_bytes + size_bytes > self._limit_bytes:
            return False
        self.end(transfer_id)  # an id is used once; if not, the later export counts
        self._exports[transfer_id] = _Export(owner, size_bytes, set(range(self._ranks)))
        self._reserved_bytes += size_bytes
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
        export = self._exports.pop(transfer_id, None)
        if export is not None:
            self._reserved_bytes -= export.size_bytes
            self._when_room()

    def of(self, owner: bytes) -> list[str]:
        """The exports that this peer asked for."""
        return [transfer_id for transfer_id, export in self._exports.items() if export.owner == owner]
