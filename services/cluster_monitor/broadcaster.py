"""The broadcasts: what has changed in the cluster, 100 ms apart, and at once when a state or a policy changes."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import msgspec

from services.cluster_monitor.lease import Turn
from services.cluster_monitor.policy_book import PolicyBook
from services.cluster_monitor.registry import Memory, Record, Registry
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, InstanceState
from shared.domain.policies import PolicySet
from shared.errors import PolyphaseError, Standby
from shared.runtime.logs import get_log
from shared.runtime.tasks import Alarm
from shared.wire.broadcast import POLICIES, WHOLE, ClusterPublisher, Subscriber
from shared.wire.messages import Heartbeat
from shared.wire.sockets import Sockets

SLICE = 64  # loads of a broadcast: with more of them, listeners would be busy with one for milliseconds
SAME_S = 1.0  # so often the same load is told again: what listeners have assigned and never came ends with it
QUIET_S = 0.5  # so often a cluster in which nothing changes is told of: that is how listeners know the monitor to live
_ALMOST = 0.9  # timers may fire a moment before their time
POLICIES_S = 2.0  # so often instances hear of the policies though they are the same


class Broadcaster:
    """Publishes ClusterDelta, sequence rising by one, and all of the cluster to those who ask.

    Dead instances are left out. Loads are told `period_s` after the last broadcast, and earlier where there are many.
    """

    def __init__(
        self,
        registry: Registry,
        book: PolicyBook,
        publisher: ClusterPublisher,
        memory: Memory,
        turn: Turn,
        *,
        period_s: float,
        quiet_start_s: float,
    ) -> None:
        self._registry = registry
        self._book = book
        self._memory = memory
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self._loud_mono = self._loop.time() + quiet_start_s
        self._sequence = int(time.time() * 1000)  # rises over restarts too
        self._changed: dict[str, Record] = {}
        self._loads: dict[str, Record] = {}
        self._said: PolicySet | None = None
        self._wanted: set[bytes] = set()
        self._period_s, self._quiet_s = period_s, max(QUIET_S, period_s)
        self._said_mono = self._policies_mono = self._published_mono = 0.0
        self._due = False
        self._alarm = Alarm(self.publish)
        self._closed = False
        self._publisher = publisher
        publisher.epoch, publisher.on_wanted = turn.epoch, self._asked
        registry.on_change(lambda record, before: self.changed(record))
        registry.on_renewed(self.renewed)
        registry.on_gone(lambda record, how, why: self.changed(record))
        self.soon()

    @property
    def sequence(self) -> int:
        """Of the latest broadcast."""
        return self._sequence

    @property
    def sent_bytes(self) -> int:
        """Since the start; what goes to several listeners counts once."""
        return self._publisher.sent_bytes

    @property
    def loud(self) -> bool:
        """A restarted monitor is silent until those it remembers are back, or for `quiet_start_s`; one whose turn it
        is not always.
        """
        if self._closed or not (self._memory.empty or self._loop.time() >= self._loud_mono):
            return False
        try:
            self._turn.check()
        except Standby:
            return False
        return True

    def view(self) -> ClusterView:
        """The cluster as it is now; O(instances)."""
        alive = tuple(record.view() for record in self._registry.all() if record.alive)
        return ClusterView(self._sequence, time.time(), alive, self._book.policies)

    def changed(self, record: Record) -> None:
        """It came, went, or has another role or state: told at once."""
        self._changed[record.instance_id] = record
        self.soon()

    def renewed(self, record: Record) -> None:
        """It has other rates, perhaps another load as well."""
        self._changed[record.instance_id] = record
        self._gathered()

    def loaded(self, record: Record) -> None:
        """It has told its load, and nothing else."""
        told = record.told_load
        if told is None or msgspec.structs.replace(record.load, time_s=told.time_s) != told:
            self._loads[record.instance_id] = record
            self._gathered()
        elif self._loop.time() - record.told_mono > SAME_S:  # with the next broadcast, whatever that is for
            self._loads[record.instance_id] = record

    def stranger(self, instance_id: str, generation: int) -> None:
        """Tell a process that beats and is not known to register; not while it may still be remembered."""
        if self.loud:
            self._publisher.stranger(instance_id, generation)

    def publish(self) -> None:
        """Send what has changed, all of it to who asks, and a sign of life."""
        self._due = False
        if self._closed:
            return
        now = self._published_mono = self._loop.time()
        if not self.loud:
            self._alarm.by(now + self._period_s)
            return
        self._alarm.by(now + self._quiet_s)
        policies = self._book.policies if self._book.policies != self._said else None
        if self._changed or self._loads or policies or now - self._said_mono >= _ALMOST * self._quiet_s:
            self._said_mono = now
            self._sequence += 1
            self._publisher.change(self._delta(policies))
        if WHOLE in self._wanted:
            self._publisher.whole(ClusterDelta.of(self.view()))
        if policies or POLICIES in self._wanted or now - self._policies_mono >= POLICIES_S:
            self._policies_mono = now
            self._publisher.policies(self._book.policies)
        self._wanted.clear()

    def soon(self) -> None:
        """Publish before the period is over: something has changed."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.publish)

    def close(self) -> None:
        """No more of it."""
        self._closed = True
        self._alarm.cancel()
        self._publisher.on_wanted = lambda _: None

    def _delta(self, policies: PolicySet | None) -> ClusterDelta:
        changed, loads, now = self._changed, self._loads, self._loop.time()
        self._changed, self._loads, self._said = {}, {}, self._book.policies
        for record in (*changed.values(), *loads.values()):
            record.told_load, record.told_mono = record.load, now
        there = {name: one for name, one in changed.items() if one.alive and self._registry.find(name) is one}
        return ClusterDelta(
            self._sequence,
            time.time(),
            changed=tuple(record.view() for record in there.values()),
            loads={name: record.load for name, record in loads.items() if name not in changed and record.alive},
            gone=tuple(name for name in changed if name not in there),
            policies=policies,
        )

    def _gathered(self) -> None:
        if len(self._loads) + len(self._changed) >= SLICE:
            self.soon()
        else:
            self._alarm.by(self._published_mono + self._period_s)

    def _asked(self, topic: bytes) -> None:
        self._wanted.add(topic)
        self.soon()


