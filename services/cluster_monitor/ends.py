"""The monitor's bound sockets: they are there while it stands by, too, so that the others need not connect first."""

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from services.cluster_monitor.heartbeats import Heartbeats
from services.cluster_monitor.settings import MonitorSettings
from shared.wire.broadcast import Subscriber
from shared.wire.cluster_feed import ClusterPublisher
from shared.wire.messages import Heartbeat
from shared.wire.sockets import Sockets

GATHER_S = 0.05  # heartbeats that share a wake-up: most wait for the next broadcast anyway


class Ends:
    """Where heartbeats come in and broadcasts go out, for the life of the process."""

    def __init__(self, stack: AsyncExitStack, settings: MonitorSettings) -> None:
        self.sockets = Sockets.of(settings)
        stack.callback(self.sockets.close)
        self.publisher = ClusterPublisher(self.sockets, settings.broadcast_address)
        stack.callback(self.publisher.close)
        self._beats: Heartbeats | None = None
        self.on_epoch: Callable[[int], None] = lambda _: None  # of each heartbeat, also while the monitor is a standby
        self.subscriber = Subscriber(self.sockets, settings.heartbeat_address, Heartbeat, self._take, GATHER_S)
        stack.callback(self.subscriber.close)

    @contextmanager
    def heard_by(self, beats: Heartbeats) -> Iterator[None]:
        """Hand heartbeats over, for the block's length; nobody hears them outside of one."""
        self._beats = beats
        try:
            yield
        finally:
            self._beats = None

    def _take(self, beat: Heartbeat) -> None:
        self.on_epoch(beat.epoch)
        if self._beats is not None:
            self._beats.take(beat)
