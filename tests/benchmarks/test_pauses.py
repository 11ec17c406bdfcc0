"""Scenarios of pauses: they show a pause where there is one, and all policies get the same requests."""

from pathlib import Path

import pytest

from benchmarks.experiment import shots_of
from benchmarks.pauses import ADAPTIVE, SIMPLE, TARGETS, compared_of, pause_scenarios
from benchmarks.policies_live import LiveOptions, run_policies_live
from services.launcher.cluster_file import load_cluster
from shared.cost.step import Batch
from shared.errors import InvalidRequest
from tools.simulate.deployment import load_deployment

BATCH = Batch(((256, 0),), 8, 8_000)
SCENARIOS = {scenario.name: scenario for scenario in pause_scenarios()}


def test_a_burst_that_fits_on_unlike_instances_is_placed_so_that_it_fits(tmp_path: Path) -> None:
    ours = SCENARIOS["burst_unlike"].run(ADAPTIVE, 1, tmp_path)
    assert ours["longest_gap_max_s"] <= 0.15
    assert ours["attainment"] == 1.0


@pytest.mark.parametrize("name", ["overload_equal_one_class", "overload_unlike_classes", "prompts_unlike"])
def test_a_stream_that_has_begun_does_not_pause(tmp_path: Path, name: str) -> None:
    assert SCENARIOS[name].run(ADAPTIVE, 1, tmp_path)["longest_gap_p90_s"] <= 0.3


def test_near_the_limit_of_kv_first_tokens_stay_in_time(tmp_path: Path) -> None:
    ours, simple = (SCENARIOS["kv_0.85_equal"].run(policy, 1, tmp_path) for policy in (ADAPTIVE, SIMPLE["none"]))
    assert ours["attainment"] >= simple["attainment"] - 0.01
    assert ours["longest_gap_p90_s"] < simple["longest_gap_p90_s"]


def test_the_cluster_that_is_started_is_the_one_that_is_simulated(tmp_path: Path) -> None:
    scenario = SCENARIOS["overload_unlike_classes"]
    plain = load_deployment(scenario.cluster_into(tmp_path)).instances
    file = scenario.cluster_into(tmp_path, slowdown=4.0)
    deployment, cluster = load_deployment(file), load_cluster(file)
    assert cluster.instance_ids == tuple(one.instance_id for one in plain)
    assert cluster.gateway.extra["slo"]["default"] == TARGETS.slower(4.0).targets
    assert deployment.run.slo == TARGETS.slower(4.0)
    for slow, usual in zip(deployment.instances, plain, strict=True):
        assert slow.model.step_time_s(BATCH) == pytest.approx(4.0 * usual.model.step_time_s(BATCH))
        assert (slow.kv_tokens, slow.limits) == (usual.kv_tokens, usual.limits)


def test_a_slower_cluster_is_judged_as_the_usual_one(tmp_path: Path) -> None:
    scenario = SCENARIOS["prompts_unlike"]
    workload = scenario.first_requests(1)
    usual, slow = (
        scenario.simulated(load_deployment(scenario.cluster_into(tmp_path, slowdown=by)), workload, ADAPTIVE, 1, by)
        for by in (1.0, 4.0)
    )
    assert slow["jct_p50_s"] == pytest.approx(usual["jct_p50_s"], rel=0.1)
    assert slow["attainment"] == pytest.approx(usual["attainment"], abs=0.05)


def test_the_first_requests_of_a_scenario_with_their_classes() -> None:
    workload = SCENARIOS["overload_equal_classes"].first_requests(2)
    assert len(workload) == 420
    assert {shot.slo for shot in shots_of(workload)} == {"default", "batch"}
    assert SCENARIOS["burst_equal"].first_requests(2).arrival_s[-1] < 1.0
    assert {shot.slo for shot in shots_of(SCENARIOS["burst_equal"].first_requests(2))} == {""}


def test_an_unknown_scenario_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InvalidRequest, match=r"no scenario burst; known: equal_conversation.*pauses, burst_equal"):
        run_policies_live(LiveOptions(("pauses", "burst")))
    with pytest.raises(InvalidRequest, match="no scenario kv_1_equal_predicted"):
        run_policies_live(LiveOptions(("kv_1_equal_predicted",)))


def test_a_simulated_gap_may_be_off_by_a_fifth_or_by_a_fixed_step() -> None:
    def met(name: str, live_s: float, simulated_s: float) -> bool:
        rows = [{"longest_gap_p90_s": one, "longest_gap_max_s": 1.0} for one in (live_s, simulated_s)]
        aims = compared_of(SCENARIOS[name], *rows)["aims"]
        assert aims[f"{name}_adaptive_longest_gap_max_off_percent"]["met"]
        return bool(aims[f"{name}_adaptive_longest_gap_p90_off_percent"]["met"])

    assert met("prompts_unlike", 0.10, 0.12)
    assert not met("prompts_unlike", 0.10, 0.125)
    assert met("burst_unlike", 0.07, 0.10)
    assert not met("burst_unlike", 1.0, 1.3)
