"""The benches of the running system: how they judge, and that `bench control` measures."""

import os
import threading
from collections.abc import Sequence

import pytest

from benchmarks import control, overhead
from benchmarks.measuring import serving, usage
from benchmarks.soak import growth
from benchmarks.traces import ReceivedSpan, faults, wait
from services.launcher.supervisor import StartFailed
from shared.errors import InvalidRequest


def test_the_aim_of_structured_outputs_is_about_the_worst_kind() -> None:
    fast, slow = {"beyond_ms": 18.0}, {"beyond_ms": 26.0}
    aims = overhead.structured_aims({"a": {"cold": slow, "repeated": fast}, "b": {"cold": fast, "repeated": fast}})
    assert [(aim["got"], aim["met"]) for aim in aims.values()] == [(26.0, False), (18.0, True)]


def test_the_aims_of_overhead_are_about_the_worst_cell() -> None:
    def cell(token: float, request: float, added_ms: float) -> dict[str, float]:
        return {"cpu_per_token_us_ratio": token, "cpu_per_request_ms_ratio": request, "added_ttft_p50_ms": added_ms}

    cells = {"chat": {"1": cell(0.9, 1.0, 1.0), "16": cell(0.4, 1.2, 1.0)}, "completions": {"16": cell(0.45, 1.0, 2.0)}}
    aims = overhead.aims_of(4.0, cells)
    assert {name: (aim["got"], aim["met"]) for name, aim in aims.items()} == {
        "idle_cpu_ms_per_s": (4.0, True),
        "cpu_per_request_ratio": (1.2, False),
        "added_ttft_p50_ms": (2.0, False),
        "cpu_per_token_ratio at 16 and more": (0.45, True),
        "cpu_per_token_ratio below 16": (0.9, False),
    }


def test_usage_counts_the_wake_ups_of_all_threads() -> None:
    ask, answer = threading.Semaphore(0), threading.Semaphore(0)

    def respond() -> None:
        for _ in range(51):
            ask.acquire()
            answer.release()

    responding = threading.Thread(target=respond)
    responding.start()
    before = usage([os.getpid()])
    for _ in range(50):
        ask.release()
        answer.acquire()
    used = usage([os.getpid()]) - before  # while the thread lives, which waits for the last one
    ask.release()
    responding.join()
    assert used.cpu_s > 0
    assert used.wakes > 0


async def test_a_server_that_ends_is_reported_with_the_end_of_its_log() -> None:
    with pytest.raises(StartFailed, match="the process ended with 3: no luck"):
        async with serving("http://127.0.0.1:9/health", "-c", "import sys; print('no luck', flush=True); sys.exit(3)"):
            pytest.fail("it does not serve")


def test_growth_compares_the_end_with_a_warm_beginning() -> None:
    assert growth([*range(10), *[100] * 20, *[110] * 10]) == pytest.approx(1.1)


def span(name: str, began_s: float, ended_s: float, own: str, parent: str, **events: float) -> ReceivedSpan:
    kind = "server" if name.startswith("POST") else "internal"
    return ReceivedSpan(
        name=name,
        service="polyphase-gateway",
        instance="g",
        trace_id="t",
        span_id=own,
        parent_id=parent,
        kind=kind,
        began_s=began_s,
        ended_s=ended_s,
        error=False,
        state="",
        attributes={},
        events=events,
    )


TREE = [
    span("POST /v1/chat/completions", 0.0, 10.0, "a", "client"),
    span("chat demo", 1.0, 9.0, "b", "a", first_token=5.0),
    span("attempt", 1.0, 9.0, "c", "b"),
    span("receive", 0.0, 1.0, "d", "a"),
    span("prefill", 1.5, 4.0, "e", "c"),
    span("transfer", 2.0, 4.5, "f", "c"),
    span("decode", 6.0, 9.0, "g", "c"),
]


@pytest.mark.parametrize(
    ("spans", "client", "found"),
    [
        (TREE, "client", []),
        (TREE, "", ["roots: []", "POST /v1/chat/completions has no parent"]),
        (TREE[:2] + TREE[3:4] + TREE[5:], "client", ["transfer has no parent", "decode has no parent"]),
        ([*TREE, TREE[-1]], "client", ["2 spans are g"]),
    ],
)
def test_faults_of_a_tree(spans: Sequence[ReceivedSpan], client: str, found: list[str]) -> None:
    assert faults(spans, client) == found


def test_time_that_no_span_explains() -> None:
    found = wait(TREE)
    assert found is not None
    assert (found.ttft_s, found.unexplained_s) == (5.0, 1.0)
    assert wait(TREE[:1]) is None


def test_control_refuses_more_instances_than_files_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1_024, 4_096))
    with pytest.raises(InvalidRequest, match=r"5000 instances: .* may open 4096 here; .* at most 599 instances"):
        control.run_control_bench((10, 5_000))


@pytest.mark.slow
def test_control_measures_monitor_and_scheduler_and_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SETTLE_S", 1.0)
    result = control.run_control_bench((2, 4), 2.0)
    for size in (2, 4):
        seen = result["figures"][str(size)]
        # Three a second of an idle instance, and ten of one whose load changes: fewer where the machine is busy.
        assert seen["heartbeats_per_s"] >= size
        assert seen["idle_heartbeats_per_s"] > 0
        assert seen["broadcast_bytes_per_s"] > 100
        assert 0 < seen["monitor_cores"] < 2
        assert 0 < seen["fleet_cores"] < 2
        for part in ("decision", "scheduler", "round"):
            assert 0 < seen[f"place_{part}_p50_us"] <= 1e3 * seen[f"place_{part}_p99_ms"] + 1
        assert seen["place_decision_mean_us"] < seen["place_scheduler_mean_us"] < seen["place_round_mean_us"]
        assert seen["known_again_s"] > 0
    assert set(result["aims"]) == {f"{name} at 4" for name in control.AIMS}