# MERGED heartbeats.py
# Heartbeats: from the socket into the records, and what their absence means.


log = get_log(__name__)
LEAST_S = 0.01  # between two looks


class Heartbeats:
    """Takes heartbeats in. Who is not registered, or taken for dead, is told so, and counted in `ignored`."""

    def __init__(self, registry: Registry, memory: Memory, broadcaster: Broadcaster, period_s: float) -> None:
        self._registry = registry
        self._memory = memory
        self._broadcaster = broadcaster
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self.taken = 0
        self.ignored: Counter[str] = Counter()

    def take(self, beat: Heartbeat) -> None:
        """One heartbeat."""
        record = self._registry.find(beat.instance_id)
        if record is None:
            self._recall(beat)
            record = self._registry.find(beat.instance_id)
        if record is None or beat.generation != record.info.generation or not record.alive:
            self._ignore(beat, record)
            return
        self.taken += 1
        role = record.role
        renewed = record.heard(beat, self._loop.time())
        if role is not record.role:
            self._broadcaster.changed(record)
        elif renewed:
            self._broadcaster.renewed(record)
        else:
            self._broadcaster.loaded(record)
        if record.state is not InstanceState.READY or record.draining:
            self._registry.settle(record)
        if role is not record.role and record.state is InstanceState.READY and not record.operation:
            log.info("instance changed its role by itself", instance_id=beat.instance_id, role=beat.role.value)

    async def watch(self) -> None:
        """Look for silence, until cancelled: whenever somebody may have been silent for too long.

        After a stall of this process heartbeats wait unread: look a period later.
        """
        while True:
            due = max(self._registry.tick(self._period_s), self._loop.time() + LEAST_S)
            await asyncio.sleep(due - self._loop.time())
            if self._loop.time() - due > 3 * self._period_s:
                await asyncio.sleep(self._period_s)

    def _ignore(self, beat: Heartbeat, record: Record | None) -> None:
        if record is None:
            self.ignored["unknown"] += 1
        elif beat.generation == record.info.generation:
            self.ignored["dead"] += 1
        else:
            self.ignored["generation"] += 1
            if beat.generation < record.info.generation:
                return  # somebody has taken its place
        self._broadcaster.stranger(beat.instance_id, beat.generation)

    def _recall(self, beat: Heartbeat) -> None:
        known = self._memory.take(beat.instance_id, beat.generation)
        if known is None:
            return
        try:
            self._registry.register(known, beat.role, remembered=True)
        except PolyphaseError as error:
            log.warning("remembered instance refused", instance_id=beat.instance_id, why=error.message)


# MERGED ends.py
# The monitor's bound sockets: they are there while it stands by, too, so that the others need not connect first.


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
