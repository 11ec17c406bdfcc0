"""Scenarios of pauses: they show a pause where there is one, and all policies get the same requests."""

from pathlib import Path

import pytest

from lab.bench.pauses import ADAPTIVE, SIMPLE, pause_scenarios

SCENARIOS = {scenario.name: scenario for scenario in pause_scenarios()}


def test_a_burst_that_fits_on_unlike_instances_is_placed_so_that_it_fits(tmp_path: Path) -> None:
    scenario = SCENARIOS["burst_unlike"]
    ours, simple = (scenario.run(policy, 1, tmp_path) for policy in (ADAPTIVE, SIMPLE["full"]))
    assert ours["longest_gap_max_s"] <= 0.15
    assert simple["longest_gap_p90_s"] > 1.0
    assert ours["attainment"] == 1.0


@pytest.mark.parametrize("name", ["overload_equal_one_class", "overload_unlike_classes", "prompts_unlike"])
def test_a_stream_that_has_begun_does_not_pause(tmp_path: Path, name: str) -> None:
    assert SCENARIOS[name].run(ADAPTIVE, 1, tmp_path)["longest_gap_p90_s"] <= 0.3


def test_near_the_limit_of_kv_first_tokens_stay_in_time(tmp_path: Path) -> None:
    ours, simple = (SCENARIOS["kv_0.85_equal"].run(policy, 1, tmp_path) for policy in (ADAPTIVE, SIMPLE["none"]))
    assert ours["attainment"] >= simple["attainment"] - 0.01
    assert ours["longest_gap_p90_s"] < simple["longest_gap_p90_s"]
