"""`bench roles`: its workloads, the figures of a run, and its aims."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import roles
from benchmarks.roles import Figures, Setting, flip_figures, judged
from benchmarks.scenarios import Phase, shares, turning

TURNS = (Phase("conversation", 10.0, 20.0), Phase("code", 5.0, 20.0), Phase("conversation", 10.0, 20.0))
SETTING = Setting("s", ("A100-SXM-80",) * 3, TURNS, "adaptive", 1)


def test_a_workload_turns_at_its_phases(tmp_path: Path) -> None:
    work = turning(TURNS, 4_000, seed=1)
    at, prompts, outputs = work.arrival_s, work.prompt_tokens, work.output_tokens
    inside = [(at >= start) & (at < start + 20.0) for start in (0.0, 20.0, 40.0)]
    assert [mask.sum() for mask in inside] == pytest.approx([200, 100, 200], rel=0.2)
    assert sum(mask.sum() for mask in inside) == len(work)
    assert outputs[inside[0]].mean() > 3 * outputs[inside[1]].mean() < outputs[inside[2]].mean()
    assert (prompts + outputs).max() <= 4_000
    again, other = (turning(TURNS, 4_000, seed, tmp_path).prompt_tokens for seed in (1, 2))
    assert np.array_equal(prompts, again)
    assert not np.array_equal(prompts[:50], other[:50])


def test_existing_traces_are_read(tmp_path: Path) -> None:
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


def test_attainment_and_flips_by_phase() -> None:
    at, met = np.array([0.0, 5.0, 21.0, 35.0, 41.0]), np.array([True, False, False, True, True])
    assert shares(at, met, TURNS) == [0.5, 0.5, 1.0]
    late = shares(at, met, TURNS, 10.0)
    assert late[1] == 1.0
    assert np.isnan(late[0])
    flips = [(3.0, "decode"), (25.0, "prefill"), (33.0, "decode"), (45.0, "decode")]
    assert flip_figures(TURNS, flips, [4.0, 24.0, 26.0, 47.0]) == (4, 1, 7.0, 13.0)
    assert flip_figures(TURNS, [], [24.0]) == (0, 0, 20.0, 0.0)  # the second turn was not noticed


FIXED = Figures("1:2", [1.0, 0.5, 1.0], [1.0, 0.5, 1.0], 0, 0, 0, 20.0, 0.0)
OTHER = FIXED._replace(label="2:1", attained=[0.9, 1.0, 0.2], settled=[0.9, 1.0, 0.2])
OURS = Figures("predictive", [1.0, 0.96, 1.0], [1.0, 1.0, 1.0], 0, 2, 0, 8.0, 9.0)


def missed(setting: Setting = SETTING, **change: Any) -> set[str]:
    aims = judged("s", setting, [FIXED, OTHER, OURS._replace(**change)])["aims"]
    return {name.removeprefix("s_") for name, aim in aims.items() if not aim["met"]}


@pytest.mark.parametrize(
    ("change", "aim"),
    [
        ({"attained": [1.0, 0.9, 1.0]}, "loss_to_best_ratio_of_each_phase"),
        ({"settled": [1.0, 0.9, 1.0]}, "loss_to_best_ratio_once_settled"),
        ({"attained": [0.96, 0.96, 0.4]}, "loss_to_best_ratio_of_all"),
        ({"noticed_s": 31.0}, "noticed_s"),
        ({"turned_back": 1}, "turned_back"),
        ({"failed": 1}, "failed"),
    ],
)
def test_each_aim_can_be_missed(change: dict[str, Any], aim: str) -> None:
    assert not missed()
    assert aim in missed(**change)


def test_flips_must_not_cost_where_all_is_steady() -> None:
    steady = replace(SETTING, steady=True)
    level = {"attained": [1.0, 1.0, 1.0]}
    assert not missed(steady, **level)
    assert missed(steady, attained=[0.97, 1.0, 1.0]) == {"loss_to_no_flips"}


def test_a_small_run_through_the_simulator() -> None:
    small = replace(SETTING, phases=(Phase("conversation", 2.0, 10.0), Phase("code", 2.0, 10.0)))
    runs = roles.simulated(small, 1, None)
    assert [one.label for one in runs] == ["1:2", "2:1", *roles.FLIPS]
    assert all(one.failed == 0 and min(one.attained) > 0.9 for one in runs)
