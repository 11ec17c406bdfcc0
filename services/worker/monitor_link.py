"""The instance's exchange with the cluster monitor: registration and heartbeats in one direction; policies, requests
to register again and the cluster state in the other.

The role and load that are published come from the prefill and decode services; a policy that the monitor publishes is
applied to the engine here.
"""

import random
import time

import msgspec

from services.worker.engines.base import Engine, EnginePolicies
from services.worker.jobs.adapters import Adapters
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.prefill import Dispatcher, PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from services.worker.settings import WorkerSettings
from services.worker.step_costs import LiveRates
from shared.domain.instance import InstanceInfo, InstanceLoad
from shared.domain.policies import ENGINE, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import Conflict, Incompatible, PolyphaseError, WireVersionMismatch
from shared.policy.decider import PolicyFollower
from shared.runtime.logs import get_log
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import Heartbeat
from shared.wire.sockets import Sockets

log = get_log(__name__)
HEARTBEAT_S = 0.1
SAME_S = 0.25  # a heartbeat without news is sent so often: after 0.8 s of silence an instance counts as unresponsive
TRY_S, TRY_MAX_S = 0.1, 10.0  # between two attempts to register: at first and, doubled with each refusal, at most
UNREACHED_MAX_S = 1.0  # at most, where no monitor answers: once one does, the cluster waits for this instance
UNHEARD_S = 5.0  # register again after so long without a broadcast: the monitor sends one every two seconds
_NOT_YET = "the engine has not come to its next step yet"


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
        policies: "FollowedPolicies",
        adapters: Adapters,
        publisher: Publisher,
        monitor: MonitorClient,
    ) -> None:
        self._info = info
        self._rates = rates
        self._policies = policies
        self._adapters = adapters
        self._roles = roles
        self._engine = engine
        self._kv = kv
        self._prefills = prefills
        self._decodes = decodes
        self._publisher = publisher
        self._monitor = monitor
        self._leaving = False
        self._known = False  # to the monitor, as far as this instance knows
        self._seen_mono = 0.0  # when the monitor was last received from
        self._published: Heartbeat | None = None
        self._published_mono = 0.0
        self.refused = ""
        self._trouble = ""
        self._failures = 0  # attempts to register since the last one that succeeded, or since something changed
        self._attempted = roles.role  # the role of the last attempt
        self._next_mono = 0.0  # when the next attempt is due

    @property
    def info(self) -> InstanceInfo:
        """Who this instance is, with the rates, the chunk size and the adapters that it has by now."""
        return msgspec.structs.replace(self._rates.with_rates(self._info), adapters=self._adapters.served)

    @property
    def unready(self) -> str:
        """Why this instance gets no work; empty: it may. A monitor that goes away later is no reason."""
        if not self._known:
            return f"the monitor does not know it: {self.refused or self._trouble or 'not registered yet'}"
        return "it is draining" if self._roles.draining or self._leaving else ""

    def load(self) -> InstanceLoad:
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
            accepted=self._roles.accepted,
            kv_ahead=self._decodes.kv_ahead(
                (stats.total_blocks - stats.free_blocks) * self._info.block_size, stats.waiting_tokens
            ),
            promised=self._decodes.promised,
            busy_share=round(self._engine.steps.busy_share, 2),
        )

    async def leave(self) -> None:
        """Tell the monitor that this instance stops, so that it is not taken for dead, and publish nothing more."""
        self._leaving = True
        try:
            await self._monitor.leave(self._info)
        except PolyphaseError as error:  # no monitor answers: it will take this instance for dead
            log.info("could not take leave", reason=error.message)

    def beat(self) -> None:
        """Publish a heartbeat if it has news or the last one is a while ago."""
        if self._leaving:
            return
        who, now_mono = self._info, time.monotonic()
        beat = Heartbeat(
            instance_id=who.instance_id,
            generation=who.generation,
            role=self._roles.role,
            draining=self._roles.draining,
            load=self.load(),
            rates=self._rates.to_publish(time.time()),
            policies_revision=self._policies.revision,
            policies_trouble=self._policies.trouble,
            chunk_size=self._rates.chunk.tokens,
            epoch=self._roles.epoch,
            adapters=self._adapters.served if who.loads_adapters else None,
        )
        if now_mono - self._published_mono < SAME_S and not self._has_news(beat):
            return
        self._published, self._published_mono = beat, now_mono
        self._publisher.publish(beat)

    def _has_news(self, beat: Heartbeat) -> bool:
        """Whether the heartbeat adds to the published one more than time and a load that slides."""
        published = self._published
        if published is None or beat.rates is not None:
            return True
        if msgspec.structs.replace(beat, load=published.load, rates=published.rates) != published:
            return True
        return beat.load.is_news(published.load, self._info.total_blocks, self._info.block_size)

    def monitor_seen(self) -> None:
        self._seen_mono = time.monotonic()

    def unknown_to_monitor(self, generation: int) -> None:
        """The monitor does not know the process of this instance with that generation."""
        self._seen_mono = time.monotonic()
        if generation == self._info.generation and self._known:
            self._known = False
            self._failures, self._next_mono = 0, 0.0

    async def keep_registered(self) -> None:
        """Register unless the monitor knows this instance and is heard from.

        After a failure the next attempt waits `TRY_S`, doubled with each failure up to `TRY_MAX_S`, and then a time
        drawn from the upper half of that, so that instances which failed together do not return together. It
        attempts at once with another role than was refused, and when a monitor does not know it any more.
        """
        now_mono = time.monotonic()
        if self._leaving or (self._known and now_mono - self._seen_mono < UNHEARD_S):
            return
        role = self._roles.role
        if role is not self._attempted:
            self._attempted, self._failures = role, 0
        elif now_mono < self._next_mono:
            return
        try:
            await self._monitor.register(self.info, role)
        except PolyphaseError as error:
            self._failed(error)
        else:
            self._known, self._seen_mono = True, now_mono
            self._failures, self._next_mono = 0, 0.0
            self.refused = self._trouble = ""

    def _failed(self, error: PolyphaseError) -> None:
        refused = isinstance(error, Incompatible | Conflict | WireVersionMismatch)
        if error.message != (self.refused if refused else self._trouble):  # log each reason once
            if refused:
                log.error("the cluster refuses this instance", reason=error.message)
            else:
                log.warning("registration failed; trying again", reason=error.message)
        self.refused, self._trouble = (error.message, "") if refused else (self.refused, error.message)
        wait_s = min(TRY_MAX_S if refused else UNREACHED_MAX_S, TRY_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self._next_mono = time.monotonic() + random.uniform(wait_s / 2, wait_s)


class FollowedPolicies:
    """Applies the policies of the monitor's broadcasts to the engine, which says by which it goes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Until the first broadcast: what every engine can do.
        self._following = PolicyFollower(ENGINE, self._set, PolicySet(step_budget=PolicySpec("off")))
        self._reached = 0

    def hear(self, policies: PolicySet) -> None:
        """Policies of a broadcast."""
        following = self._following
        made, trouble = following.current, following.problem
        following.apply(policies)
        if following.current is not made:
            log.info("new policies for the engine", revision=policies.revision, **following.current.names())
        if following.problem not in ("", trouble):
            log.error("new policies cannot be followed", revision=policies.revision, reason=following.problem)

    @property
    def revision(self) -> int:
        """The revision of the policies that the engine uses."""
        if self._taken:
            self._reached = self._following.policies.revision
        return self._reached

    @property
    def trouble(self) -> str:
        """Why the engine does not use the newest policies; empty when it does."""
        return self._following.problem or ("" if self._taken else _NOT_YET)

    @property
    def _taken(self) -> bool:
        return self._engine.policies == self._following.current

    def _set(self, policies: PolicySet) -> EnginePolicies:
        made = EnginePolicies.of(policies)
        self._engine.set_policies(made)
        return made


def follow_monitor(
    sockets: Sockets,
    settings: WorkerSettings,
    telemetry: Telemetry,
    policies: FollowedPolicies,
    dispatcher: Dispatcher,
    roles: RoleState,
) -> ClusterFeed:
    """The feed of the monitor's broadcasts, which the caller closes. It carries the cluster state while the dispatcher
    follows it.
    """

    def on_policies(published: PolicySet) -> None:
        policies.hear(published)
        telemetry.monitor_seen()

    feed = ClusterFeed(
        sockets,
        settings.broadcast_address,
        dispatcher.hear,
        following=False,
        instance_id=settings.instance_id,
        on_policies=on_policies,
        on_stranger=telemetry.unknown_to_monitor,
        on_epoch=roles.obey,
    )
    dispatcher.on_follow = feed.follow
    return feed
