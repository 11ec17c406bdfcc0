"""All instances of a run, and what decisions know about them: broadcasts, as old as those of the live services."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from shared.domain.instance import ClusterView, InstanceState, Role
from shared.domain.policies import PolicySet
from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.placement import wants_prefixes
from shared.policy.prefix_index import PrefixIndex
from shared.policy.reachable_blocks import TieredBlocks
from shared.policy.sessions import Sessions
from shared.sim.engine import Engine, EngineEvents
from shared.sim.events import EventLoop
from shared.sim.instance import SimInstance
from shared.sim.memory import KvMemory
from shared.sim.request import Leg
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.wires import Wires
from shared.sim.workload import Workload


class Fleet:
    """The instances, and the index on which decisions are made.

    Loads are read when a decision needs them and the last ones are `broadcast_s` old, so a decision sees loads of at
    most that age, as under a steady broadcast. Instances that come, go or change their role are seen at once. What is
    known about prefix caches is as old as the loads.
    """

    def __init__(
        self,
        specs: Sequence[InstanceSpec],
        run: RunSpec,
        loop: EventLoop,
        events: EngineEvents,
        prefix_tokens: int,
        rng: Random,
    ) -> None:
        if not specs:
            raise InvalidRequest("a cluster needs at least one instance")
        ids = [spec.instance_id for spec in specs]
        self.wires = Wires(ids, [spec.node for spec in specs], [spec.link for spec in specs], run.network)
        self.instances = [
            SimInstance(at, spec, run, loop, events, prefix_tokens, self.wires) for at, spec in enumerate(specs)
        ]
        self._positions = {spec.instance_id: at for at, spec in enumerate(specs)}
        if len(self._positions) < len(specs):
            raise InvalidRequest(f"instance id {next(i for i in ids if ids.count(i) > 1)!r} is used twice")
        self.ledger = WorkloadLedger()
        self.ledger.sessions = Sessions(block_tokens=prefix_tokens or BLOCK_TOKENS)
        self._prefixes = PrefixFeed(self.instances, prefix_tokens) if wants_prefixes(run.policies.placement) else None
        self._fresh_prefixes = run.fresh_prefixes
        self._broadcast_s = run.broadcast_s
        self._policies = PolicySet(step_budget=PolicySpec("on" if run.step_budget else "off"))
        self._rng = rng
        self._limited = any(spec.max_prefills is not None for spec in specs)
        self._index: ClusterIndex | None = None
        self._index_s = 0.0  # when its loads were read
        self._sequence = 0
        self._turn = 0
        self._dispatchers: dict[int, ClusterIndex] = {}

    def fill_caches(self, before: Workload) -> None:
        """Begin with what these requests, the last ones before the run, have left in the prefix caches.

        The beginning of a prompt is at an instance of each role: where most of it is already, if that is at least half
        of it, otherwise where the least was stored for the room. Answers are where they were decoded.
        """
        if before.prefixes is None:
            return
        whole = (before.prompt_tokens // before.prefix_block_tokens).tolist()
        answers = before.answers or ((),) * len(before)
        for role in Role:
            caches = [
                _Filled(one.engines[0].memory, one.spec.kv_tokens)
                for one in self.instances
                if one.role is role and one.spec.lanes == 1 and one.spec.limits.prefix_cache
            ]
            for ids, answer, blocks in zip(before.prefixes, answers, whole, strict=True) if caches else ():
                held = [len(one.memory.cached(ids)) for one in caches]
                most = max(held)
                home = caches[held.index(most)] if 2 * most >= len(ids) > 0 else min(caches, key=lambda one: one.share)
                home.blocks += len(ids) - len(home.memory.cached(ids))
                home.memory.remember(ids)
                if role is Role.DECODE and answer:
                    home.blocks += len(answer)
                    home.memory.remember(answer, ids[blocks - 1] if 0 < blocks <= len(ids) else None)

    def instance(self, position: int | None) -> SimInstance:
        assert position is not None
        return self.instances[position]

    def engine(self, leg: Leg) -> Engine:
        """The engine that has a leg."""
        assert leg.lane is not None
        return self.instance(leg.request.decode if leg.decodes else leg.request.prefill).engines[leg.lane]

    def position(self, instance_id: str) -> int:
        return self._positions[instance_id]

    def index(self, now: float) -> ClusterIndex:
        """What the global scheduler decides on at `now`. Its decisions are booked there."""
        prefixes, due = self._prefixes, self._index is None or now - self._index_s >= self._broadcast_s
        if prefixes is not None and (due or self._fresh_prefixes):
            prefixes.update()
        if self._index is None or due:
            self._index = ClusterIndex(
                self.view(now),
                self.ledger.coming,
                rng=self._rng,
                turn=self._index.turn if self._index is not None else self._turn,
                ledger=self.ledger,
                prefixes=prefixes.index if prefixes is not None else None,
            )
            self._index_s = now
            self._dispatchers.clear()
        return self._index

    def dispatch_index(self, position: int, now: float) -> ClusterIndex:
        """What the dispatcher of the prefill instance there decides on: the broadcast, and its own decisions since."""
        index = self.index(now)  # which may drop the dispatchers of the broadcast before
        if position not in self._dispatchers:
            self._dispatchers[position] = index.for_dispatch()
        return self._dispatchers[position]

    def view(self, now: float) -> ClusterView:
        self._sequence += 1
        views = tuple(instance.view(now) for instance in self.instances)
        return ClusterView(self._sequence, now, views, policies=self._policies)

    def changed(self) -> None:
        """An instance came, went or changed its role: the next decision sees that."""
        if self._index is not None:
            self._turn = self._index.turn
        self._index = None
        self._dispatchers.clear()

    def full_ids(self) -> frozenset[str]:
        """Instances that accept no more prompts for now."""
        if not self._limited:
            return frozenset()
        return frozenset(instance.spec.instance_id for instance in self.instances if instance.full)

    def all_full(self) -> bool:
        """Whether no instance that computes prompts accepts another one: then prompts wait at the gateway."""
        if not self._limited:
            return False
        ready = [i for i in self.instances if i.state is InstanceState.READY]
        takers = [i for i in ready if i.role is Role.PREFILL] or ready
        return bool(takers) and all(instance.full for instance in takers)


@dataclass(slots=True)
class _Filled:
    """A cache that is being filled. blocks: that were stored."""

    memory: KvMemory
    kv_tokens: int
    blocks: int = 0

    @property
    def share(self) -> float:
        return self.blocks / self.kv_tokens


class PrefixFeed:
    """Feeds an index from the instances' caches, in blocks of the workload's prefix ids."""

    def __init__(self, instances: Sequence[SimInstance], block_tokens: int) -> None:
        self.index = PrefixIndex(block_tokens or BLOCK_TOKENS)
        self._reports = [_Report(instance) for instance in instances]
        self.update()

    def update(self) -> None:
        """Apply what has changed since the last update."""
        for report in self._reports:
            report.apply(self.index)


class _Report:
    """What one instance reports of its cache, from the start again with each new engine.

    An instance with several lanes reports nothing: which of their caches a request will find is open.
    """

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance
        self._engine: Engine | None = None
        self._cache: TieredBlocks | None = None
        self._sequence = 0

    def apply(self, index: PrefixIndex) -> None:
        instance, instance_id = self._instance, self._instance.spec.instance_id
        engine = instance.engines[0] if len(instance.engines) == 1 else None
        if instance.state is InstanceState.DEAD:
            engine = None
        if engine is not self._engine:
            self._engine, self._sequence = engine, 0
            self._cache = engine.memory.watch_cache() if engine is not None else None
            index.forget(instance_id)
        if self._cache is not None and (self._cache.changed or not self._sequence):
            added, removed, hosted = self._cache.take_changes()
            starts = not self._sequence
            index.apply(instance_id, PrefixDelta(instance.generation, self._sequence, added, removed, starts, hosted))
            self._sequence += 1
