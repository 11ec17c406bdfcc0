"""Experiments: searches for figures of live and simulated runs, judgements, and slowed clusters."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import engine, learning, mixed, overhead, overload, prefix, roles, soak
from benchmarks.cluster_files import model_with_context
from benchmarks.experiment import COLUMNS, Arm, Experiment, Means, judged, observed, row_of, twin
from benchmarks.live import EMULATED, REAL
from benchmarks.pauses import ADAPTIVE, BALANCED
from benchmarks.policies import CONTEXT, LIVE, cluster_into
from benchmarks.results import Result, arm_medians, in_turns, run_parts
from benchmarks.scenarios import SLO, Scenario, instances
from benchmarks.suite import DEMO_MODEL
from services.launcher.cli_common import report
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.plan import settings_of
from shared.cost.step import Batch
from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.metrics import attainment
from shared.sim.outcomes import SimResult
from shared.sim.workload import Workload, of_class
from tools.client import Refused, StreamFailed, StreamResult
from tools.simulate.deployment import load_deployment

FULL, NONE = REAL.arms[:2]
FAST, SLOW = Means(0.1, 0.010, 0.50), Means(0.2, 0.0101, 0.60)


def judge(*rounds: dict[Arm, tuple[Means, Means]]) -> Result:
    return judged("demo", rounds)


def test_errors_and_winners() -> None:
    result = judge({FULL: (FAST, Means(0.11, 0.0105, 0.45)), NONE: (SLOW, Means(0.19, 0.0103, 0.62))})
    assert result["figures"]["demo_full_ttft_off_percent"] == pytest.approx(10.0)
    assert result["figures"]["demo_full_jct_off_percent"] == pytest.approx(-10.0)
    assert all(aim["met"] for aim in result["aims"].values())
    assert result["aims"]["demo_full_or_none_by_ttft"]["want"] == "full"
    assert "demo_full_or_none_by_tpot" not in result["aims"]  # one per cent decides nothing


def test_a_wrong_winner_a_large_error_and_equal_policies_are_missed_aims() -> None:
    aims = judge({FULL: (FAST, Means(0.3, 0.01, 0.5)), NONE: (SLOW, SLOW)})["aims"]
    missed = {name for name, aim in aims.items() if not aim["met"]}
    assert missed == {"demo_full_ttft_off_percent", "demo_full_or_none_by_ttft"}
    assert not judge({FULL: (FAST, FAST), NONE: (FAST, FAST)})["aims"]["demo_the_policies_differ"]["met"]


def test_one_disturbed_round_of_three_does_not_decide() -> None:
    good = {FULL: (FAST, FAST), NONE: (SLOW, SLOW)}
    assert all(aim["met"] for aim in judge(good, good | {FULL: (Means(1.0, 0.1, 5.0), FAST)}, good)["aims"].values())


def test_medians_of_arms_and_of_their_ratios_in_a_round() -> None:
    rounds = [{"none": {"jct_s": base}, "more": {"jct_s": 0.5 * base}} for base in (4.0, 8.0, 6.0)]
    wanted = {"x_none_jct_s": 6.0, "x_more_jct_s": 3.0, "x_more_jct_over_none": 0.5}
    assert arm_medians("x", rounds, ("jct_s",)) == wanted
    rounds = [{"none": {"a_s": 0.0}, "more": {"a_s": 1.0}}]
    assert np.isnan(arm_medians("x", rounds, ("a_s",))["x_more_a_over_none"])


async def test_each_round_begins_with_another_arm() -> None:
    measured: list[str] = []

    async def measure(number: int, arm: str) -> str:
        measured.append(f"{arm}{number}")
        return measured[-1]

    assert await in_turns("ab", 2, measure) == [{"a": "a0", "b": "b0"}, {"a": "a1", "b": "b1"}]
    assert measured == ["a0", "b0", "b1", "a1"]


def test_parts_are_run_by_name() -> None:
    parts = {name: lambda name=name: {"figures": {name: 1.0}} for name in ("bayes", "latency")}
    assert run_parts(parts, ["latency"])["figures"] == {"latency": 1.0}
    assert list(run_parts(parts, ())["figures"]) == ["bayes", "latency"]
    with pytest.raises(InvalidRequest, match="no part luck; known: bayes, latency"):
        run_parts(parts, ["luck"])


CLUSTERS = {
    "live": REAL.cluster,
    "emulated": EMULATED.cluster,
    "overload": overload.CLUSTER,
    "overhead": overhead.CLUSTER,
    "structured": overhead.STRUCTURED_CLUSTER,
    "soak": soak.CLUSTER,
    "engine": engine.cluster_of(DEMO_MODEL),
    "mixed": mixed.cluster_of(DEMO_MODEL),
    "learning": learning.cluster_of(DEMO_MODEL),
    "prefix": prefix.cluster_of(DEMO_MODEL),
    "roles": roles.cluster_of(DEMO_MODEL, 1, "predictive"),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_cluster_of_each_bench_is_valid(name: str) -> None:
    cluster = Cluster.model_validate(CLUSTERS[name])
    assert cluster.instance_ids
    assert settings_of(type(cluster.monitor).settings, "file", "monitor", cluster.monitor.extra)


def test_the_policies_of_live_arms_differ() -> None:
    for setting in (REAL, EMULATED):
        assert len({str(arm.specs) for arm in setting.arms}) == 3


def seen_live(*answers: StreamResult | Exception, output: int = 5, slo: Slo = SLO) -> SimResult:
    work = Workload("w", np.zeros(len(answers)), np.full(len(answers), 10), np.full(len(answers), output))
    return observed(work, answers, slo)


def test_a_live_run_has_the_figures_of_a_simulated_one() -> None:
    steady = StreamResult(0.2, 0.6, 5, 0.6, (0.1, 0.1, 0.1, 0.1))
    paused = StreamResult(0.2, 0.6, 5, 0.6, (0.02, 0.02, 0.02, 0.34))
    failed = StreamFailed("cut"), Refused("429"), TimeoutError()
    seen = seen_live(steady, paused, *failed)
    assert seen.outcomes.met(SLO).tolist() == [True, False, False, False, False]
    assert [int(status) for status in seen.outcomes.status] == [0, 0, 3, 1, 3]
    row = row_of(seen, SLO)
    assert list(row) == ["attainment", *COLUMNS]
    assert (row["attainment"], row["ttft_p50_s"], row["jct_p50_s"], row["longest_gap_max_s"]) == (0.2, 0.2, 0.6, 0.34)
    assert Means.from_result(seen, 2.0) == pytest.approx((0.1, 0.05, 0.3))
    assert row_of(seen_live(StreamResult(0.2, 0.2, 1, 0.2), output=1), SLO)["longest_gap_p90_s"] is None


def test_a_request_with_a_class_is_held_to_its_targets() -> None:
    answer = StreamResult(0.2, 2.2, 3, 2.2, (1.0, 1.0))
    work = Workload("w", np.zeros(1), np.array([10]), np.array([3]))
    lax = Slo("lax", 10.0, 2.0)
    assert observed(of_class(work, lax), [answer], SLO).outcomes.met(lax).all()
    assert not observed(work, [answer], SLO).outcomes.met(SLO).any()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_with_context(tmp_path / "model", CONTEXT)
    return tmp_path


@pytest.mark.parametrize("scenario", LIVE, ids=lambda one: one.name)
def test_the_file_has_the_instances_of_the_scenario(folder: Path, scenario: Scenario) -> None:
    file, batch = cluster_into(folder, scenario, 4.0), Batch(((256, 0),), 8, 8_000)
    wanted = instances(scenario.cluster)
    assert load_cluster(file).instance_ids == tuple(one.instance_id for one in wanted)
    for one, want in zip(load_deployment(file).instances, wanted, strict=True):
        assert (one.role, one.accelerator) == (want.role, want.accelerator)
        assert one.kv_tokens == pytest.approx(want.kv_tokens, abs=1)
        for limit in ("batched_tokens", "sequences", "max_model_len"):
            assert getattr(one.limits, limit) == getattr(want.limits, limit)
        assert one.model.step_time_s(batch) == pytest.approx(4.0 * want.model.step_time_s(batch))
        assert one.link.bandwidth_bytes_s == pytest.approx(want.link.bandwidth_bytes_s / 4.0)


def test_a_cluster_as_many_times_as_slow_serves_as_well(folder: Path) -> None:
    workload = LIVE[0].workload(20.0, 100)

    def served(factor: float, arm: Arm) -> tuple[Means, float]:
        file = cluster_into(folder, LIVE[0], factor)
        seen = Experiment("one", file, lambda _: workload, (arm,), SLO, factor).simulated(twin(file), arm, 1)
        return Means.from_result(seen, factor), attainment(seen.outcomes, SLO.slower(factor)).every

    for arm in (ADAPTIVE, BALANCED):
        (means, share), (longer, same) = served(1.0, arm), served(8.0, arm)
        assert longer.tpot == pytest.approx(means.tpot, rel=0.1)
        assert longer.ttft == pytest.approx(means.ttft, rel=0.2)
        assert same == pytest.approx(share, abs=0.05)


def test_the_table_is_printed_and_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"scenario": "s", "policy": "p", "goodput_per_s": 3.0, "longest_gap_p90_s": 0.25, "ttft_p50_s": None}]
    console = Console(file=io.StringIO(), width=120)
    assert report(console, {"figures": {}, "aims": {}, "tables": {"side by side": rows}}, as_json=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(part in text for part in ("goodput/s", "longest gap p90, s", "–"))
    assert json.loads(capsys.readouterr().out)["tables"]["side by side"] == rows
