"""What an instance tells the monitor: who it is, once and whenever the monitor forgot; how busy it is, every 100 ms."""

import time

from services.worker.engines.base import Engine
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.prefill import PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from services.worker.live_rates import LiveRates
from services.worker.policies import FollowedPolicies
from shared.domain.instance import ClusterView, InstanceInfo, InstanceLoad
from shared.errors import Incompatible, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.broadcast import Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import Heartbeat

log = get_log(__name__)
HEARTBEAT_S = 0.1
_FORGOTTEN_S = 0.5  # so long without seeing ourselves in a broadcast, and we register again


class Telemetry:
    """Publishes heartbeats and keeps the registration alive."""

    def __init__(
        self,
        info: InstanceInfo,
        roles: RoleState,
        engine: Engine,
        kv: KvPort,
        prefills: PrefillService,
        decodes: DecodeService,
        rates: LiveRates,
        policies: FollowedPolicies,
        publisher: Publisher,
        monitor: MonitorClient,
    ) -> None:
        self._info = info
        self._rates = rates
        self._policies = policies
        self._roles = roles
        self._engine = engine
        self._kv = kv
        self._prefills = prefills
        self._decodes = decodes
        self._publisher = publisher
        self._monitor = monitor
        self._leaving = False
        self._seen_s = 0.0
        self.refused = ""
        self._trouble = ""

    @property
    def info(self) -> InstanceInfo:
        """Who this instance is, with the rates and the chunk size that it has by now."""
        return self._rates.of(self._info)

    def load(self) -> InstanceLoad:
        """The present load."""
        stats = self._engine.stats()
        return InstanceLoad(
            time_s=time.time(),
            queued_prefill=self._prefills.queued + self._decodes.queued,
            queued_prefill_tokens=self._prefills.queued_tokens + self._decodes.queued_tokens,
            running=stats.running,
            waiting=stats.waiting,
            decoding=self._decodes.active,
            heavy_decodes=self._decodes.heavy,
            context_tokens=self._decodes.context_tokens,
            waiting_tokens=stats.waiting_tokens,
            free_blocks=stats.free_blocks,
            staged_bytes=self._kv.staged_bytes,
            inbound_bytes=int(self._decodes.inbound_tokens * self._info.kv_bytes_per_token),
            inflight=self._roles.inflight,
            prefill_share=self._engine.steps.prefill_share,
        )

    async def leave(self) -> None:
        """Tell the monitor that this instance stops, so that nobody takes it for dead; and tell nothing more."""
        self._leaving = True
        try:
            await self._monitor.leave(self._info)
        except PolyphaseError as error:  # no monitor is there: it will take us for dead
            log.info("could not take leave", reason=error.message)

    def beat(self) -> None:
        """Publish one heartbeat."""
        if self._leaving:
            return
        now, who = time.time(), self._info
        rates = self._rates.news(now)
        self._publisher.publish(
            Heartbeat(
                who.instance_id,
                who.generation,
                self._roles.role,
                self._roles.draining,
                self.load(),
                rates,
                self._policies.revision,
                self._policies.trouble,
                self._rates.chunk.tokens,
            )
        )

    def seen(self, view: ClusterView) -> None:
        """Note whether a broadcast knows this very process."""
        known = view.of(self._info.instance_id)
        if known is not None and known.info.generation == self._info.generation:
            self._seen_s = time.monotonic()

    async def keep_registered(self) -> None:
        """Register unless the monitor's broadcasts show that it knows us. A refusal is kept and tried again."""
        if self._leaving or time.monotonic() - self._seen_s < _FORGOTTEN_S:
            return
        try:
            await self._monitor.register(self.info, self._roles.role)
            self.refused = self._trouble = ""
        except Incompatible as error:
            if self.refused != error.message:
                log.error("the cluster refuses this instance", reason=error.message)
            self.refused = error.message
        except PolyphaseError as error:
            if self._trouble != error.message:  # ten tries a second, one line
                log.warning("registration failed; trying on", reason=error.message)
            self._trouble = error.message
