"""`bench policies`: its searches, the file of runs, its report, and scenarios of pauses."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import policies as bench
from benchmarks.experiment import shots_of
from benchmarks.goodput import Bracket, goodput
from benchmarks.pauses import ADAPTIVE, SIMPLE, TARGETS, off_of, pause_scenarios
from benchmarks.policies import Compared, Runs, Single, best_single, met_by, race, report, run_policies_bench
from benchmarks.scenarios import Scenario, all_scenarios
from services.launcher.cluster_file import load_cluster
from shared.errors import InvalidRequest
from tools.simulate.deployment import load_deployment

UNKNOWN = Bracket.near(10.0, 1.02)
NAMES = [f"p{number}" for number in range(12)]
PAUSES = {scenario.name: scenario for scenario in pause_scenarios()}


def exhaustive(limit: float) -> float:
    """The highest rate of the ladder within a limit."""
    rates = [UNKNOWN.rate(rung) for rung in range(UNKNOWN.lowest, UNKNOWN.rungs(1e6))]
    return max((rate for rate in rates if rate <= limit), default=0.0)


@given(st.floats(0.05, 60.0))
def test_goodput_is_the_highest_rung_that_is_met(limit: float) -> None:
    tried: list[float] = []

    def meets(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    assert goodput(meets, 10.0, 1.02) == exhaustive(limit)
    assert len(tried) == len(set(tried)) <= 20


@given(st.lists(st.floats(0.05, 60.0), min_size=12, max_size=12))
def test_a_race_finds_the_best_and_bounds_the_others(limits: list[float]) -> None:
    limit = dict(zip(NAMES, limits, strict=True))
    brackets = race(NAMES, lambda name: lambda rate: rate <= limit[name], UNKNOWN)
    best = max(exhaustive(one) for one in limits)
    assert any(bracket.exact and bracket.min_rate == best for bracket in brackets.values())
    for name, bracket in brackets.items():
        assert bracket.min_rate <= exhaustive(limit[name]) <= bracket.max_rate <= max(best, bracket.min_rate)


@given(st.integers(0, 1_000))
def test_the_best_mean_is_found_without_all_figures(seed: int) -> None:
    rng, adaptive, runs = Random(seed), {"equal": 10.0, "fast_slow": 5.0, "mixed_32": 20.0}, 0
    limit = {(name, cluster): rng.uniform(0.5, 11.0) for name in NAMES for cluster in adaptive}

    def meets(name: str, cluster: str) -> Callable[[float], bool]:
        return lambda rate: rate <= limit[name, cluster]

    def narrow(name: str, found: Sequence[Compared], brackets: Sequence[Bracket]) -> Iterator[Bracket]:
        nonlocal runs
        for one, bracket in zip(found, brackets, strict=True):
            runs += 1
            yield bracket.tried(bracket.next, meets(name, one.scenario.cluster))

    raced = {cluster: race(NAMES, lambda name, to=cluster: meets(name, to), UNKNOWN) for cluster in adaptive}
    found = [Compared(Scenario(cluster, "code"), 600, rate, raced[cluster]) for cluster, rate in adaptive.items()]
    single = best_single(found, narrow)
    means = {n: fmean(exhaustive(limit[n, cluster]) / rate for cluster, rate in adaptive.items()) for n in NAMES}
    assert single.mean == pytest.approx(max(means.values())) == pytest.approx(means[single.policy])
    assert list(single.goodput.values()) == [exhaustive(limit[single.policy, cluster]) for cluster in adaptive]
    assert runs < len(NAMES) * len(adaptive) * 6


@dataclass(frozen=True)
class Line(Scenario):
    """A scenario that serves up to 10 requests a second, and beyond that only the first of the requests."""

    cluster: str = "line"
    kind: str = "x"
    calls: list[tuple[float, int | None]] = field(default_factory=list)

    def attained(self, policy: str, rate: float, requests: int, head: int | None = None) -> float:
        self.calls.append((rate, head))
        served = requests if rate <= 10.0 else 3.0 * requests / rate
        return min(1.0, served / (requests if head is None else head))


@pytest.mark.parametrize(
    ("rate", "met", "heads"),
    [
        (10.0, True, [200, None]),
        (40.0, False, [200]),  # 45 of the first 200 in time, where all of 600 may miss 60
        (11.0, False, [200, None]),  # 164 of the first 200: the others decide
    ],
)
def test_a_run_that_plainly_misses_ends_early(rate: float, met: bool, heads: list[int | None]) -> None:
    line = Line()
    assert met_by(line, "p", rate, 600) is met
    assert [head for _, head in line.calls] == heads


def test_runs_are_made_once_and_kept(tmp_path: Path) -> None:
    file, line = tmp_path / "runs", Line()
    assert [Runs(file).meets(line, "p", 600)(rate) for rate in (10.0, 11.0)] == [True, False]
    bench._known.cache_clear()  # as in another process
    line.calls.clear()
    assert [Runs(file).meets(line, "p", 600)(rate) for rate in (10.0, 11.0)] == [True, False]
    assert not line.calls
    Runs(file).meets(line, "p", 600, 70.0)(10.0)
    Runs(file).meets(Line(seed=2), "p", 600)(10.0)
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    assert [row[1:5] for row in rows[2:]] == [[1, "p", "10", 700], [2, "p", "10", 600]]
    assert rows[1] == ["line_x", 1, "p", "11", 600, False]


def compared(cluster: str, ratio: float) -> Compared:
    low = UNKNOWN.start
    brackets = {"best": Bracket(1.02, low, low, low + 1), "other": Bracket(1.02, low, low - 20, low)}
    return Compared(Scenario(cluster, "code"), 600, ratio * UNKNOWN.rate(low), brackets)


@pytest.mark.parametrize(("ratios", "share", "met"), [
    ((0.96, 0.98, 0.99), 0.8, [True, True]),
    ((0.96,), 0.8, [False, True]),
    ((0.96, 0.98, 0.99), 0.9, [True, False]),
])  # fmt: skip
def test_a_report_takes_medians_over_seeds(ratios: tuple[float, ...], share: float, met: list[bool]) -> None:
    near = [compared("equal", ratio) for ratio in ratios]
    result = report([near, [compared("fast_slow", 2.0)]], Single("best", share, {}))
    assert result["figures"]["equal_code_ratio"] == (0.98 if len(ratios) > 1 else 0.96)
    assert result["figures"]["fast_slow_code_ratio"] == 2.0
    assert [aim["met"] for aim in result["aims"].values()] == met


def test_scenarios_are_chosen_by_name() -> None:
    assert len(bench.named(())) == len(list(all_scenarios())) == 12
    assert [one.name for one in bench.named(("fast_slow_code", "equal_mixed"))] == ["fast_slow_code", "equal_mixed"]
    for names, live, words in (
        (("fast",), False, "no scenario fast; known: equal_conversation"),
        (("pauses", "burst"), True, "no scenario burst; known: equal_.*pauses, burst_equal"),
        (("kv_1_equal_predicted",), True, "no scenario kv_1_equal_predicted"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            run_policies_bench(names, live=live)


def test_two_policies_and_few_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"MIN_REQUESTS": 30, "SHORT_S": 0.5, "LASTS_S": 1.0, "MORE_SEEDS": 1}.items():
        monkeypatch.setattr(bench, name, value)
    policies = (SIMPLE[1].words, SIMPLE[2].words)
    monkeypatch.setattr(bench, "fixed_policies", lambda: policies)
    run = partial(run_policies_bench, ("fast_slow_conversation",), results=tmp_path / "runs", processes=1)
    result = run()
    assert set(result["aims"]) == {"least_ratio_to_best_fixed", "adaptive_over_best_single"}
    assert result["figures"]["fast_slow_conversation_adaptive_per_s"] > 1.0
    (rows,) = result["tables"].values()
    assert rows[0]["policy"] == "adaptive"
    assert len({row["policy"] for row in rows}) == len(rows) >= 2
    assert result["figures"] == run()["figures"]  # from the file of runs


@pytest.mark.parametrize(
    ("name", "column", "limit_s"),
    [
        ("burst_unlike", "longest_gap_max_s", 0.15),
        ("overload_equal_one_class", "longest_gap_p90_s", 0.3),
        ("overload_unlike_classes", "longest_gap_p90_s", 0.3),
        ("prompts_unlike", "longest_gap_p90_s", 0.3),
    ],
)
def test_a_stream_that_has_begun_does_not_pause(tmp_path: Path, name: str, column: str, limit_s: float) -> None:
    assert PAUSES[name].simulated(ADAPTIVE, 1, tmp_path)[column] <= limit_s


def test_near_the_limit_of_kv_first_tokens_stay_in_time(tmp_path: Path) -> None:
    ours, simple = (PAUSES["kv_0.85_equal"].simulated(arm, 1, tmp_path) for arm in (ADAPTIVE, SIMPLE[2]))
    assert ours["attainment"] >= simple["attainment"] - 0.01
    assert ours["longest_gap_p90_s"] < simple["longest_gap_p90_s"]


def test_the_cluster_that_is_started_is_the_one_that_is_simulated(tmp_path: Path) -> None:
    scenario = PAUSES["overload_unlike_classes"]
    plain = load_deployment(scenario.cluster_into(tmp_path)).instances
    file = scenario.cluster_into(tmp_path, slowdown=4.0)
    deployment, cluster = load_deployment(file), load_cluster(file)
    assert cluster.instance_ids == tuple(one.instance_id for one in plain)
    assert cluster.gateway.extra["slo"]["default"] == TARGETS.slower(4.0).targets
    assert deployment.run.slo == TARGETS.slower(4.0)
    assert [(one.kv_tokens, one.limits) for one in deployment.instances] == [
        (one.kv_tokens, one.limits) for one in plain
    ]
    assert {shot.slo for shot in shots_of(scenario.first_requests(2))} == {"default", "batch"}


@pytest.mark.parametrize(
    ("name", "live_s", "simulated_s", "met"),
    [
        ("prompts_unlike", 0.10, 0.12, True),
        ("prompts_unlike", 0.10, 0.125, False),
        ("burst_unlike", 0.07, 0.10, True),  # one fixed step
        ("burst_unlike", 1.0, 1.3, False),
    ],
)
def test_a_simulated_gap_may_be_off_by_a_fifth_or_by_a_fixed_step(
    name: str, live_s: float, simulated_s: float, met: bool
) -> None:
    rows = [{"longest_gap_p90_s": one, "longest_gap_max_s": 1.0} for one in (live_s, simulated_s)]
    aims = off_of(PAUSES[name], *rows)["aims"]
    assert aims[f"{name}_adaptive_longest_gap_max_off_percent"]["met"]
    assert aims[f"{name}_adaptive_longest_gap_p90_off_percent"]["met"] is met
