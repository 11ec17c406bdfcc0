"""Status and top: pages, exit codes and JSON, with the monitor present and absent."""

import asyncio
import io
from dataclasses import replace

import pytest
from rich.console import Console

from services.launcher import status
from services.launcher.state_file import RunningProcess
from services.launcher.status import Snapshot
from shared.domain.verdict import Level, Problem
from shared.errors import NotFound, Unavailable
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


def drawn(view: status.LiveView, rows: int | None = 10) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(status.top_page(view, 80, rows))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def view_of(*answers: Snapshot | Exception) -> status.LiveView:
    left = list(answers)

    async def look() -> Snapshot:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return status.LiveView(look)


def now(**changes: object) -> Snapshot:
    return replace(seen(**changes), time_s=1e12)  # not old, whatever the clock says


async def test_a_page_has_the_verdict_rates_the_chain_and_instances() -> None:
    view = view_of(now(rates={"requests_per_s": 12.34, "output_tokens_per_s": 1234.5}))
    await view.refresh()
    text = drawn(view)
    assert "Good: 100 requests" in text
    assert "12.3 requests, – tokens in, 1,234 tokens out /s" in text
    assert "decode queue" in text
    assert "decode-3" in text


async def test_what_the_monitor_said_stays_with_its_age_while_it_is_away() -> None:
    away = Snapshot(2.0, seen().state, "connection refused", health={"scheduler": "", "monitor": "dead"}, jobs={})
    view = view_of(seen(), away, now(instances=many(1)))
    await view.refresh()
    await view.refresh()
    text = drawn(view)
    assert "The monitor does not answer: connection refused" in text
    assert "ago:" in text
    assert "not healthy: monitor (dead)" in text
    assert "decode-3" in text
    await view.refresh()
    assert "does not answer" not in drawn(view)
    assert "decode-3" not in drawn(view)


async def test_a_picture_that_grows_old_says_so() -> None:
    view = view_of(seen())
    await view.refresh()
    assert "The monitor has not answered yet." in drawn(view)


async def test_without_any_picture_an_error_is_one_and_later_a_word() -> None:
    with pytest.raises(NotFound):
        await view_of(NotFound("no suite runs")).refresh()
    view = view_of(seen(), NotFound("the suite is not running any more"))
    await view.refresh()
    await view.refresh()
    assert "not running any more" in drawn(view)


async def test_with_the_monitor_away_from_the_start_others_are_shown() -> None:
    away = Snapshot(1e12, seen().state, "gone", instances=many(2), health={"scheduler": ""}, jobs={"decode": 2})
    view = view_of(away)
    await view.refresh()
    text = drawn(view)
    assert "Answers of the processes themselves:" in text
    assert "running jobs: 2" in text
    assert "decode-1" in text


async def test_once_shows_all_instances_and_ends() -> None:
    console = Console(file=io.StringIO(), width=80)

    async def look() -> Snapshot:
        return now(instances=many(60))

    await status.run_top(console, look, once=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "decode-59" in text


async def test_into_a_pipe_it_prints_page_after_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "PERIOD_S", 0.0)
    console, looks = Console(file=io.StringIO(), width=80), 0

    async def look() -> Snapshot:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise asyncio.CancelledError
        return now(instances=many(60))

    with pytest.raises(asyncio.CancelledError):
        await status.run_top(console, look)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("Good:") == 3
    assert text.count("… and 41 more, all ready") == 3


async def test_the_first_error_ends_it() -> None:
    async def look() -> Snapshot:
        raise Unavailable("nobody there")

    with pytest.raises(Unavailable):
        await status.run_top(Console(file=io.StringIO()), look)
