"""`bench engine`: its suite, its loads and its report; and CPU quotas of engines."""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from benchmarks import real_engines
from benchmarks.engine import (
    ALONE,
    BURST,
    CHUNK,
    KV_TOKENS,
    MAX_MODEL_LEN,
    PATIENT,
    PRESSING,
    PROMPTS,
    SEATS,
    SORTS,
    Run,
    Served,
    Wanted,
    burst,
    cluster_of,
    different_tokens,
    passed,
    predicted_in_time,
    pressing,
    report,
)
from benchmarks.real_engines import PERIOD_US, Throttled, cpu_quota
from benchmarks.suite import metric
from services.launcher.cluster_file import Cluster
from shared.errors import InvalidRequest, Unavailable
from shared.policy.prefill_order import WINDOW
from shared.timeline import Decision, RequestTimeline


def served(at_s: float, ttft_s: float, jct_s: float = 9.0, tokens: tuple[int, ...] = (1,), slo: str = "") -> Served:
    return Served(Wanted((7,), len(tokens), slo), "r", at_s, ttft_s, jct_s, tokens)


def test_the_cluster_is_valid_and_pressed_by_what_is_sent() -> None:
    assert Cluster.model_validate(cluster_of(Path("model"))).instance_ids == ("engine",)
    whole = [len(one.prompt) + one.output_tokens for one in pressing(1)]
    assert len(whole) == PRESSING
    assert sum(len(one.prompt) for one in pressing(1)) < KV_TOKENS < sum(whole) / 2  # all may come in, and outgrow it
    assert max(whole) < MAX_MODEL_LEN


