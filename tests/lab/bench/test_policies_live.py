"""Scenarios for live clusters: the file says the same instances, and all of their times are as many times as long."""

from pathlib import Path

import pytest

from lab.bench.comparison import share_within
from lab.bench.experiment import Arm, Experiment, Means, model_with_context, twin
from lab.bench.policies_live import ADAPTIVE, CONTEXT, FIXED, SCENARIOS, cluster_into
from lab.bench.scenarios import SLO, Scenario, instances
from lab.calibrate.target import Sample, Shot
from lab.simulate.deployment import load_deployment
from services.launcher.cluster_file import load_cluster
from shared.cost.step import Batch
from shared.sim.metrics import attainment, summary

BATCH = Batch(((256, 0),), 8, 8_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_with_context(tmp_path / "model", CONTEXT)
    return tmp_path


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_the_file_has_the_instances_of_the_scenario(folder: Path, scenario: Scenario) -> None:
    file = cluster_into(folder, scenario, 4.0)
    wanted = instances(scenario.cluster)
    assert load_cluster(file).instance_ids == tuple(one.instance_id for one in wanted)
    for one, want in zip(load_deployment(file).instances, wanted, strict=True):
        assert (one.role, one.accelerator) == (want.role, want.accelerator)
        assert one.kv_tokens == pytest.approx(want.kv_tokens, abs=1)
        assert one.limits.batched_tokens == want.limits.batched_tokens
        assert one.limits.sequences == want.limits.sequences
        assert one.limits.max_model_len == want.limits.max_model_len
        assert one.model.step_time_s(BATCH) == pytest.approx(4.0 * want.model.step_time_s(BATCH))
        assert one.link.bandwidth_bytes_s == pytest.approx(want.link.bandwidth_bytes_s / 4.0)


def test_a_cluster_as_many_times_as_slow_serves_as_well(folder: Path) -> None:
    scenario = SCENARIOS[0]
    workload = scenario.workload(20.0, 100)

    def served(factor: float, arm: Arm) -> tuple[Means, float]:
        file = cluster_into(folder, scenario, factor)
        one = Experiment("one", file, lambda _: workload, (arm,), SLO, factor)
        result = one.simulated(twin(file), arm, 1)
        return Means.from_summary(summary(result, one.slow_slo)), attainment(result.outcomes, one.slow_slo).every

    for arm in (ADAPTIVE, FIXED):
        (means, share), (longer, same) = served(1.0, arm), served(8.0, arm)
        assert longer.tpot == pytest.approx(8.0 * means.tpot, rel=0.1)
        assert longer.ttft == pytest.approx(8.0 * means.ttft, rel=0.2)
        assert same == pytest.approx(share, abs=0.05)


def test_who_met_all_targets() -> None:
    slo = SLO.slower(2.0)
    late, slow = 1.1 * slo.ttft_s, 11 * 1.1 * slo.tpot_s
    samples = [
        Sample("met", Shot(10, 11), 0.0, 0.1, 0.2),
        Sample("one token", Shot(10, 1), 0.0, 0.1, 0.1),
        Sample("late", Shot(10, 11), 0.0, late, late + 0.1),
        Sample("slow", Shot(10, 11), 0.0, 0.1, 0.1 + slow),
        Sample("paused", Shot(10, 11), 0.0, 0.1, 0.8, (0.01,) * 9 + (1.1 * slo.itl_s,)),
    ]
    assert share_within(samples, slo) == 0.4
