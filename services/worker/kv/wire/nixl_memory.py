"""What an importer's links read into."""

from services.worker.kv.arena import Arena, Bytes
from services.worker.kv.wire.nixl_agent import NixlAgent, NixlError, Read, this_host
from services.worker.kv.wire.nixl_frames import VERSION, Meet

_PLACE_BYTES = 4096
_QUARANTINE_S = 30.0  # memory of a read that has failed is not used again for so long


class Imports:
    """What is read into, and reads that nobody waits for any more but that may still write."""

    def __init__(self, trusted: bool, receiving_bytes: int) -> None:
        """Raises OSError where NIXL is not to be had, or does not take the memory."""
        self.agent = NixlAgent(trusted)
        self.meet = Meet(VERSION, this_host(), trusted)
        self._arena = Arena(_PLACE_BYTES, -(-receiving_bytes // _PLACE_BYTES))
        for slab in self._arena.slabs:
            self.agent.register(slab)
        self._abandoned: list[tuple[Read, float]] = []

    def take(self, size: int) -> Bytes | None:
        """Memory to read so much into, or None while there is none."""
        return self._arena.take_bytes(size)

    def abandon(self, read: Read, now_s: float) -> None:
        """Nobody wants it."""
        self._abandoned.append((read, now_s))

    def sweep(self, now_s: float) -> None:
        """Let go of what is not written any more."""
        self._abandoned = [each for each in self._abandoned if not _over(*each, now_s)]


def _over(read: Read, since_s: float, now_s: float) -> bool:
    try:
        return read.done()
    except NixlError:
        return now_s - since_s > _QUARANTINE_S