def test_a_burst_has_every_length_for_either_class_and_more_than_may_overtake() -> None:
    found = burst(1)
    assert Counter(len(one.prompt) for one in found) == dict.fromkeys(PROMPTS, BURST // len(PROMPTS))
    assert [one.slo for one in found[:2]] == ["", PATIENT]
    assert found != burst(2)
    assert found == burst(1)
    assert WINDOW < BURST - 1
    assert max(PROMPTS) > CHUNK
    assert BURST > SEATS


def test_an_answer_is_as_long_as_its_prompt_tells() -> None:
    for one in pressing(3):
        fits = [
            output[0] <= one.output_tokens <= output[1]
            for prompt, output in SORTS
            if prompt[0] <= len(one.prompt) <= prompt[1]
        ]
        assert fits == [True]


def test_who_was_passed_by_how_many() -> None:
    runs = [served(0.0, 5.0), served(1.0, 1.0), served(2.0, 1.0), served(3.0, 3.0)]
    assert passed(runs) == [2, 0, 0, 0]


def test_other_tokens_are_found_in_the_same_round_only() -> None:
    first = Run(0, ALONE, [served(0, 1, tokens=(1, 2))])
    same, other = (Run(0, name, [served(0, 1, tokens=tokens)]) for name, tokens in (("a", (1, 2)), ("b", (1, 3))))
    later = Run(1, "a", [served(0, 1, tokens=(5,))])
    assert different_tokens([first, same, later]) == []
    assert different_tokens([first, same, other, later]) == ["round 0: alone and b, request 0"]


def after(passes: int, others_s: float = 1.0, token: int = 1) -> list[Served]:
    """A first request of 3 s that so many of 19 others overtake."""
    first = served(0.0, 3.0, tokens=(token,))
    return [first, *(served(0.01 * at, others_s if at <= passes else 4.0) for at in range(1, 20))]


def orders(sjf_s: float = 1.0, passes: int = 16) -> list[Run]:
    rows = (("fcfs", 0, 1.0), ("sjf", passes, sjf_s))
    return [
        Run(number, policy, after(passed_by, others_s)) for number in range(3) for policy, passed_by, others_s in rows
    ]


def admissions(dynamic: int = 2, dynamic_s: float = 9.0) -> list[Run]:
    rows = (("greedy", 10, 9.0), ("reserve_static", 0, 11.0), ("reserve_dynamic", dynamic, dynamic_s))
    return [
        Run(number, policy, [served(0.0, 1.0, jct_s)], count, 0.75)
        for number in range(3)
        for policy, count, jct_s in rows
    ]


def met(result: dict[str, dict[str, dict[str, object]]]) -> dict[str, object]:
    return {name: aim["met"] for name, aim in result["aims"].items()}


def test_what_is_wanted_is_met() -> None:
    result = report([Run(0, ALONE, orders()[0].served), *orders()], admissions())
    assert all(met(result).values())
    assert result["figures"]["sjf_ttft_mean_over_fcfs"] == pytest.approx((3 + 16 + 3 * 4) / (3 + 19 * 4))
    assert result["figures"]["sjf_passed_by_at_most"] == 16
    assert result["figures"]["greedy_preemptions"] == 10
    assert result["figures"]["reserve_static_jct_mean_over_greedy"] == pytest.approx(11 / 9)
    assert "alone_ttft_mean_s" not in result["figures"]


@pytest.mark.parametrize(
    ("result", "missed"),
    [
        (report(orders(sjf_s=5.0), admissions()), "sjf_ttft_mean_over_fcfs"),
        (report(orders(passes=17), admissions()), "passed_by_at_most"),
        (report(orders(), admissions(dynamic=10)), "reserve_dynamic_fewer_preemptions"),
        (report(orders(), admissions(dynamic_s=9.3)), "reserve_dynamic_jct_mean_over_greedy"),
        (report([*orders(), Run(2, "ljf", after(16, token=2))], admissions()), "answers_with_other_tokens"),
    ],
)
def test_what_is_not_met_is_told(result: dict[str, dict[str, dict[str, object]]], missed: str) -> None:
    assert [name for name, is_met in met(result).items() if not is_met] == [missed]


def test_a_prediction_counts_when_it_was_there_before_the_first_token() -> None:
    def timeline(said_s: float | None) -> RequestTimeline:
        decisions = [] if said_s is None else [Decision(said_s, "prediction", "32 tokens or more")]
        return RequestTimeline("j", 1.0, first_token_s=2.0, decisions=decisions)

    assert [predicted_in_time(timeline(said_s)) for said_s in (1.5, 2.5, None)] == [True, False, False]


def test_a_metric_is_read_from_its_exposition() -> None:
    text = '# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{engine="0"} 7.0\nother 3.0\n'
    assert metric(text, "vllm:num_preemptions_total") == 7
    with pytest.raises(Unavailable, match="the metrics lack vllm"):
        metric("other 3.0\n", "vllm:num_preemptions_total")


@pytest.fixture(autouse=True)
def _as_a_kernel_removes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A group's own files do not keep it from being removed."""
    if "tmp_path" in request.fixturenames:
        monkeypatch.setattr(real_engines, "rmdir", shutil.rmtree)


def v1(root: Path) -> Path:
    (root / "cpu").mkdir()
    (root / "cpu" / "cgroup.procs").write_text("")
    return root / "cpu"


def v2(root: Path, controllers: str = "cpu memory", enabled: str = "cpu") -> Path:
    for name, text in {
        "cgroup.procs": "",
        "cgroup.controllers": controllers,
        "cgroup.subtree_control": enabled,
    }.items():
        (root / name).write_text(text)
    return root


def test_v1(tmp_path: Path) -> None:
    parent = v1(tmp_path)
    with cpu_quota("slow", 0.32, tmp_path) as group:
        assert group.path.parent == parent
        assert (group.path / "cpu.cfs_period_us").read_text() == str(PERIOD_US)
        assert (group.path / "cpu.cfs_quota_us").read_text() == str(round(0.32 * PERIOD_US))
        assert (group.path / "cpu.shares").read_text() == "262144"
        (group.path / "cpu.stat").write_text("nr_periods 10\nnr_throttled 4\nthrottled_time 1500000000\n")
        assert group.throttled() == Throttled(10, 4, 1.5)
    assert not group.path.exists()


def test_v2(tmp_path: Path) -> None:
    parent = v2(tmp_path, enabled="")
    with cpu_quota("slow", 0.32, tmp_path) as group:
        assert group.path.parent == parent
        assert (parent / "cgroup.subtree_control").read_text() == "+cpu"
        assert (group.path / "cpu.max").read_text() == f"{round(0.32 * PERIOD_US)} {PERIOD_US}"
        assert (group.path / "cpu.weight").read_text() == "10000"
        (group.path / "cpu.stat").write_text("usage_usec 7\nnr_periods 8\nnr_throttled 2\nthrottled_usec 250000\n")
        assert group.throttled() == Throttled(8, 2, 0.25)
        assert group.throttled().share == 0.25
    assert not group.path.exists()


def test_a_quota_changes_while_it_holds(tmp_path: Path) -> None:
    v1(tmp_path)
    with cpu_quota("slow", 0.5, tmp_path) as group:
        group.limit(0.25)
        assert (group.path / "cpu.cfs_quota_us").read_text() == str(round(0.25 * PERIOD_US))
        with pytest.raises(InvalidRequest, match=r"a quota of 0\.01 cores"):
            group.limit(0.01)


def test_a_process_with_its_children_is_held(tmp_path: Path) -> None:
    v1(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as held:
        with cpu_quota("slow", 0.5, tmp_path) as group:
            group.add(held.pid)
            assert group.pids() == (held.pid,)
            with pytest.raises(Unavailable, match="no process 4194305"):
                group.add(4194305)
        assert (tmp_path / "cpu" / "cgroup.procs").read_text() == str(held.pid)  # it goes on without a quota
        held.kill()


def test_removed_whatever_happens(tmp_path: Path) -> None:
    parent = v1(tmp_path)
    with pytest.raises(ZeroDivisionError), cpu_quota("slow", 0.5, tmp_path):
        raise ZeroDivisionError
    assert not list(parent.glob("polyphase-*"))


def test_leftovers_of_dead_processes_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    parent, mine = v1(tmp_path), round(psutil.Process().create_time() * 100)
    dead = parent / "polyphase-4194305-100-slow"
    reused = parent / f"polyphase-{os.getpid()}-100-slow"  # of an earlier process with this number
    running = parent / f"polyphase-{os.getpid()}-{mine}-other"
    foreign = parent / "docker"
    for path in (dead, reused, running, foreign):
        path.mkdir()
    with cpu_quota("slow", 0.5, tmp_path):
        assert [path.exists() for path in (dead, reused, running, foreign)] == [False, False, True, True]


def test_refusals_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no cgroup is mounted at .*neither v1"), cpu_quota("slow", 0.5, tmp_path):
        pass
    with pytest.raises(InvalidRequest, match=r"slow: a quota of 0.01 cores"), cpu_quota("slow", 0.01, tmp_path):
        pass
    v2(tmp_path, controllers="memory")
    with pytest.raises(Unavailable, match="does not name the controller `cpu`"), cpu_quota("slow", 0.5, tmp_path):
        pass


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = v1(tmp_path)

    def read_only(path: Path, *args: object, **more: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(real_engines, "geteuid", lambda: 1000)
    refused = f"{parent} cannot be changed .Read-only file system.; this needs root"
    with pytest.raises(Unavailable, match=refused), cpu_quota("slow", 0.5, tmp_path):
        pass


@pytest.mark.slow
def test_a_process_that_spins_gets_no_more_than_its_quota() -> None:
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    try:
        with cpu_quota("test", 0.25) as group, subprocess.Popen(command, stdout=subprocess.PIPE) as spinning:
            try:
                assert spinning.stdout is not None
                spinning.stdout.readline()
                group.add(spinning.pid)
                process = psutil.Process(spinning.pid)
                before, began, met = sum(process.cpu_times()[:2]), time.monotonic(), group.throttled()
                while group.throttled().since(met).periods < 50:
                    assert time.monotonic() < began + 20.0, "the group's periods do not pass"
                    time.sleep(0.05)
                used_s, took_s = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
                met = group.throttled().since(met)
            finally:
                spinning.kill()
    except Unavailable as error:
        pytest.skip(error.message)
    assert used_s < 0.25 * took_s + 0.1
    assert met.share > 0.5
    assert met.lost_s > 0.0
    assert not group.path.exists()
