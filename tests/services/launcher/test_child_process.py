"""One process: its health until it hangs or ends, and the cause of its end in its log."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from services.launcher import child_process, log_cause
from services.launcher.child_process import Limits, spawn, until_ended, until_healthy
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import State, supervising
from tests.services.launcher.processes import FOREVER, QUICK, gone, restarted, server, status


async def get(spec: ProcessSpec, path: str) -> str:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
        return (await http.get(spec.health_url.replace("/health", path))).text


@pytest.mark.parametrize(
    ("trouble", "faults"),
    [
        ("SIGSTOP", ("hung: no good answer for 2 s (no answer within 1 s)", "stopped by a signal")),
        ("/block", ("hung: no good answer for 2 s", "its stacks are in its log")),
        ("/ill", ("hung: no good answer for 2 s (HTTP 503",)),
    ],
)
async def test_a_process_that_hangs_is_killed_and_restarts(
    tmp_path: Path, trouble: str, faults: tuple[str, ...]
) -> None:
    web = server()
    async with supervising([web], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        pid = status(supervisor).pid
        if trouble == "SIGSTOP":
            os.kill(pid, signal.SIGSTOP)
        request = asyncio.create_task(get(web, trouble if trouble != "SIGSTOP" else "/"))
        fault = (await restarted(supervisor)).fault
        assert all(each in fault for each in faults)
        await asyncio.gather(request, return_exceptions=True)
        assert gone(pid)
        assert await get(web, "/")
    log = (tmp_path / "web.log").read_text()
    assert ("polyphase: hung: no good answer" in log and "in do_GET" in log) == (trouble == "/block")


async def test_a_slow_process_goes_on(tmp_path: Path) -> None:
    web = server()
    limits = Limits(poll_s=0.02, hang_s=60.0, check_s=0.05)
    async with supervising([web], tmp_path, lambda _: None, limits) as supervisor:
        await supervisor.started()
        first = int((await get(web, "/slow")).split()[0])

        async def five_checks_later() -> bool:
            return int((await get(web, "/")).split()[0]) >= first + 5

        await until(five_checks_later, 60, "health checks")
        assert (status(supervisor).state, status(supervisor).restarts) == (State.READY, 0)


async def test_a_process_that_is_stopped_while_it_starts_is_killed(tmp_path: Path) -> None:
    child = await spawn((sys.executable, "-S", "-c", FOREVER), {}, tmp_path / "log")
    os.kill(child.pid, signal.SIGSTOP)
    unready = await until_healthy(child, Unhealthy(), QUICK)
    assert unready is not None
    assert unready.late
    assert "while it started" in unready.text
    assert not child.running


async def test_the_start_limit_counts_from_the_last_byte_of_a_download(tmp_path: Path) -> None:
    """With a limit of nothing, the process is late at the first check at which its download has not gone on."""
    child = await spawn((sys.executable, "-S", "-c", FOREVER), {}, tmp_path / "log")
    steps = iter([True] * 20 + [False])
    unready = await until_healthy(child, Unhealthy(), replace(QUICK, start_s=0.0), lambda: next(steps))
    assert unready is not None
    assert unready.late
    assert next(steps, None) is None
    assert not child.running


async def test_a_stopped_process_does_not_delay_the_end(tmp_path: Path) -> None:
    """As Ctrl-C does it: SIGTERM, to which a stopped process does not react, and SIGKILL after `stop_s`."""
    async with asyncio.timeout(20):
        async with supervising([server()], tmp_path, lambda _: None, Limits(hang_s=0.0, stop_s=0.5)) as supervisor:
            await supervisor.started()
            pid = status(supervisor).pid
            os.kill(pid, signal.SIGSTOP)
        assert gone(pid)


class Unhealthy:
    """A health check, in place of the module `time` too: each check takes so long on its clock."""

    def __init__(self, *takes_s: float) -> None:
        self.takes_s = list(takes_s)
        self.clock_s = 0.0
        self.checks = 0

    async def check(self, deadline_s: float) -> str:
        self.checks += 1
        self.clock_s += self.takes_s.pop(0) if self.takes_s else 0.0
        return "no answer"

    def monotonic(self) -> float:
        return self.clock_s


@pytest.mark.parametrize(
    ("takes_s", "checks"),
    [
        ((3.0, 3.0), 2),  # each check without an answer for half of `hang_s`
        ((1.0,) * 6, 6),  # refused immediately, repeatedly
        ((600.0, 3.0, 3.0), 3),  # in the first check the launcher itself stood still
    ],
)
async def test_when_a_process_counts_as_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_s: tuple[float, ...], checks: int
) -> None:
    health = Unhealthy(*takes_s)
    monkeypatch.setattr(child_process, "time", health)
    child = await spawn((sys.executable, "-S", "-c", FOREVER), {}, tmp_path / "log")
    fault = await until_ended(child, health, Limits(hang_s=6.0, check_s=0.0), lambda _: None)
    assert fault.startswith("hung: no good answer for 6 s (no answer)")
    assert health.checks == checks
    assert not child.running


async def test_with_a_limit_of_0_there_are_no_health_checks(tmp_path: Path) -> None:
    health = Unhealthy()
    child = await spawn((sys.executable, "-S", "-c", "raise SystemExit(3)"), {}, tmp_path / "log")
    assert await until_ended(child, health, Limits(hang_s=0.0), lambda _: None) == "ended with code 3"
    assert not health.checks


TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    main()\n'


def line(**entry: str) -> str:
    return json.dumps(entry)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{TRACE}shared.errors.InvalidRequest: listening on 0.0.0.0 needs API keys\n", "needs API keys"),
        (f"{TRACE}KeyError: 'a'\n\nDuring handling:\n\n{TRACE}ValueError: b\n", "ValueError: b"),
        (f"{TRACE}OSError: no such repository\nnanobind: leaked 3!\n - leaked function\n", "no such repository"),
        # As uvicorn logs a lifespan that failed.
        (line(event=f"{TRACE}OSError: no\n", level="error") + "\n" + line(event="Exit", level="error"), "OSError: no"),
        (line(event="the engine died", level="critical", exception=f"{TRACE}RuntimeError: gone"), "RuntimeError: gone"),
        (line(event="refused", level="error", reason="another model") + "\nbye\n", "refused: another model"),
        ("Fatal Python error: Segmentation fault\n\nThread 1 (most recent call first):\n  File x\n", "Segmentation"),
        ("no such model\n\n", "no such model"),
        ("", "its log is empty"),
        ("{not json\n[1]\nlast\n", "last"),
    ],
)
def test_cause_of_an_end_in_a_log(tmp_path: Path, text: str, cause: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert cause in log_cause.cause_of(log)


def test_a_cause_is_of_the_last_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_cause.size_of(log) == 0
    log.write_text(f"{TRACE}ValueError: yesterday\n")
    since = log_cause.size_of(log)
    with log.open("a") as more:
        more.write("port 1 is taken\n")
    assert log_cause.cause_of(log, since) == "port 1 is taken"


def test_the_last_error_of_a_running_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_cause.last_error(log) == ""
    log.write_text(line(event="the cluster refuses this instance", level="error", reason="other weights") + "\nmore\n")
    assert log_cause.last_error(log) == "the cluster refuses this instance: other weights"
