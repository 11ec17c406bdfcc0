"""`polyphase status`: what it says and its exit code, with the monitor there and away."""

import io

import pytest
from rich.console import Console

from services.launcher import status
from services.launcher.state_file import RunningProcess
from services.launcher.status import Snapshot
from shared.domain.verdict import Level, Problem
from tests.services.launcher.suites import entry, many, seen, state, verdict

ROLES = [entry("prefill-0", role="prefill"), entry("decode-0")]


def shown(one: Snapshot, *, terminal: bool = False, height: int = 40, everything: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80, height=height, color_system=None, force_terminal=terminal)
    status.show(console, one, everything=everything)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


@pytest.mark.parametrize(("level", "code"), [(Level.GOOD, 0), (Level.IDLE, 0), (Level.DEGRADED, 3), (Level.DOWN, 4)])
def test_the_exit_code_is_the_verdict(level: Level, code: int) -> None:
    assert status.exit_code(seen(verdict=verdict(level))) == code


def test_without_a_monitor_it_is_degraded_while_others_serve_and_down_else() -> None:
    away = {"verdict": None, "fault": "gone"}
    assert status.exit_code(seen(**away, instances=ROLES, jobs={})) == 3
    assert status.exit_code(seen(**away, instances=ROLES[:1], jobs={})) == 4
    assert status.exit_code(seen(**away, instances=ROLES, jobs=None)) == 4


def test_the_verdict_is_the_first_line() -> None:
    problem = Problem("tpot_missed", Level.DEGRADED, "TPOT met by 26 % (target 60 ms)", "decode KV is full")
    lines = shown(seen(verdict=verdict(Level.DEGRADED, problem))).splitlines()
    assert lines[0] == "! Degraded: TPOT met by 26 % (target 60 ms)"
    assert lines[1].strip() == "! TPOT met by 26 % (target 60 ms): decode KV is full"
    assert "ready: 2 of 2 prefill, 14 of 16 decode; 100 requests ended in 60 s" in lines


def test_a_terminal_gets_as_many_instances_as_it_has_room_for_a_pipe_all() -> None:
    one = seen(instances=many(200, long=True))
    assert "… and 173 more, all ready" in shown(one, terminal=True)
    assert len(shown(one, terminal=True).splitlines()) == 39  # and the prompt
    assert "… and 196 more, all ready" in shown(one, terminal=True, height=10)
    assert "more, all ready" not in shown(one)
    assert "more, all ready" not in shown(one, terminal=True, everything=True)


def test_what_was_started_again_says_why() -> None:
    processes = (
        RunningProcess("decode-0", 7, "ready", 2, 1.0, "x.log", "killed by SIGKILL"),
        RunningProcess("gateway", 0, "restarting", 1, 0.0, "y.log", "exit code 1"),
    )
    text = " ".join(shown(seen(state=state(*processes))).split())
    assert "decode-0: restarted 2 times, last because: killed by SIGKILL" in text
    assert "gateway: restarting: exit code 1" in text


def test_with_the_monitor_away_it_says_so_and_shows_what_the_others_know() -> None:
    processes = (
        RunningProcess("monitor", 7, "restarting", 1, 0.0, ""),
        RunningProcess("scheduler", 8, "ready", 0, 1.0, ""),
    )
    health = {"monitor": "connection refused", "scheduler": ""}
    one = Snapshot(0.0, state(*processes), "no answer", instances=ROLES, health=health, jobs={"decode": 3, "queued": 1})
    text = " ".join(shown(one).split())
    assert "The monitor does not answer: no answer" in text
    assert "launcher's state file" in text
    assert "4 jobs running: 3 in decode, 1 in queued" in text
    assert "scheduler 8 ready 0 healthy" in text
    assert "monitor 7 restarting 1 connection refused" in text
    assert "decode-0" in text


def test_json_has_the_shape_that_it_had_and_the_verdict() -> None:
    process = RunningProcess("decode-0", 7, "ready", 2, 1.0, "x.log", "killed")
    told = seen(state=state(process)).as_json()
    assert set(told) == {"api_url", "dashboard_url", "processes", "instances", "slo", "verdict"}
    assert told["processes"] == [{"name": "decode-0", "pid": 7, "state": "ready", "restarts": 2, "fault": "killed"}]
    assert told["verdict"]["level"] == "good"
    assert [one["instance_id"] for one in told["instances"]] == [f"decode-{n}" for n in range(4)]


def test_what_nobody_knows_is_null_in_json() -> None:
    told = Snapshot(0.0, state(), "away", jobs={"decode": 1}).as_json()
    assert (told["verdict"], told["slo"], told["instances"]) == (None, None, None)
    assert (told["monitor_fault"], told["jobs"]) == ("away", {"decode": 1})
