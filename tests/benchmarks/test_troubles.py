"""Bounds for the figures of a verdict, checks of every problem, and three faults on a real suite."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks.troubles import (
    LATE,
    MISSING,
    TROUBLES,
    TroublesOptions,
    bed_for,
    choose,
    counts,
    run_troubles_bench,
    sample_of,
)
from benchmarks.troubles_verdict import (
    ClientRequest,
    GroundTruth,
    Window,
    figures,
    itl_within,
    problem_figures,
    share,
    tpot_met,
    ttft_met,
)
from services.cluster_monitor import verdict as policy
from services.cluster_monitor.verdict import judge
from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import ClassSeen, Level, Peer, Situation, Stage, StageSeen, Standing, Thresholds
from shared.errors import InvalidRequest, Unavailable

NOW, WINDOW_S = 1_000.0, 20.0
WINDOW = Window(NOW - WINDOW_S, NOW)
ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def request(ended_s: float = NOW - 8.0, **what: Any) -> ClientRequest:
    base: dict[str, Any] = {"status": 200, "ttft_s": 0.1, "tpot_s": 0.04}
    return ClientRequest("default", ended_s - 2.0, ended_s, **{**base, **what})


@pytest.mark.parametrize(
    ("one", "bounds"),
    [
        (request(), (1, 1)),
        (request(NOW - 1.0), (0, 1)),  # perhaps not reported yet
        (request(NOW - 20.5), (0, 1)),  # its scheduler may have recorded its end after the window began
        (request(NOW - 22.0), (0, 0)),
        (request(NOW + 1.0), (0, 0)),
        (request(0.0), (0, 0)),  # still open
        (request(NOW - 8.0, status=429, code="busy"), (1, 1)),
        (request(NOW - 5.0, status=429, code="busy"), (0, 1)),  # reported with the gateway's next message
        (request(NOW - 24.0, status=429, code="busy"), (0, 1)),
        (request(cut=True), (0, 1)),
        (request(doubtful=True), (0, 1)),
        (request(NOW - 40.0, doubtful=True), (0, 1)),  # its report may have been held back
    ],
)
def test_how_often_a_request_may_be_counted(one: ClientRequest, bounds: tuple[int, int]) -> None:
    assert WINDOW.count([one], lambda _: True) == bounds


def test_shares_from_bounds() -> None:
    assert share((3, 3), (1, 1)) == (0.75, 0.75)
    assert share((2, 4), (1, 1)) == (pytest.approx(2 / 3), pytest.approx(4 / 5))
    assert share((0, 0), (0, 0)) == (0.0, 1.0)


def test_targets_met_of_what_completed() -> None:
    late, near, failed = request(ttft_s=1.6), request(ttft_s=1.51), request(code="504", ttft_s=9.0)
    assert ttft_met(WINDOW, [request(), request(), late, failed]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert ttft_met(WINDOW, [request(), near]) == (0.5, 1.0)
    assert tpot_met(WINDOW, [request(), request(tpot_s=0.3)]) == (0.5, 0.5)
    assert itl_within(WINDOW, [request(gaps_s=(0.1, 0.1)), request(gaps_s=(0.1, 0.9))]) == (0.5, 0.5)
    assert itl_within(WINDOW, [request(gaps_s=(0.1, 0.3)), request(gaps_s=(0.9, *[0.1] * 99))]) == (0.5, 1.0)


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


def truth(**what: Any) -> GroundTruth:
    ready = counts(dict.fromkeys(ROLES, "ready"), ROLES)
    return replace(GroundTruth(ready, [request() for _ in range(10)]), **what)


DEAD = counts({"prefill-0": "ready", "decode-0": "dead"}, ROLES)
LATE_CLASS = (ClassSeen("default", 10, 0.5, 1.0, 1.5, 0.2),)


@pytest.mark.parametrize(
    ("seen", "true", "names"),
    [
        ({}, {}, []),
        ({"completed": 12}, {}, ["requests"]),
        ({"classes": LATE_CLASS}, {}, ["ttft_missed: share"]),
        ({}, {"counts": DEAD}, ["decode ready", "decode dead"]),
        ({"failed": {"peer_lost": 3}}, {}, ["requests", "errors: share"]),  # a failure that no client saw
    ],
)
def test_wrong_figures_are_found(seen: dict[str, Any], true: dict[str, Any], names: list[str]) -> None:
    verdict = judge(situation(**seen), Thresholds())
    assert [figure.name for figure in figures(verdict, truth(**true)) if not figure.ok] == names
    assert (verdict.level is Level.GOOD) == (not {"classes", "failed"} & seen.keys())


PREFILL = Standing("prefill-0", Role.PREFILL, InstanceState.READY, 0.1)
SEEN: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("what", policy._ORDER)
def test_every_problem_is_compared_with_the_truth(what: str) -> None:
    verdict = judge(situation(**SEEN[what]), Thresholds())
    (problem,) = (one for one in verdict.problems if one.what == what)
    assert list(problem_figures(problem, verdict, truth()))


def test_samples_of_an_exposition() -> None:
    text = (
        "# HELP x\n"
        'vllm:kv_cache_usage_perc{model="m"} 0.25\n'
        'vllm:num_requests_waiting{model="m"} 3.0\n'
        'vllm:num_requests_running{model="m"} 4.0\n'
    )
    one = sample_of(text, 1.0, "d", Role.DECODE)
    assert (one.kv_used, one.waiting, one.running) == (0.25, 3, 4)
    with pytest.raises(Unavailable, match="lack vllm:num_requests_running"):
        sample_of(text.replace("running", "walking"), 1.0, "d", Role.DECODE)


def test_troubles_have_known_problems_and_their_suites_can_be_built() -> None:
    assert choose(()) == TROUBLES
    assert [one.name for one in choose(["kv-cut", "dead"])] == ["dead", "kv-cut"]
    with pytest.raises(InvalidRequest, match="no trouble nothing; known: dead"):
        choose(["nothing"])
    assert {one.what for one in TROUBLES} <= set(policy._ORDER)
    for names, instances in (([MISSING, "dead"], 6), (["dead"], 5), (["kv-cut"], 2)):
        assert len(bed_for(choose(names)).build().instance_ids) == instances


@pytest.mark.slow
@pytest.mark.alone
def test_three_troubles_are_named_with_right_figures(tmp_path: Path) -> None:
    options = TroublesOptions(("dead", "unresponsive", "frozen"), tmp_path)
    result = run_troubles_bench(options, Console(stderr=True))
    assert not {name: aim["got"] for name, aim in result["aims"].items() if not aim["met"]}
    assert result["figures"]["dead_figures"] > 100
