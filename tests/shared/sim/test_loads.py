"""What a simulated instance broadcasts of itself means the same as what a live one does."""

import msgspec
import numpy as np
import pytest

from shared.domain.instance import InstanceView, Role
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.placement import Policies
from shared.policy.split import FractionSplit, FullSplit, NoSplit, Split
from shared.sim.cluster import simulate
from shared.sim.instance import SimInstance
from shared.sim.spec import EngineLimits, RunSpec, plain_policies
from shared.sim.workload import Workload
from tests.shared.sim.clusters import instance, several


def test_queued_tokens_are_without_what_the_instance_is_known_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    view = SimInstance.view

    def watched(self: SimInstance, now: float) -> InstanceView:
        found = view(self, now)
        seen.append(found.load.queued_prefill_tokens)
        return found

    monkeypatch.setattr(SimInstance, "view", watched)
    work = Workload(
        "two turns, and one after them",
        np.array([0.0, 50.0, 50.001, 50.2, 100.0]),
        np.array([2048, 2560, 2560, 16, 16]),
        np.full(5, 2),
        prefixes=((1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (), ()),
        prefix_block_tokens=512,
    )
    limits = EngineLimits(512, 8, 16, prefix_cache=True)
    specs = [instance("d", Role.DECODE, kv_tokens=20_000, limits=limits)]
    adaptive = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
    simulate(work, specs, RunSpec(policies=adaptive, broadcast_s=0.0))
    assert max(seen) == 2 * 512, "of each second turn one block is new"


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
