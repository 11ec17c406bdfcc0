"""Policies side by side, live and simulated: judgements, slowed clusters, and rows of tables."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import live
from benchmarks.comparison import COLUMNS, of_result, of_samples, share_within
from benchmarks.experiment import Arm, Experiment, Means, model_with_context, twin
from benchmarks.live import EMULATED, REAL, LivePair
from benchmarks.policies_live import ADAPTIVE, CONTEXT, FIXED, SCENARIOS, cluster_into
from benchmarks.scenarios import SLO, Scenario, instances
from services.launcher.cli_common import report
from services.launcher.cluster_file import Cluster, load_cluster
from shared.cost.step import Batch
from shared.sim.metrics import attainment, summary
from shared.sim.spec import RunSpec
from tools.calibrate.target import Sample, Shot
from tools.simulate.deployment import load_deployment


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


def test_a_simulated_run() -> None:
    result = Scenario("fast_slow", "conversation").result("adaptive", 4.0, 60)
    row = of_result({"policy": "adaptive"}, result, SLO)
    assert list(row) == ["policy", "attainment", *COLUMNS]
    gaps = result.outcomes.longest_gap_s
    assert row["longest_gap_max_s"] == pytest.approx(gaps[gaps > 0.0].max(), abs=1e-4)
    assert row["attainment"] == round(float(result.outcomes.met(SLO).mean()), 4)


def test_a_live_run_counts_a_pause() -> None:
    steady = Sample("a", Shot(10, 5), 0.0, 0.2, 0.6, (0.1, 0.1, 0.1, 0.1))
    paused = Sample("b", Shot(10, 5), 0.0, 0.2, 0.6, (0.02, 0.02, 0.02, 0.34))
    single = Sample("c", Shot(10, 1), 0.0, 0.2, 0.2)
    row = of_samples({"policy": "p"}, [steady, paused, single], SLO)
    assert (steady.met(SLO), paused.met(SLO), single.met(SLO)) == (True, False, True)
    assert row["attainment"] == pytest.approx(2 / 3, abs=1e-4)
    assert (row["ttft_p50_s"], row["jct_p50_s"], row["longest_gap_max_s"]) == (0.2, 0.6, 0.34)
    assert of_samples({}, [single], SLO)["longest_gap_p90_s"] is None


def test_the_table_is_printed_and_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"scenario": "s", "policy": "p", "goodput_per_s": 3.0, "longest_gap_p90_s": 0.25, "ttft_p50_s": None}]
    console = Console(file=io.StringIO(), width=120)
    assert report(console, {"figures": {}, "aims": {}, "tables": {"side by side": rows}}, as_json=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "goodput/s" in text
    assert "longest gap p90, s" in text
    assert "–" in text
    assert json.loads(capsys.readouterr().out)["tables"]["side by side"] == rows
