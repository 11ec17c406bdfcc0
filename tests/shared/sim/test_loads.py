"""What a simulated instance broadcasts of itself means the same as what a live one does."""

import msgspec
import numpy as np
import pytest

from shared.domain.instance import InstanceView
from shared.policy.split import FractionSplit, FullSplit, NoSplit, Split
from shared.sim.cluster import simulate
from shared.sim.instance import SimInstance
from shared.sim.spec import RunSpec, plain_policies
from shared.sim.workload import Workload
from tests.shared.sim.clusters import several


@pytest.mark.parametrize("split", [FullSplit(), NoSplit(), FractionSplit(fraction=0.5)], ids=lambda one: one.name)
def test_queued_tokens_are_those_of_queued_jobs(monkeypatch: pytest.MonkeyPatch, split: Split) -> None:
    """As live (services.worker.jobs.prefill_queue): jobs whose prefill is not done, in the engine or not yet."""
    seen: list[tuple[int, int]] = []
    view = SimInstance.view

    def watched(self: SimInstance, now: float) -> InstanceView:
        found = view(self, now)
        seen.append((found.load.queued_prefill, found.load.queued_prefill_tokens))
        return found

    monkeypatch.setattr(SimInstance, "view", watched)
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(0.02, 200))
    work = Workload("drawn", arrivals, rng.integers(200, 900, 200), rng.integers(1, 40, 200))
    policies = msgspec.structs.replace(plain_policies(), split=split)
    simulate(work, several(2, 2), RunSpec(policies=policies))
    assert max(jobs for jobs, _ in seen) > 5
    assert [pair for pair in seen if bool(pair[0]) is not bool(pair[1])] == []
