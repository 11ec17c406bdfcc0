"""What an instance tells the monitor: who it is, once and whenever the monitor forgot; how busy it is."""

import random
import time
from contextlib import AsyncExitStack

import msgspec

from services.worker.engines.base import Engine, EnginePolicies
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.prefill import REST_S, Dispatcher, PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from services.worker.settings import WorkerSettings
from services.worker.step_costs import LiveRates
from shared.domain.instance import InstanceInfo, InstanceLoad
from shared.domain.policies import ENGINE, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import Conflict, Incompatible, PolyphaseError, WireVersionMismatch
from shared.policy.decider import Following
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import Heartbeat
from shared.wire.sockets import Sockets

# MERGED policies.py
# Which policies this instance's engine goes by: those that the monitor's broadcasts name.

_NOT_YET = "the engine has not come to its next step yet"


class FollowedPolicies:
    """Hands the engine other policies; what it goes by is what the engine itself says."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Until the first broadcast: what every engine can do.
        self._following = Following(ENGINE, self._set, PolicySet(step_budget=PolicySpec("off")))
        self._reached = 0

    def hear(self, policies: PolicySet) -> None:
        """What a broadcast says."""
        following = self._following
        made, trouble = following.made, following.trouble
        following.hear(policies)
        if following.made is not made:
            log.info("other policies for the engine", revision=policies.revision, **following.made.names())
        if following.trouble not in ("", trouble):
            log.error("other policies are not followed", revision=policies.revision, reason=following.trouble)

    @property
    def revision(self) -> int:
        """Of the policies that the engine goes by."""
        if self._taken:
            self._reached = self._following.policies.revision
        return self._reached

    @property
    def trouble(self) -> str:
        """Why the engine does not go by the newest that were heard of; empty when it does."""
        return self._following.trouble or ("" if self._taken else _NOT_YET)

    def describe(self) -> dict[str, int | str]:
        """Both as JSON."""
        return {"revision": self.revision, "trouble": self.trouble}

    @property
    def _taken(self) -> bool:
        return self._engine.policies == self._following.made

    def _set(self, policies: PolicySet) -> EnginePolicies:
        made = EnginePolicies.of(policies)
        self._engine.set_policies(made)
        return made


log = get_log(__name__)
HEARTBEAT_S = 0.1
SAME_S = 0.25  # so often the same is told again: the monitor takes who says nothing for 0.8 s for unresponsive
TRY_S, TRY_MAX_S = 0.1, 10.0  # between two attempts to register: at first and, doubled with each refusal, at most
UNREACHED_MAX_S = 1.0  # at most, where no monitor acts: the cluster waits for this instance when one does again
UNHEARD_S = 5.0  # so long without a word of the monitor, and it is asked: it says something every two seconds


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
        self._known = False  # to the monitor, as far as it has said
        self._heard_mono = 0.0  # when it said anything last
        self._told: Heartbeat | None = None
        self._told_mono = 0.0
        self.refused = ""
        self._trouble = ""
        self._failures = 0  # attempts to register since the last one that succeeded, or since something changed
        self._attempted = roles.role  # what the last attempt said
        self._next_mono = 0.0  # when the next attempt is due

    @property
    def info(self) -> InstanceInfo:
        """Who this instance is, with the rates and the chunk size that it has by now."""
        return self._rates.of(self._info)

    @property
    def unready(self) -> str:
        """Why nobody gives this instance work; empty: it may get some. A monitor that is away later is no reason."""
        if not self._known:
            return f"the monitor does not know it: {self.refused or self._trouble or 'not registered yet'}"
        return "it is draining" if self._roles.draining or self._leaving else ""

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
            accepted=self._roles.accepted,
            kv_ahead=self._decodes.kv_ahead(
                (stats.total_blocks - stats.free_blocks) * self._info.block_size, stats.waiting_tokens
            ),
            promised=self._decodes.promised,
        )

    async def leave(self) -> None:
        """Tell the monitor that this instance stops, so that nobody takes it for dead; and tell nothing more."""
        self._leaving = True
        try:
            await self._monitor.leave(self._info)
        except PolyphaseError as error:  # no monitor is there: it will take us for dead
            log.info("could not take leave", reason=error.message)

    def beat(self) -> None:
        """Publish a heartbeat, if there is news or the last one is a while ago."""
        if self._leaving:
            return
        who, now_mono = self._info, time.monotonic()
        beat = Heartbeat(
            who.instance_id,
            who.generation,
            self._roles.role,
            self._roles.draining,
            self.load(),
            self._rates.news(time.time()),
            self._policies.revision,
            self._policies.trouble,
            self._rates.chunk.tokens,
            self._roles.epoch,
        )
        if now_mono - self._told_mono < SAME_S and _alike(beat, self._told):
            return
        self._told, self._told_mono = beat, now_mono
        self._publisher.publish(beat)

    def heard(self, _: PolicySet) -> None:
        """The monitor has said something."""
        self._heard_mono = time.monotonic()

    def stranger(self, generation: int) -> None:
        """The monitor does not know the process of this instance that has that generation."""
        self._heard_mono = time.monotonic()
        if generation == self._info.generation and self._known:
            self._known = False
            self._failures, self._next_mono = 0, 0.0

    async def keep_registered(self) -> None:
        """Register unless the monitor knows us, or if it has been silent.

        After a failure the next attempt waits: `TRY_S`, doubled with each failure up to `TRY_MAX_S`, and then drawn
        from the upper half of that, so that instances which failed together do not return together. With another role
        than it was refused in, and when a monitor does not know it any more, an instance attempts at once.
        """
        now_mono = time.monotonic()
        if self._leaving or (self._known and now_mono - self._heard_mono < UNHEARD_S):
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
            self._known, self._heard_mono = True, now_mono
            self._failures, self._next_mono = 0, 0.0
            self.refused = self._trouble = ""

    def _failed(self, error: PolyphaseError) -> None:
        refused = isinstance(error, Incompatible | Conflict | WireVersionMismatch)
        if error.message != (self.refused if refused else self._trouble):  # one line, however often
            if refused:
                log.error("the cluster refuses this instance", reason=error.message)
            else:
                log.warning("registration failed; trying on", reason=error.message)
        self.refused, self._trouble = (error.message, "") if refused else (self.refused, error.message)
        wait_s = min(TRY_MAX_S if refused else UNREACHED_MAX_S, TRY_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self._next_mono = time.monotonic() + random.uniform(wait_s / 2, wait_s)


def _alike(beat: Heartbeat, told: Heartbeat | None) -> bool:
    """Whether it says nothing that was not told: loads carry the time at which they were taken."""
    if told is None or beat.rates is not None:
        return False
    load = msgspec.structs.replace(beat.load, time_s=told.load.time_s)
    return msgspec.structs.replace(beat, load=load, rates=told.rates) == told


# MERGED listening.py
# What an instance hears from the monitor: policies, that it is a stranger, and the cluster while it dispatches.


def listen(
    sockets: Sockets,
    settings: WorkerSettings,
    telemetry: Telemetry,
    policies: FollowedPolicies,
    dispatcher: Dispatcher,
    roles: RoleState,
    stack: AsyncExitStack,
    tasks: Background,
) -> None:
    """Until the stack is closed."""

    def told(said: PolicySet) -> None:
        policies.hear(said)
        telemetry.heard(said)

    feed = ClusterFeed(
        sockets,
        settings.broadcast_address,
        dispatcher.hear,
        following=False,
        instance_id=settings.instance_id,
        on_policies=told,
        on_stranger=telemetry.stranger,
        on_epoch=roles.obey,
    )
    stack.callback(feed.close)
    dispatcher.on_follow = feed.follow
    tasks.every("rest", REST_S, dispatcher.rest)
