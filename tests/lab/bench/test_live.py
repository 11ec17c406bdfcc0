"""The judgement of `bench live`: errors, winners, and differences too small to have one."""

from typing import Any

import pytest

from lab.bench import live
from lab.bench.experiment import Means
from lab.bench.live import EMULATED, REAL, LivePair
from lab.calibrate.target import Sample, Shot
from services.launcher.cluster_file import Cluster
from shared.sim.spec import RunSpec


def judged(*rounds: dict[str, tuple[Means, Means]]) -> dict[str, Any]:
    made = [live.Round((), {label: LivePair(*pair) for label, pair in pairs.items()}) for pairs in rounds]
    return live.judged(REAL.name, REAL.arms[:2], made)


FULL = Means(0.1, 0.010, 0.50)
NONE = Means(0.2, 0.0101, 0.60)


def test_errors_and_winners() -> None:
    result = judged({"full": (FULL, Means(0.11, 0.0105, 0.45)), "none": (NONE, Means(0.19, 0.0103, 0.62))})
    assert result["figures"]["demo_full_ttft_off_percent"] == pytest.approx(10.0)
    assert result["figures"]["demo_full_jct_off_percent"] == pytest.approx(-10.0)
    assert all(aim["met"] for aim in result["aims"].values())
    assert result["aims"]["demo_full_or_none_by_ttft"]["want"] == "full"
    assert "demo_full_or_none_by_tpot" not in result["aims"]  # one per cent decides nothing


def test_a_wrong_winner_and_a_large_error_are_missed_aims() -> None:
    aims = judged({"full": (FULL, Means(0.3, 0.01, 0.5)), "none": (NONE, Means(0.2, 0.01, 0.6))})["aims"]
    assert not aims["demo_full_ttft_off_percent"]["met"]
    assert not aims["demo_full_or_none_by_ttft"]["met"]
    assert aims["demo_full_or_none_by_jct"]["met"]


def test_policies_that_do_not_differ_show_nothing() -> None:
    aims = judged({"full": (FULL, FULL), "none": (FULL, FULL)})["aims"]
    assert not aims["demo_the_policies_differ"]["met"]


def test_one_disturbed_round_of_three_does_not_decide() -> None:
    good = {"full": (FULL, FULL), "none": (NONE, NONE)}
    bad = {"full": (Means(1.0, 0.1, 5.0), FULL), "none": (NONE, NONE)}
    assert all(aim["met"] for aim in judged(good, bad, good)["aims"].values())


def test_the_clusters_are_valid_and_their_policies_exist() -> None:
    for scenario in (REAL, EMULATED):
        assert len(Cluster.model_validate(scenario.cluster).instance_ids) == 4
        policies = {arm.under(RunSpec()).policies for arm in scenario.arms}
        assert len(policies) == len(scenario.arms)
        assert all(arm.specs for arm in scenario.arms)


def test_means_leave_out_what_is_not_there() -> None:
    samples = [Sample("a", Shot(10, 1), 0.0, 0.1, 0.1), Sample("b", Shot(10, 11), 0.0, 0.3, 0.5)]
    assert Means.from_samples(samples) == Means(pytest.approx(0.2), pytest.approx(0.02), pytest.approx(0.3))
