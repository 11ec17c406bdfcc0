"""Bounds for the figures of a verdict, checks of every problem, and three faults on a real suite."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.troubles import TROUBLES, TroublesOptions, choose, run_troubles_bench, with_all
from benchmarks.troubles_stage import counted, sample_of
from benchmarks.troubles_suite import (
    EMULATED,
    LATE,
    REAL,
    Known,
    Shot,
    Window,
    gaps_met,
    is_refused,
    share,
    tpot_met,
    ttft_met,
)
from benchmarks.troubles_verdict import figures, of_problem
from services.cluster_monitor import verdict as policy
from services.cluster_monitor.verdict import judge
from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import ClassSeen, Level, Peer, Situation, Stage, StageSeen, Standing, Thresholds, Verdict
from shared.errors import InvalidRequest, Unavailable

NOW, WINDOW_S = 1_000.0, 20.0
WINDOW = Window(NOW - WINDOW_S, NOW)
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def shot(ended_s: float = NOW - 8.0, **what: Any) -> Shot:
    base: dict[str, Any] = {"status": 200, "ttft_s": 0.1, "tpot_s": 0.04}
    return Shot("default", ended_s - 2.0, ended_s, **{**base, **what})


@pytest.mark.parametrize(
    ("one", "bounds"),
    [
        (shot(), (1, 1)),
        (shot(NOW - 1.0), (0, 1)),  # perhaps not told of yet
        (shot(NOW - 20.5), (0, 1)),  # its scheduler may have heard of it after the window began
        (shot(NOW - 22.0), (0, 0)),
        (shot(NOW + 1.0), (0, 0)),
        (shot(0.0), (0, 0)),  # still open
        (shot(NOW - 8.0, status=429, code="busy"), (1, 1)),
        (shot(NOW - 5.0, status=429, code="busy"), (0, 1)),  # told with the gateway's next word
        (shot(NOW - 24.0, status=429, code="busy"), (0, 1)),
        (shot(cut=True), (0, 1)),
        (shot(doubt=True), (0, 1)),
        (shot(NOW - 40.0, doubt=True), (0, 1)),  # its report may have been held back
    ],
)
def test_how_often_a_request_may_be_counted(one: Shot, bounds: tuple[int, int]) -> None:
    assert WINDOW.of([one], lambda _: True) == bounds


def test_shares_from_bounds() -> None:
    assert share((3, 3), (1, 1)) == (0.75, 0.75)
    assert share((2, 4), (1, 1)) == (pytest.approx(2 / 3), pytest.approx(4 / 5))
    assert share((0, 0), (0, 0)) == (0.0, 1.0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=2))
def test_a_share_lies_between_its_bounds(parts: list[tuple[int, int]]) -> None:
    part, rest = ((min(one), max(one)) for one in parts)
    least, most = share(part, rest)
    assert 0.0 <= least <= most <= 1.0


def test_targets_met_of_what_completed() -> None:
    late, near, failed = shot(ttft_s=1.6), shot(ttft_s=1.51), shot(code="504", ttft_s=9.0)
    assert ttft_met(WINDOW, [shot(), shot(), late, failed]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert ttft_met(WINDOW, [shot(), near]) == (0.5, 1.0)
    assert tpot_met(WINDOW, [shot(), shot(tpot_s=0.3)]) == (0.5, 0.5)
    assert gaps_met(WINDOW, [shot(gaps_s=(0.1, 0.1)), shot(gaps_s=(0.1, 0.9))]) == (0.5, 0.5)
    assert gaps_met(WINDOW, [shot(gaps_s=(0.1, 0.3)), shot(gaps_s=(0.9, *[0.1] * 99))]) == (0.5, 1.0)


def test_a_refusal_is_told_by_its_status() -> None:
    assert is_refused(shot(status=429, code="busy"))
    assert not is_refused(shot(code="504"))


def situation(**what: Any) -> Situation:
    stages = {stage: StageSeen(10, 1.0, 0.05, 0.1) for stage in Stage}
    base = Situation(
        NOW,
        WINDOW_S,
        300.0,
        (Standing("prefill-0", Role.PREFILL, InstanceState.READY, 0.1), decode()),
        classes=(ClassSeen("default", 10, 1.0, 1.0, 1.5, 0.2, stages),),
        completed=10,
        placed=10,
        stages=stages,
        spent_s=10.0,
        transfers=10,
        schedulers=(Peer("scheduler-0", 0.5),),
    )
    return msgspec.structs.replace(base, **what)


def decode(**what: Any) -> Standing:
    return msgspec.structs.replace(Standing("decode-0", Role.DECODE, InstanceState.READY, 0.1), **what)


def known(**what: Any) -> Known:
    counts = counted(dict.fromkeys(ROLES, "ready"), ROLES)
    return replace(Known(counts, [shot() for _ in range(10)]), **what)


def wrong(verdict: Verdict, about: Known) -> list[str]:
    return [figure.name for figure in figures(verdict, about) if not figure.ok]


def test_a_right_verdict_has_no_wrong_figure() -> None:
    verdict = judge(situation(), Thresholds())
    assert verdict.level is Level.GOOD
    assert wrong(verdict, known()) == []


def test_a_count_a_share_and_a_state_that_are_wrong_are_found() -> None:
    verdict = judge(situation(completed=12), Thresholds())
    assert wrong(verdict, known()) == ["requests"]
    late = judge(situation(classes=(ClassSeen("default", 10, 0.5, 1.0, 1.5, 0.2),)), Thresholds())
    assert wrong(late, known()) == ["ttft_missed: share"]
    dead = counted({"prefill-0": "ready", "decode-0": "dead"}, ROLES)
    assert wrong(judge(situation(), Thresholds()), known(counts=dead)) == ["decode ready", "decode dead"]


def test_a_failure_that_no_client_saw_is_found() -> None:
    verdict = judge(situation(failed={"peer_lost": 3}), Thresholds())
    assert wrong(verdict, known()) == ["requests", "errors: share"]


PREFILL = Standing("prefill-0", Role.PREFILL, InstanceState.READY, 0.1)
SAID: dict[str, dict[str, Any]] = {
    "nothing_served": {"completed": 0, "failed": {"unavailable": 6}},
    "role_empty": {"instances": (PREFILL, decode(state=InstanceState.DEAD))},
    "scheduler_gone": {"schedulers": (Peer("scheduler-0", 20.0),)},
    "gateway_gone": {"gateways": (Peer("gateway-0", 20.0), Peer("gateway-1", 0.1))},
    "ttft_missed": {"classes": (ClassSeen("default", 10, 0.8967, 1.0, 1.5, 0.2),)},
    "tpot_missed": {"classes": (ClassSeen("default", 10, 1.0, 0.2, 1.5, 0.2), ClassSeen("instant"))},
    "itl_missed": {"classes": (ClassSeen("default", 10, 1.0, 1.0, 1.5, 0.2, itl_met=0.2, itl_target_s=0.25),)},
    "errors": {"failed": {"peer_lost": 2}},
    "refusals": {"refused": {"busy": 2}},
    "kv_full": {"instances": (PREFILL, decode(kv_used=0.98, waiting=4), decode(kv_used=0.2))},
    "queue_long": {"instances": (PREFILL, decode(waiting=9, running=4))},
    "transfers_failing": {"transfers_failed": 3, "transfer_faults": {"unreachable": 3}},
    "transfers_slow": {"stages": {Stage.TRANSFER: StageSeen(10, 9.0, 0.9, 1.2)}},
    "instances_dead": {"instances": (PREFILL, decode(state=InstanceState.DEAD))},
    "instances_unresponsive": {"instances": (PREFILL, decode(state=InstanceState.UNRESPONSIVE))},
    "instances_missing": {"expected": {LATE: Role.DECODE}},
    "policies_not_followed": {"instances": (PREFILL, decode(behind_s=30.0))},
    "predictor_fallback": {"predictions": {"none": 9}},
}


def test_all_problems_are_here() -> None:
    assert set(SAID) == set(policy._ORDER)


@pytest.mark.parametrize("what", SAID)
def test_every_problem_is_compared_with_the_truth(what: str) -> None:
    verdict = judge(situation(**SAID[what]), Thresholds())
    (problem,) = (one for one in verdict.problems if one.what == what)
    assert list(of_problem(problem, verdict, known()))


def test_samples_of_an_exposition() -> None:
    text = (
        "# HELP x\n"
        'vllm:kv_cache_usage_perc{model="m"} 0.25\n'
        'vllm:num_requests_waiting{model="m"} 3.0\n'
        'vllm:num_requests_running{model="m"} 4.0\n'
        "polyphase_instance_queued_prefill_jobs 2.0\n"
    )
    one = sample_of(text, 1.0, "d", Role.DECODE)
    assert (one.kv_used, one.waiting, one.running, one.queued_prefill) == (0.25, 3, 4, 2)
    with pytest.raises(Unavailable, match="lack vllm:num_requests_running"):
        sample_of(text.replace("running", "walking"), 1.0, "d", Role.DECODE)


def test_the_troubles_are_known_by_name_and_their_suites_can_be_built() -> None:
    assert [one.name for one in choose(())] == [one.name for one in TROUBLES]
    assert [one.name for one in choose(["kv-cut", "dead"])] == ["dead", "kv-cut"]
    with pytest.raises(InvalidRequest, match="no trouble nothing; known: dead"):
        choose(["nothing"])
    assert {one.what for one in TROUBLES} <= set(policy._ORDER)
    assert len(EMULATED.build().instance_ids) == 6
    assert len(with_all(EMULATED).build().instance_ids) == 5
    assert with_all(REAL).build().instance_ids == ("prefill", "decode")


@pytest.mark.slow
@pytest.mark.alone
def test_three_troubles_are_named_with_right_figures(tmp_path: Path) -> None:
    options = TroublesOptions(("dead", "unresponsive", "frozen"), tmp_path)
    result = run_troubles_bench(options, Console(stderr=True))
    assert not {name: aim["got"] for name, aim in result["aims"].items() if not aim["met"]}
    assert result["figures"]["dead_figures"] > 100
