"""The load over time, for plots."""

import numpy as np

from shared.domain.instance import InstanceState, InstanceView, Role
from shared.sim.fleet import Fleet
from shared.sim.outcomes import LoadTimeline


class Sampler:
    """Samples of all instances."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._time_s: list[float] = []
        self._role: list[list[int]] = []
        self._decoding: list[list[int]] = []
        self._queued: list[list[int]] = []
        self._kv_share: list[list[float]] = []

    def take(self, now: float) -> None:
        """One sample."""
        self._time_s.append(now)
        views = [instance.view(now) for instance in self._fleet.instances]
        self._role.append([-1 if v.state is InstanceState.DEAD else int(v.role is Role.DECODE) for v in views])
        self._decoding.append([view.load.decoding for view in views])
        self._queued.append([view.load.queued_prefill_tokens for view in views])
        self._kv_share.append([_kv_share(view) for view in views])

    def timeline(self) -> LoadTimeline:
        """All samples."""
        return LoadTimeline(
            time_s=np.array(self._time_s, dtype=np.float64),
            role=np.array(self._role, dtype=np.int8),
            decoding=np.array(self._decoding, dtype=np.int32),
            queued_prefill_tokens=np.array(self._queued, dtype=np.int64),
            kv_share=np.array(self._kv_share, dtype=np.float32),
        )


def _kv_share(view: InstanceView) -> float:
    """Share of the KV memory that is held; an instance that is gone holds nothing."""
    if view.state is InstanceState.DEAD:
        return 0.0
    return 1.0 - view.load.free_blocks / view.info.total_blocks
