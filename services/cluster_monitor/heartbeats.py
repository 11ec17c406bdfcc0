"""Heartbeats: from the socket into the records, and what their absence means."""

import asyncio
from collections import Counter

from services.cluster_monitor.memory import Memory
from services.cluster_monitor.registry import Registry
from shared.domain.instance import InstanceState
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import Heartbeat

log = get_log(__name__)


class Heartbeats:
    """Takes heartbeats in. Those of processes that did not register are ignored and counted in `ignored`."""

    def __init__(self, registry: Registry, memory: Memory, period_s: float) -> None:
        self._registry = registry
        self._memory = memory
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._ticked_mono = self._loop.time()
        self.taken = 0
        self.ignored: Counter[str] = Counter()

    def take(self, beat: Heartbeat) -> None:
        """One heartbeat."""
        record = self._registry.find(beat.instance_id)
        if record is None:
            self._recall(beat)
            record = self._registry.find(beat.instance_id)
        if record is None:
            self.ignored["unknown"] += 1
            return
        if beat.generation != record.info.generation:
            self.ignored["generation"] += 1
            return
        if not record.alive:
            self.ignored["dead"] += 1  # its broadcast lacks it, so it will register again
            return
        self.taken += 1
        role = record.role
        record.heard(beat, self._loop.time())
        self._registry.settle(record)
        if role is not record.role and record.state is InstanceState.READY and not record.operation:
            log.info("instance changed its role by itself", instance_id=beat.instance_id, role=beat.role.value)

    def tick(self) -> None:
        """Look for silence. After a stall of this process heartbeats wait unread: look a period later."""
        now = self._loop.time()
        late = now - self._ticked_mono > 3 * self._period_s
        self._ticked_mono = now
        if not late:
            self._registry.tick()

    def _recall(self, beat: Heartbeat) -> None:
        known = self._memory.take(beat.instance_id, beat.generation)
        if known is None:
            return
        try:
            self._registry.register(known, beat.role, remembered=True)
        except PolyphaseError as error:
            log.warning("remembered instance refused", instance_id=beat.instance_id, why=error.message)
