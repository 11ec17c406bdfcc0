"""The account of the prefix cache that each scheduler gets: all of it once, then changes, ten a second at most."""

import asyncio
from collections.abc import Iterator, Sequence

from services.worker.engines.cache_events import CacheEvent
from services.worker.prefixes.held import HeldPrefixes
from shared.domain.prompt import PrefixDelta
from shared.wire.messages import PrefixesRequest
from shared.wire.rpc_server import ServerCall

PERIOD_S = 0.1
MOST_BLOCKS = 8_192  # of one message: 74 KB


class _Account:
    """What one caller has been told."""

    def __init__(self, call: ServerCall, generation: int) -> None:
        self._call = call
        self._generation = generation
        self._sequence = 0

    def tell(self, added: list[int], removed: list[int]) -> None:
        """Send it, in as many messages as it takes; the first of all is sent even if there is nothing to say."""
        for part in _parts(removed):
            self._send([], part)
        for part in _parts(added):
            self._send(part, [])
        if not self._sequence:
            self._send([], [])

    def _send(self, added: list[int], removed: list[int]) -> None:
        self._call.send(PrefixDelta(self._generation, self._sequence, added, removed, starts=not self._sequence))
        self._sequence += 1


class PrefixFeed:
    """Serves `prefixes`. Nothing is sent while nothing changes, and nothing is due while nobody listens."""

    def __init__(self, generation: int) -> None:
        self.held = HeldPrefixes()
        self._generation = generation
        self._accounts: set[_Account] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, events: Sequence[CacheEvent]) -> None:
        """What the engine tells."""
        for event in events:
            self.held.apply(event)
        if self._accounts and self._timer is None and self.held.reachable.changed:
            self._timer = self._loop.call_later(PERIOD_S, self._tell)

    async def prefixes(self, _: PrefixesRequest, call: ServerCall) -> None:
        """The method: lasts until the caller is gone, gives it up, or its time is over."""
        self._tell()  # what is pending belongs to the accounts so far: to this one it is part of the whole
        account = _Account(call, self._generation)
        account.tell(list(self.held.reachable.blocks), [])
        self._accounts.add(account)
        try:
            await self._loop.create_future()
        finally:
            self._accounts.discard(account)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        added, removed = self.held.reachable.take_changes()
        if added or removed:
            for account in self._accounts:
                account.tell(added, removed)


def _parts(blocks: list[int]) -> Iterator[list[int]]:
    return (blocks[at : at + MOST_BLOCKS] for at in range(0, len(blocks), MOST_BLOCKS))
