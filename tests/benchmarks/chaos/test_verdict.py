"""Expected verdicts beside real ones: agreement passes, and each kind of difference is found. And troubles for real."""

import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks.chaos import recovery, scenario
from benchmarks.chaos.load import Answered
from benchmarks.chaos.load import Verdict as Answer
from benchmarks.chaos.run import ChaosOptions, choose, run_chaos_bench
from benchmarks.chaos.scenarios import TROUBLES
from benchmarks.chaos.testbeds import LATE, VERDICT, VERDICT_LATE
from benchmarks.chaos.verdict import Expected, compare, counts
from services.cluster_monitor import verdict as policy
from services.cluster_monitor.verdict import judge
from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import ClassSeen, Level, Situation, Stage, Standing, Thresholds
from tests.patient_clusters import patient

ROLES = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
WINDOW_S, USERS = 20.0, 2
DEAD = Expected("instances_dead", Level.DEGRADED, Stage.DECODE, ("decode-0",), (1, 1), {"decode-0": "dead"})
MISSED = Expected("ttft_missed", value=(0.0, 0.6))


def wrong(expected: Expected, ended_ago_s: tuple[float, ...] = (10.0,) * 10, **seen: Any) -> list[str]:
    """The fields in which the verdict on a cluster differs from the expected one."""
    state = InstanceState.DEAD if "decode-0" in expected.states else InstanceState.READY
    situation = Situation(
        time.time(),
        WINDOW_S,
        300.0,
        (
            Standing("prefill-0", Role.PREFILL, InstanceState.READY, 0.1),
            Standing("decode-0", Role.DECODE, state, 0.1),
            Standing("decode-1", Role.DECODE, InstanceState.READY, 0.1),
        ),
        completed=10,
        placed=10,
    )
    verdict = judge(msgspec.structs.replace(situation, **seen), Thresholds())
    now = time.monotonic()
    answered = deque(Answered(now - ago_s - 40.0, now - ago_s, Answer.WHOLE) for ago_s in ended_ago_s)
    suite: Any = SimpleNamespace(
        roles=ROLES | {"decode-1": Role.DECODE},
        load=SimpleNamespace(answered=answered),
        bed=SimpleNamespace(users=USERS),
    )
    return [name for name, (_, _, ok) in compare(verdict, expected, suite).items() if not ok]


@pytest.mark.parametrize(
    ("expected", "seen", "fields"),
    [
        (DEAD, {}, []),
        (MISSED, {"classes": (ClassSeen("default", 10, 0.5, 1.0, 1.5, 0.2),)}, []),
        (MISSED, {"classes": (ClassSeen("default", 10, 0.8, 1.0, 1.5, 0.2),)}, ["value"]),
        (MISSED, {}, ["problem", "level of the verdict"]),
    ],
)
def test_fields_are_compared(expected: Expected, seen: dict[str, Any], fields: list[str]) -> None:
    assert wrong(expected, **seen) == fields


def test_stage_instances_and_counts_are_compared() -> None:
    other = Expected("instances_dead", Level.DOWN, Stage.PREFILL, ("decode-1",), states={"decode-0": "dead"})
    assert wrong(other) == ["level", "stage", "instances"]
    unlike = Expected("instances_dead", states={"decode-0": "dead", "prefill-0": "unresponsive"})
    assert wrong(unlike) == ["prefill ready", "prefill unresponsive"]


@pytest.mark.parametrize(
    ("ended_ago_s", "agrees"),
    [
        ((10.0,) * 10, True),
        ((10.0,) * 8, True),  # the users' present requests may have ended at the gateway
        ((10.0,) * 7, False),  # three more are counted than clients know of
        ((10.0,) * 11, False),  # one is not counted
        ((*(10.0,) * 10, *(2.0,) * 9), True),  # perhaps not reported yet
        ((*(10.0,) * 10, 21.0), True),  # its scheduler may have recorded its end in the window
        ((), True),  # the window has requests of an earlier load
    ],
)
def test_requests_are_counted_by_clients_too(ended_ago_s: tuple[float, ...], agrees: bool) -> None:
    assert wrong(DEAD, ended_ago_s) == ([] if agrees else ["requests"])


def test_counts_of_instances() -> None:
    found = counts(ROLES | {LATE: Role.DECODE}, {LATE: "missing"})
    assert (found[Role.PREFILL].ready, found[Role.PREFILL].expected) == (1, 1)
    assert (found[Role.DECODE].ready, found[Role.DECODE].missing, found[Role.DECODE].expected) == (1, 1, 2)


def test_troubles_have_known_problems_and_instances_of_their_testbeds() -> None:
    assert len(TROUBLES) == 17
    expected = {each.name: each.fault.args[1] for each in TROUBLES}  # type: ignore[attr-defined]
    assert {each.problem for each in expected.values()} <= set(policy._ORDER)
    for trouble in TROUBLES:
        wanted = expected[trouble.name]
        assert {*(wanted.instances or ()), *wanted.states} <= set(trouble.bed.build().instance_ids)
    assert [each.name for each in choose(["kv-cut", "dead"], TROUBLES)] == ["dead", "kv-cut"]
    assert LATE in VERDICT_LATE.absent


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_three_troubles_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still for a few seconds, or is slow, is no trouble."""
    for module in (scenario, recovery):
        monkeypatch.setattr(module, "RECOVER_S", 60.0)
    monkeypatch.setattr(scenario, "WARM_S", 120.0)
    cluster = patient(VERDICT.cluster)
    for section in ("monitor", "scheduler", "gateway", "instance_defaults"):
        cluster[section]["peer_silence_s"] = 5.0
    cluster["monitor"]["silence_s"] = 3.0
    cluster["gateway"]["slo"]["default"] = {"ttft_s": 600.0, "tpot_s": 600.0}
    bed = replace(VERDICT, cluster=cluster)
    troubles = [replace(each, bed=bed) for each in TROUBLES if each.bed is VERDICT]
    options = ChaosOptions(("dead", "unresponsive", "frozen"), keep_logs=tmp_path)
    result = run_chaos_bench(options, Console(stderr=True), troubles)
    assert not {name: aim["got"] for name, aim in result["aims"].items() if not aim["met"]}
    assert result["figures"]["dead_figures"] > 40
