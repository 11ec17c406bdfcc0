"""The broadcast: the whole cluster each 100 ms, and at once when somebody's state or a policy changes."""

import asyncio
import time

from services.cluster_monitor.memory import Memory
from services.cluster_monitor.policy_book import PolicyBook
from services.cluster_monitor.registry import Registry
from shared.domain.instance import ClusterView
from shared.wire.broadcast import Publisher


class Broadcaster:
    """Publishes ClusterView, sequence rising. Dead instances are left out: a living one registers again."""

    def __init__(
        self, registry: Registry, book: PolicyBook, publisher: Publisher, memory: Memory, quiet_start_s: float
    ) -> None:
        self._registry = registry
        self._book = book
        self._publisher = publisher
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._loud_mono = self._loop.time() + quiet_start_s
        self._sequence = int(time.time() * 1000)  # rises over restarts too
        self._due = False
        self._closed = False
        registry.on_change(lambda record, before: self.soon())

    @property
    def sequence(self) -> int:
        """Of the latest broadcast."""
        return self._sequence

    def view(self) -> ClusterView:
        """The cluster as it is now."""
        alive = tuple(record.view() for record in self._registry.all() if record.alive)
        return ClusterView(self._sequence, time.time(), alive, self._book.policies)

    def publish(self) -> None:
        """Send the cluster. A restarted monitor is silent until those it remembers are back, or 1 s."""
        self._due = False
        if self._closed or (self._loop.time() < self._loud_mono and not self._memory.empty):
            return
        self._sequence += 1
        self._publisher.publish(self.view())

    def soon(self) -> None:
        """Publish before the period is over: something has changed."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.publish)

    def close(self) -> None:
        """No more of it; the socket is about to close."""
        self._closed = True
