"""`bench policies`: its searches against what an exhaustive one finds, the file of runs, and its report."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import policies as bench
from benchmarks.cli import find_bench
from benchmarks.comparison import Bracket, Ladder, best_mean, goodput, race
from benchmarks.policies import Found, PoliciesOptions, Runs, Single, met_by, report
from benchmarks.scenarios import Scenario, all_scenarios
from services.launcher.cli_common import summary
from shared.errors import InvalidRequest

STEP = 1.02
LADDER = Ladder.near(10.0, STEP)
NAMES = [f"p{number}" for number in range(12)]
rates = st.floats(0.05, 60.0)


def exhaustive(limit: float) -> float:
    """The highest rate of the ladder within a limit."""
    rungs = range(LADDER.lowest, LADDER.rungs(1e6))
    return max((LADDER.rate(rung) for rung in rungs if LADDER.rate(rung) <= limit), default=0.0)


@given(rates)
def test_goodput_is_the_highest_rung_that_is_met(limit: float) -> None:
    assert goodput(lambda rate: rate <= limit, 10.0, STEP) == exhaustive(limit)


def test_a_search_takes_few_runs() -> None:
    tried: list[float] = []

    def meets(rate: float) -> bool:
        tried.append(rate)
        return rate <= 7.0

    goodput(meets, 10.0, STEP)
    assert len(tried) == len(set(tried)) <= 8


@given(st.lists(rates, min_size=12, max_size=12))
def test_a_race_finds_the_best_and_bounds_the_others(limits: list[float]) -> None:
    limit = dict(zip(NAMES, limits, strict=True))
    runs = 0

    def meets(name: str) -> Callable[[float], bool]:
        def run(rate: float) -> bool:
            nonlocal runs
            runs += 1
            return rate <= limit[name]

        return run

    brackets = race(NAMES, meets, LADDER)
    best = max(exhaustive(one) for one in limits)
    assert max(bracket.least for bracket in brackets.values()) == best
    for name, bracket in brackets.items():
        assert bracket.least <= exhaustive(limit[name]) <= bracket.most <= max(best, bracket.least)
    assert any(bracket.exact and bracket.least == best for bracket in brackets.values())


@given(st.integers(0, 1_000))
def test_the_best_mean_is_found_without_all_figures(seed: int) -> None:
    rng, scenes = Random(seed), ("a", "b", "c")
    limit = {(name, scene): rng.uniform(0.5, 11.0) for name in NAMES for scene in scenes}
    worth, runs = {"a": 0.1, "b": 0.2, "c": 0.05}, 0

    def meets(name: str, scene: str) -> Callable[[float], bool]:
        return lambda rate: rate <= limit[name, scene]

    def narrowed(name: str, brackets: dict[str, Bracket]) -> dict[str, Bracket]:
        nonlocal runs
        runs += len(brackets)
        return {scene: found.tried(found.next, meets(name, scene)) for scene, found in brackets.items()}

    raced = {scene: race(NAMES, lambda name, scene=scene: meets(name, scene), LADDER) for scene in scenes}
    brackets = {name: {scene: raced[scene][name] for scene in scenes} for name in NAMES}
    best, of = best_mean(brackets, worth, dict.fromkeys(scenes, 1.0), narrowed)
    means = {name: sum(worth[scene] * exhaustive(limit[name, scene]) for scene in scenes) for name in NAMES}
    assert means[best] == max(means.values())
    assert sum(worth[scene] * bracket.least for scene, bracket in of.items()) == pytest.approx(means[best])
    assert runs < len(NAMES) * len(scenes) * 6


@dataclass
class Line:
    """A scenario in which each policy serves up to its rate, and beyond it only the first of the requests."""

    limits: dict[str, float]
    name: str = "line"
    seed: int = 1
    asked: list[tuple[float, int | None]] = field(default_factory=list)

    def attained(self, policy: str, rate: float, requests: int, head: int | None = None) -> float:
        self.asked.append((rate, head))
        served = requests if rate <= self.limits[policy] else 0.3 * requests / (rate / self.limits[policy])
        return min(1.0, served / (requests if head is None else head))


def test_who_plainly_misses_is_not_served_to_the_end() -> None:
    line = Line({"p": 10.0})
    assert met_by(line, "p", 10.0, 600)
    assert line.asked == [(10.0, 200), (10.0, None)]
    line.asked.clear()
    assert not met_by(line, "p", 40.0, 600)  # 45 of the first 200 in time, where all of 600 may miss 60
    assert line.asked == [(40.0, 200)]
    line.asked.clear()
    assert not met_by(line, "p", 11.0, 600)  # 164 of the first 200: the rest decides
    assert line.asked == [(11.0, 200), (11.0, None)]


def test_runs_are_made_once_and_kept(tmp_path: Path) -> None:
    file, line = tmp_path / "runs", Line({"p": 10.0, "q": 12.0})
    with ThreadPoolExecutor(1) as pool, Runs(pool, file) as runs:
        assert [runs.meets(line, "p", rate, 600) for rate in (10.0, 11.0, 10.0)] == [True, False, True]
        assert runs.of(line, "q", 600)(11.0)
        assert runs.made == 3
    line.asked.clear()
    with ThreadPoolExecutor(1) as pool, Runs(pool, file) as again:
        assert [again.meets(line, "p", rate, 600) for rate in (10.0, 11.0)] == [True, False]
        assert not line.asked
        again.meets(line, "p", 10.0, 700)
        again.meets(Line({"p": 10.0}, seed=2), "p", 10.0, 600)
        assert again.made == 2
    assert len(file.read_text().splitlines()) == 5
    assert json.loads(file.read_text().splitlines()[1]) == ["line", 1, "p", "11", 600, False]


def found(cluster: str, adaptive: float, best: float, seed: int = 1) -> Found:
    low = Ladder.near(best, STEP).start
    ladder = Ladder(STEP, low)
    brackets = {"best": Bracket(ladder, low, low + 1), "other": Bracket(ladder, low - 20, low)}
    return Found(Scenario(cluster, "code", seed), 600, adaptive * ladder.rate(low) / best, brackets)


def test_a_report_takes_medians_over_seeds_and_misses_each_aim() -> None:
    near = [found("equal", 9.6, 10.0), found("equal", 9.8, 10.0, 2), found("equal", 9.9, 10.0, 3)]
    far = [found("fast_slow", 20.0, 10.0)]
    result = report([near, far], Single("best", 0.8))
    assert summary(result)["ok"] is True
    assert result["figures"]["equal_code_ratio"] == 0.98
    assert result["figures"]["fast_slow_code_ratio"] == 2.0
    assert result["figures"]["adaptive_over_best_single"] == 1.25
    low = report([near[:1], far], Single("best", 0.8))
    assert [aim["met"] for aim in low["aims"].values()] == [False, True]
    level = report([near, far], Single("best", 0.9))
    assert [aim["met"] for aim in level["aims"].values()] == [True, False]


def test_scenarios_are_chosen_by_name() -> None:
    assert len(bench.named(())) == len(list(all_scenarios())) == 12
    assert [one.name for one in bench.named(("fast_slow_code", "equal_mixed"))] == ["fast_slow_code", "equal_mixed"]
    with pytest.raises(InvalidRequest, match="no scenario fast; known: equal_conversation"):
        bench.named(("fast",))


def test_a_head_is_the_first_of_the_same_requests() -> None:
    one = Scenario("fast_slow", "code")
    assert one.attained("adaptive", 2.0, 40) == one.attained("adaptive", 2.0, 40, 20) == 1.0
    assert one.attained("adaptive", 400.0, 200, 10) > one.attained("adaptive", 400.0, 200)


def test_it_is_a_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two policies, few requests, one process beside this one."""
    monkeypatch.setattr(bench, "FEWEST", 30)
    monkeypatch.setattr(bench, "SHORT_S", 0.5)
    monkeypatch.setattr(bench, "LASTS_S", 1.0)
    monkeypatch.setattr(bench, "MORE_SEEDS", 1)
    policies = ("placement=least_load+balanced+power_of_two", "placement=least_load+split=none+power_of_two")
    monkeypatch.setattr(bench, "fixed_policies", lambda: policies)
    options = PoliciesOptions(("fast_slow_conversation",), tmp_path / "runs", processes=1)
    result = find_bench("policies")(options)
    assert set(result["aims"]) == {"least_ratio_to_best_fixed", "adaptive_over_best_single"}
    assert result["figures"]["fast_slow_conversation_adaptive_per_s"] > 1.0
    (rows,) = result["tables"].values()
    assert rows[0]["policy"] == "adaptive"
    assert len({row["policy"] for row in rows}) == len(rows) >= 2
    for row in rows:
        assert 0.0 < row["ttft_p50_s"] <= row["ttft_p90_s"] < row["jct_p90_s"]
        assert 0.0 < row["longest_gap_p90_s"] <= row["longest_gap_max_s"]
    assert result["figures"] == find_bench("policies")(options)["figures"]  # nothing is run again
