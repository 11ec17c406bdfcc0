"""`bench roles`: its workloads, what it makes of a run, and its aims."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import roles
from benchmarks.roles import Seen, Setting, flip_figures, judged
from benchmarks.scenarios import Phase, shares, turning
from services.launcher.cluster_file import Cluster
from services.launcher.plan import settings_of
from tools.calibrate.target import Sample, Shot

TURNS = (Phase("conversation", 10.0, 20.0), Phase("code", 5.0, 20.0), Phase("conversation", 10.0, 20.0))
SETTING = Setting("s", ("A100-SXM-80",) * 3, TURNS, "adaptive", 1)


def test_a_workload_turns_at_its_phases() -> None:
    work = turning(TURNS, 4_000, seed=1)
    at, prompts, outputs = work.arrival_s, work.prompt_tokens, work.output_tokens
    inside = [(at >= start) & (at < start + 20.0) for start in (0.0, 20.0, 40.0)]
    assert [mask.sum() for mask in inside] == pytest.approx([200, 100, 200], rel=0.2)
    assert sum(mask.sum() for mask in inside) == len(work)
    assert outputs[inside[0]].mean() > 3 * outputs[inside[1]].mean() < outputs[inside[2]].mean()
    assert (prompts + outputs).max() <= 4_000


def test_seeds_draw_other_requests(tmp_path: Path) -> None:
    first, again, other = (turning(TURNS, 4_000, seed, tmp_path) for seed in (1, 1, 2))
    assert np.array_equal(first.prompt_tokens, again.prompt_tokens)
    assert not np.array_equal(first.prompt_tokens[:50], other.prompt_tokens[:50])


def test_traces_are_read_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "traces" / "azure2023"
    folder.mkdir(parents=True)
    for name, prompt in (("conv", 100), ("code", 300)):
        rows = "".join(f"2023-11-16 18:15:{at // 10:02}.{at % 10}00000,{prompt + at % 7},9\n" for at in range(500))
        trace = folder / f"AzureLLMInferenceTrace_{name}.csv"
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    work = turning(TURNS, 4_000, 1, tmp_path)
    code = (work.arrival_s >= 20.0) & (work.arrival_s < 40.0)
    assert set(work.prompt_tokens[code]) <= set(range(300, 307))
    assert set(work.prompt_tokens[~code]) <= set(range(100, 107))


def test_attainment_by_phase_and_once_settled() -> None:
    at, met = np.array([0.0, 5.0, 21.0, 35.0, 41.0]), np.array([True, False, False, True, True])
    assert shares(at, met, TURNS) == [0.5, 0.5, 1.0]
    late = shares(at, met, TURNS, 10.0)
    assert late[1] == 1.0
    assert np.isnan(late[0])


def test_flips_are_told_by_phase() -> None:
    flips = [(3.0, "decode"), (25.0, "prefill"), (33.0, "decode"), (45.0, "decode")]
    assert flip_figures(TURNS, flips, [4.0, 24.0, 26.0, 47.0]) == (4, 1, 7.0, 13.0)
    assert flip_figures(TURNS, [], [24.0]) == (0, 0, 20.0, 0.0)  # the second turn was never noticed


FIXED = Seen("1:2", [1.0, 0.5, 1.0], [1.0, 0.5, 1.0], 0, 0, 0, 20.0, 0.0)
OURS = Seen("predictive", [1.0, 0.96, 1.0], [1.0, 1.0, 1.0], 0, 2, 0, 8.0, 9.0)


def aims(ours: Seen, setting: Setting = SETTING) -> dict[str, bool]:
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    judged("s", setting, [FIXED, replace_label(FIXED), ours], result)
    return {name.removeprefix("s_"): aim["met"] for name, aim in result["aims"].items()}


def replace_label(one: Seen) -> Seen:
    return one._replace(label="2:1", attained=[0.9, 1.0, 0.2], settled=[0.9, 1.0, 0.2])


def test_what_is_near_the_best_of_each_phase_meets_every_aim() -> None:
    assert all(aims(OURS).values())


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"attained": [1.0, 0.9, 1.0]}, "loss_to_best_ratio_of_each_phase"),
        ({"settled": [1.0, 0.9, 1.0]}, "loss_to_best_ratio_once_settled"),
        ({"attained": [0.96, 0.96, 0.4]}, "loss_to_best_ratio_of_all"),
        ({"noticed_s": 31.0}, "noticed_s"),
        ({"turned_back": 1}, "turned_back"),
        ({"failed": 1}, "failed"),
    ],
)
def test_each_aim_can_be_missed(change: dict[str, Any], missed: str) -> None:
    assert not aims(OURS._replace(**change))[missed]


def test_where_all_is_steady_flips_must_not_cost() -> None:
    steady = replace(SETTING, phases=TURNS[:1], steady=True)
    assert aims(OURS, steady)["loss_to_no_flips"]
    assert not aims(OURS._replace(attained=[0.97, 1.0, 1.0]), steady)["loss_to_no_flips"]


def test_a_small_run_through_the_simulator() -> None:
    small = replace(SETTING, phases=(Phase("conversation", 2.0, 10.0), Phase("code", 2.0, 10.0)))
    runs = roles.measure(small, 1, None)
    assert [one.label for one in runs] == ["1:2", "2:1", *roles.FLIPS]
    assert all(one.failed == 0 and min(one.attained) > 0.9 for one in runs)


def test_the_live_clusters_are_as_their_services_want_them() -> None:
    cluster = Cluster.model_validate(roles.cluster_of(Path("model"), 1, "predictive"))
    assert [one.role for one in cluster.instances] == ["prefill", "decode", "decode", "decode"]
    assert cluster.policies["role_flip"] == "predictive"
    assert settings_of(type(cluster.monitor).settings, "file", "monitor", cluster.monitor.extra)


def test_a_live_run_is_read_from_samples_audit_and_events() -> None:
    def sample(at_s: float, ttft_s: float) -> Sample:
        return Sample("r", Shot(10, 11, at_s), 1_000.0 + at_s, ttft_s, ttft_s + 0.5)

    samples = [sample(1.0, 0.2), sample(130.0, 9.0), sample(150.0, 0.2), sample(250.0, 0.2)]
    flips = [
        {"kind": "flip", "started_s": 1_128.0, "to_role": "prefill", "result": "succeeded"},
        {"kind": "flip", "started_s": 1_248.0, "to_role": "decode", "result": "failed"},
    ]
    one = roles.seen_live("predictive", samples, flips, [{"time_s": 1_125.0}, {"time_s": 1_245.0}])
    assert one.attained == [1.0, 0.5, 1.0]
    assert (one.failed, one.flips, one.turned_back, one.noticed_s, one.settled_s) == (1, 2, 0, 5.0, 8.0)
