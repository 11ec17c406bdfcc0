"""The monitor's ZeroMQ traffic: heartbeats in, broadcasts of what has changed in the cluster out.

Changes of a state or a policy are broadcast at once, loads up to every 100 ms. `Wires` holds the bound sockets for the
life of the process: they are there while a monitor is a standby, too, so that no peer has to connect after a takeover.
`Heartbeats` and `Broadcaster` exist while the monitor acts.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from services.cluster_monitor.lease import LeaderTerm
from services.cluster_monitor.policy_book import PolicyBook
from services.cluster_monitor.registry import Memory, Record, Registry
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, InstanceState
from shared.domain.policies import PolicySet
from shared.errors import PolyphaseError, Standby
from shared.runtime.logs import get_log
from shared.runtime.tasks import Alarm, sleep_until_awake, until_next
from shared.wire.broadcast import POLICIES, WHOLE, ClusterPublisher, Subscriber
from shared.wire.messages import Heartbeat
from shared.wire.sockets import Sockets

log = get_log(__name__)
SLICE = 64  # loads of a broadcast: with more of them, listeners would be busy with one for milliseconds
SAME_S = 1.0  # a load is repeated this often: listeners then drop assignments that never arrived
QUIET_S = 0.5  # a cluster in which nothing changes is broadcast this often: listeners see that the monitor lives
POLICIES_S = 2.0  # unchanged policies are repeated to instances this often
READ_S = 0.1  # between two reads of heartbeats: those in between share a wake-up, and a broadcast
REST_S = 0.25  # between two reads in a cluster at rest
RESTED_S = 1.0  # a cluster without news for so long is at rest
BATCH = 64  # heartbeats that are worth a wake-up, and a broadcast: more at once would delay other callbacks
SOME = 128  # heartbeats handled before other callbacks of the loop have their turn
_SILENCES = 3  # reads within the silence of an instance that is unresponsive, at least
EARLY_S = 0.01  # by which a broadcast may be early: timers may fire a moment before their time
SLACK_S = 0.03  # by which a read may be late where it can share a wake-up with other services of the process


class Broadcaster:
    """Publishes ClusterDelta, with a sequence that rises by one, and the whole cluster to listeners that request it.

    Dead instances are left out. Loads are sent `broadcast_period_s` after the last broadcast, or up to `early_s` before
    that; earlier where there are many.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        registry: Registry,
        book: PolicyBook,
        publisher: ClusterPublisher,
        memory: Memory,
        term: LeaderTerm,
        early_s: float = EARLY_S,
    ) -> None:
        self._registry = registry
        self._early_s = early_s
        self._book = book
        self._memory = memory
        self._term = term
        self._loop = asyncio.get_running_loop()
        self._loud_mono = self._loop.time() + settings.quiet_start_s
        self._period_s = settings.broadcast_period_s
        self._quiet_s = max(QUIET_S, self._period_s)
        self.sequence = int(time.time() * 1000)  # of the latest broadcast; rises over restarts, too
        self._changed: dict[str, Record] = {}
        self._loads: dict[str, Record] = {}
        self._sent_policies: PolicySet | None = None
        self._requested: set[bytes] = set()  # topics
        self._sent_mono = self._policies_mono = self._published_mono = 0.0
        self._due = False
        self._alarm = Alarm(self.publish)
        self._closed = False
        self._publisher = publisher
        publisher.epoch, publisher.on_wanted = term.epoch, self._on_request
        registry.on_change(lambda record, before: self.changed(record))
        registry.on_renewed(self.renewed)
        registry.on_gone(lambda record, how, why: self.changed(record))
        self.soon()

    @property
    def sent_bytes(self) -> int:
        """Since the start; what goes to several listeners counts once."""
        return self._publisher.sent_bytes

    @property
    def loud(self) -> bool:
        """Whether to broadcast: while this monitor acts and, after a restart, once the instances that it remembers are
        back or `quiet_start_s` has passed.
        """
        if self._closed or not (self._memory.empty or self._loop.time() >= self._loud_mono):
            return False
        try:
            self._term.check()
        except Standby:
            return False
        return True

    def view(self) -> ClusterView:
        """The cluster as it is now; O(instances)."""
        alive = tuple(record.view() for record in self._registry.all() if record.alive)
        return ClusterView(self.sequence, time.time(), alive, self._book.policies)

    def changed(self, record: Record) -> None:
        """The instance came, went, or has another role or state: broadcast at once."""
        self._changed[record.instance_id] = record
        self.soon()

    def renewed(self, record: Record) -> None:
        """The instance has other rates, perhaps another load as well."""
        self._changed[record.instance_id] = record
        self._schedule()

    def loaded(self, record: Record) -> bool:
        """The instance has reported its load, and nothing else.

        A load without news is sent with the next broadcast, whatever that is for: an idle cluster's once per `SAME_S`.
        Returns whether the load has news.
        """
        sent, load, info = record.sent_load, record.load, record.info
        if sent is None or load.is_news(sent, info.total_blocks, info.block_size):
            self._loads[record.instance_id] = record
            self._schedule()
            return True
        if load.inflight or self._loop.time() - record.sent_mono > SAME_S:
            self._loads[record.instance_id] = record
            if len(self._loads) >= SLICE:
                self.soon()
        return False

    def stranger(self, instance_id: str, generation: int) -> None:
        """Make an unknown process that sends heartbeats register; not while it may still be remembered."""
        if self.loud:
            self._publisher.stranger(instance_id, generation)

    def publish(self) -> None:
        """Send what has changed, the whole cluster to listeners that requested it, and a sign of life."""
        self._due = False
        if self._closed:
            return
        now = self._published_mono = self._loop.time()
        if not self.loud:
            self._alarm.by(now + self._period_s)
            return
        self._alarm.by(now + until_next(self._quiet_s))
        policies = self._book.policies if self._book.policies != self._sent_policies else None
        if self._changed or self._loads or policies or now - self._sent_mono >= self._quiet_s / 2:
            self._sent_mono = now
            self.sequence += 1
            self._publisher.change(self._delta(policies))
        if WHOLE in self._requested:
            self._publisher.whole(ClusterDelta.from_view(self.view()))
        if policies or POLICIES in self._requested or now - self._policies_mono >= POLICIES_S:
            self._policies_mono = now
            self._publisher.policies(self._book.policies)
        self._requested.clear()

    def soon(self) -> None:
        """Publish in this turn of the loop: something has changed."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.publish)

    def close(self) -> None:
        self._closed = True
        self._alarm.cancel()
        self._publisher.on_wanted = lambda _: None

    def _delta(self, policies: PolicySet | None) -> ClusterDelta:
        changed, loads, now = self._changed, self._loads, self._loop.time()
        self._changed, self._loads, self._sent_policies = {}, {}, self._book.policies
        for record in (*changed.values(), *loads.values()):
            record.sent_load, record.sent_mono = record.load, now
        there = {name: one for name, one in changed.items() if one.alive and self._registry.find(name) is one}
        return ClusterDelta(
            self.sequence,
            time.time(),
            changed=tuple(record.view() for record in there.values()),
            loads={name: record.load for name, record in loads.items() if name not in changed and record.alive},
            gone=tuple(name for name in changed if name not in there),
            policies=policies,
        )

    def _schedule(self) -> None:
        due_mono = self._published_mono + self._period_s - self._early_s
        if len(self._loads) + len(self._changed) >= SLICE or self._loop.time() >= due_mono:
            self.soon()
        else:
            self._alarm.by(self._published_mono + self._period_s)

    def _on_request(self, topic: bytes) -> None:
        self._requested.add(topic)
        self.soon()


class Heartbeats:
    """Applies heartbeats to the registry. A process that is unknown, or counts as dead, is asked to register, and its
    heartbeat is counted in `ignored`.
    """

    def __init__(self, registry: Registry, memory: Memory, broadcaster: Broadcaster, settings: MonitorSettings) -> None:
        self._registry = registry
        self._memory = memory
        self._broadcaster = broadcaster
        self._read_s = min(READ_S, settings.broadcast_period_s, settings.silence_s / _SILENCES)
        self._rest_s = max(self._read_s, min(REST_S, settings.silence_s / _SILENCES))
        self._loop = asyncio.get_running_loop()
        self._news_mono = self._read_mono = self._loop.time()
        self._silence_mono = 0.0  # when to look for silence
        self.taken = 0
        self.ignored: Counter[str] = Counter()  # by cause

    def handle(self, beat: Heartbeat) -> None:
        record = self._registry.find(beat.instance_id) or self._recall(beat)
        if record is None or beat.generation != record.info.generation or not record.alive:
            self._ignore(beat, record)
            return
        self.taken += 1
        role, adapters, news = record.role, record.info.adapters, True
        renewed = record.apply(beat, self._loop.time())
        if role is not record.role or adapters is not record.info.adapters:
            self._broadcaster.changed(record)
        elif renewed:
            self._broadcaster.renewed(record)
        else:
            news = self._broadcaster.loaded(record)
        if record.state is not InstanceState.READY or record.draining:
            self._registry.settle(record)
            news = True
        if news or record.load.inflight:
            self._news_mono = self._loop.time()
        if role is not record.role and record.state is InstanceState.READY and not record.operation:
            log.info("instance changed its role by itself", instance_id=beat.instance_id, role=beat.role.value)

    def was_read(self) -> float:
        """All heartbeats that had arrived are handled. Looks for silence where an instance may have been silent for too
        long, and returns the seconds until the next read.

        After a stall of this process heartbeats may be under way: it looks for silence after the next read.
        """
        now = self._loop.time()
        stalled = now - self._read_mono > self._rest_s + 3 * self._read_s
        self._read_mono = now
        if stalled:
            return self._read_s
        if self._silence_mono < now + self._rest_s:
            self._silence_mono = self._registry.tick(self._read_s)
        soon = self._silence_mono < now + self._rest_s  # an instance starts, or is silent
        return self._read_s if soon or now - self._news_mono < RESTED_S else self._rest_s

    def _ignore(self, beat: Heartbeat, record: Record | None) -> None:
        if record is None:
            self.ignored["unknown"] += 1
        elif beat.generation == record.info.generation:
            self.ignored["dead"] += 1
        else:
            self.ignored["generation"] += 1
            if beat.generation < record.info.generation:
                return  # a newer process has replaced it
        self._broadcaster.stranger(beat.instance_id, beat.generation)

    def _recall(self, beat: Heartbeat) -> Record | None:
        known = self._memory.pop(beat.instance_id, beat.generation)
        if known is None:
            return None
        try:
            return self._registry.register(known, beat.role, remembered=True)
        except PolyphaseError as error:
            log.warning("remembered instance refused", instance_id=beat.instance_id, why=error.message)
            return None


class Wires:
    """The bound sockets of the process."""

    def __init__(self, stack: AsyncExitStack, settings: MonitorSettings, sockets: Sockets) -> None:
        self.sockets = sockets
        self.slack_s = SLACK_S if sockets.shared else 0.0
        self.publisher = ClusterPublisher(self.sockets, settings.broadcast_address)
        stack.callback(self.publisher.close)
        self._beats: Heartbeats | None = None
        self.on_epoch: Callable[[int], None] = lambda _: None  # of each heartbeat, also while the monitor is a standby
        self.subscriber = Subscriber(self.sockets, settings.heartbeat_address, Heartbeat, self._on_beat, watched=False)
        stack.callback(self.subscriber.close)

    @contextmanager
    def handing_to(self, beats: Heartbeats) -> Iterator[None]:
        """Within the block, `beats` handles heartbeats; outside of one they are dropped."""
        self._beats = beats
        try:
            yield
        finally:
            self._beats = None

    async def run(self) -> None:
        """Read heartbeats until cancelled: at intervals, since most wait for the next broadcast anyway."""
        clock = asyncio.get_running_loop().time
        read_mono = clock()
        while True:
            taken = some = self.subscriber.take(SOME)
            while some == SOME:
                await asyncio.sleep(0)
                some = self.subscriber.take(SOME)
                taken += some
            wait_s = until_next(READ_S if self._beats is None else self._beats.was_read())
            now, before = clock(), read_mono
            read_mono = now
            wait_s = min(wait_s, BATCH * (now - before) / taken) if taken else wait_s
            await sleep_until_awake(wait_s, wait_s + self.slack_s)

    def _on_beat(self, beat: Heartbeat) -> None:
        self.on_epoch(beat.epoch)
        if self._beats is not None:
            self._beats.handle(beat)
