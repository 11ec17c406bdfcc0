"""Heartbeats: from the socket into the records, and what their absence means."""

import asyncio
from collections import Counter

from services.cluster_monitor.broadcaster import Broadcaster
from services.cluster_monitor.memory import Memory
from services.cluster_monitor.record import Record
from services.cluster_monitor.registry import Registry
from shared.domain.instance import InstanceState
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import Heartbeat

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
