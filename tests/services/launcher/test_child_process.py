"""One process: its health until it hangs or ends, and the cause of its end in its log."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from services.launcher import child_process, log_cause
from services.launcher.child_process import Child, Limits, spawn, until_ended, until_healthy
from services.launcher.ports import free_range
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import State, Status, Supervisor, supervising

QUICK = Limits(start_s=20.0, poll_s=0.02, hang_s=0.6, check_s=0.05, backoff_s=0.01, stop_s=0.5)
FOREVER = "import signal\nwhile True: signal.pause()"
# GET /block blocks its only thread for ever; after GET /ill it is not well any more; /slow makes it slow.
SERVER = """
import faulthandler, http.server, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1)
asked, state = 0, {"status": 200, "delay_s": 0.0}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        if self.path == "/block": threading.Event().wait()
        if self.path == "/ill": state["status"] = 503
        if self.path == "/slow": state["delay_s"] = 0.2
        if self.path == "/health":
            asked += 1
            time.sleep(state["delay_s"])
        self.send_response(state["status"] if self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(str(asked).encode())
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server() -> ProcessSpec:
    port = free_range(size=10)
    argv = (sys.executable, "-S", "-c", SERVER, str(port))
    return ProcessSpec("web", argv, dict(os.environ), f"http://127.0.0.1:{port}/health")


async def get(spec: ProcessSpec, path: str) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(spec.health_url.replace("/health", path), timeout=20) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(fetch)


def status(supervisor: Supervisor) -> Status:
    return supervisor.statuses[0]


async def restarted(supervisor: Supervisor) -> str:
    """Wait for it; why."""
    await until(lambda: status(supervisor).restarts == 1, 20, "the hang to be seen")
    await until(lambda: status(supervisor).state is State.READY, 20, "the restart")
    return status(supervisor).fault


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_frozen_process_is_started_again(tmp_path: Path) -> None:
    web = server()
    async with supervising([web], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        pid = status(supervisor).pid
        os.kill(pid, signal.SIGSTOP)
        fault = await restarted(supervisor)
        assert fault.startswith("hung: no good answer for 0.6 s (no answer within 0.3 s)")
        assert fault.endswith("stopped by a signal")
        assert gone(pid)
        assert int(await get(web, "/health")) > 0


async def test_a_blocked_process_leaves_its_stacks_and_is_started_again(tmp_path: Path) -> None:
    web = server()
    async with supervising([web], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        blocking = asyncio.create_task(get(web, "/block"))
        assert "its stacks are in its log" in await restarted(supervisor)
        with pytest.raises(OSError):  # noqa: PT011
            await blocking
        log = (tmp_path / "web.log").read_text()
        assert "polyphase: hung: no good answer" in log
        assert "in do_GET" in log
        assert int(await get(web, "/health")) > 0


async def test_one_that_says_for_long_that_it_is_not_well_is_started_again(tmp_path: Path) -> None:
    web = server()
    async with supervising([web], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        await get(web, "/ill")
        assert "HTTP 503" in await restarted(supervisor)


async def test_a_slow_one_is_left_alone(tmp_path: Path) -> None:
    web = server()
    limits = Limits(poll_s=0.02, hang_s=60.0, check_s=0.05)
    async with supervising([web], tmp_path, lambda _: None, limits) as supervisor:
        await supervisor.started()
        await get(web, "/slow")
        first = int(await get(web, "/asked"))

        async def five_times_more() -> bool:
            return int(await get(web, "/asked")) >= first + 5

        await until(five_times_more, 60, "answers")
        assert (status(supervisor).state, status(supervisor).restarts) == (State.READY, 0)


async def test_one_that_is_frozen_while_it_starts_does_not_keep_its_slot(tmp_path: Path) -> None:
    child = await spawn((sys.executable, "-S", "-c", FOREVER), {}, tmp_path / "log")
    os.kill(child.pid, signal.SIGSTOP)
    unready = await until_healthy(child, Never(), QUICK)
    assert unready is not None
    assert unready.late
    assert "while it started" in unready.text
    assert not child.running


async def test_a_hung_child_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """As Ctrl-C does it: SIGTERM, which a frozen process does not react to, and SIGKILL after `stop_s`."""
    async with supervising([server()], tmp_path, lambda _: None, Limits(hang_s=0.0, stop_s=0.5)) as supervisor:
        await supervisor.started()
        pid = status(supervisor).pid
        os.kill(pid, signal.SIGSTOP)
        closing = asyncio.timeout(20)
        await closing.__aenter__()
    await closing.__aexit__(None, None, None)
    assert gone(pid)


class Never:
    """Not well, ever. `clock_s` goes on by `takes_s` with each question."""

    def __init__(self, *takes_s: float) -> None:
        self.takes_s = list(takes_s)
        self.clock_s = 0.0
        self.asked = 0

    async def check(self, deadline_s: float) -> str:
        self.asked += 1
        self.clock_s += self.takes_s.pop(0) if self.takes_s else 0.0
        return "no answer"


@pytest.mark.parametrize(
    ("takes_s", "asked"),
    [
        ((3.0, 3.0), 2),  # two questions, each unanswered for half of `hang_s`
        ((1.0,) * 6, 6),  # refused at once, again and again
        ((600.0, 3.0, 3.0), 3),  # at first we stood still ourselves: not its fault
    ],
)
async def test_when_it_counts_as_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_s: tuple[float, ...], asked: int
) -> None:
    health = Never(*takes_s)
    monkeypatch.setattr(child_process, "time", Clock(health))
    child = await spawn((sys.executable, "-S", "-c", FOREVER), {}, tmp_path / "log")
    fault = await until_ended(child, health, Limits(hang_s=6.0, check_s=0.0), lambda _: None)
    assert fault.startswith("hung: no good answer for 6 s (no answer)")
    assert health.asked == asked
    assert not child.running


class Clock:
    """In the place of the module `time`."""

    def __init__(self, health: Never) -> None:
        self._health = health

    def monotonic(self) -> float:
        return self._health.clock_s


async def test_with_a_limit_of_0_nobody_is_asked(tmp_path: Path) -> None:
    health = Never()
    child: Child = await spawn((sys.executable, "-S", "-c", "raise SystemExit(3)"), {}, tmp_path / "log")
    assert await until_ended(child, health, Limits(hang_s=0.0), lambda _: None) == "ended with code 3"
    assert not health.asked


TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    main()\n'


def line(**entry: str) -> str:
    return json.dumps(entry)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{TRACE}shared.errors.InvalidRequest: listening on 0.0.0.0 needs API keys\n", "needs API keys"),
        (f"{TRACE}KeyError: 'a'\n\nDuring handling:\n\n{TRACE}ValueError: b\n", "ValueError: b"),
        (f"{TRACE}OSError: no such repository\nnanobind: leaked 3!\n - leaked function\n", "no such repository"),
        # What uvicorn logs of a lifespan that failed, and what it says then.
        (line(event=f"{TRACE}OSError: no\n", level="error") + "\n" + line(event="Exit", level="error"), "OSError: no"),
        (line(event="the engine died", level="critical", exception=f"{TRACE}RuntimeError: gone"), "RuntimeError: gone"),
        (line(event="refused", level="error", reason="another model") + "\nbye\n", "refused: another model"),
        ("Fatal Python error: Segmentation fault\n\nThread 1 (most recent call first):\n  File x\n", "Segmentation"),
        ("no such model\n\n", "no such model"),
        ("", "its log is empty"),
        ("{not json\n[1]\nlast\n", "last"),
    ],
)
def test_cause(tmp_path: Path, text: str, cause: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert cause in log_cause.cause_of(log)


def test_an_earlier_runs_fault_is_not_this_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_cause.size_of(log) == 0
    log.write_text(f"{TRACE}ValueError: yesterday\n")
    since = log_cause.size_of(log)
    with log.open("a") as more:
        more.write("port 1 is taken\n")
    assert log_cause.cause_of(log, since) == "port 1 is taken"


def test_a_complaint_of_a_running_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_cause.last_error(log) == ""
    log.write_text(line(event="the cluster refuses this instance", level="error", reason="other weights") + "\nmore\n")
    assert log_cause.last_error(log) == "the cluster refuses this instance: other weights"
