"""What instances of a run tell of their prefix caches, as old as it is when a decision looks at it."""

from collections.abc import Sequence

from shared.domain.instance import InstanceState
from shared.domain.prefix import BLOCK_TOKENS, PrefixDelta
from shared.policy.prefix_blocks import ReachableBlocks
from shared.policy.prefix_index import PrefixIndex
from shared.sim.engine import Engine
from shared.sim.instance import SimInstance


class PrefixNews:
    """Feeds an index from the instances' caches, in blocks of the workload's prefix ids.

    An instance with several lanes tells nothing: which of their caches a request will find is open.
    """

    def __init__(self, instances: Sequence[SimInstance], block_tokens: int) -> None:
        self.index = PrefixIndex(block_tokens or BLOCK_TOKENS)
        self._accounts = [_Account(instance) for instance in instances]
        self.tell()

    def tell(self) -> None:
        """What has changed since."""
        for account in self._accounts:
            account.tell(self.index)


class _Account:
    """Of one instance, its engine of the moment."""

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance
        self._engine: Engine | None = None
        self._cache: ReachableBlocks | None = None
        self._sequence = 0

    def tell(self, index: PrefixIndex) -> None:
        """Begin anew with each engine."""
        instance, instance_id = self._instance, self._instance.spec.instance_id
        engine = instance.engines[0] if len(instance.engines) == 1 else None
        if instance.state is InstanceState.DEAD:
            engine = None
        if engine is not self._engine:
            self._engine, self._sequence = engine, 0
            self._cache = engine.scheduler.memory.watch_cache() if engine is not None else None
            index.forget(instance_id)
        if self._cache is not None and (self._cache.changed or not self._sequence):
            added, removed = self._cache.take_changes()
            starts = not self._sequence
            index.apply(instance_id, PrefixDelta(instance.generation, self._sequence, added, removed, starts))
            self._sequence += 1
