"""The supervisor, on small programs: start, restart, stop, and the end of all processes with the launcher."""

import asyncio
import io
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from services.launcher.child_process import Child, Limits, stop_all
from services.launcher.display import StatusDisplay
from services.launcher.fork_client import ProgramStarter
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import StartFailed, State, Status, SupervisedProcess, supervising
from shared.errors import NotFound
from shared.model.source import Download
from tests.services.launcher.processes import (
    BROKEN,
    DEAF,
    FOREVER,
    NOWHERE,
    QUICK,
    SERVER,
    gone,
    logged,
    restarted,
    server,
    spec,
    status,
)

PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])
print(child.pid, flush=True)
child.wait()
"""
LATE = {"start_s": 0.3, "may_be_late": True}


async def test_processes_start_report_their_states_and_stop(tmp_path: Path) -> None:
    seen: list[tuple[str, State]] = []
    specs = [server(), spec("quiet")]
    async with supervising(specs, tmp_path, lambda s: seen.append((s.name, s.state)), QUICK) as supervisor:
        await supervisor.started()
        pids = [each.pid for each in supervisor.statuses]
        assert all(each.state is State.READY and each.took_s > 0 for each in supervisor.statuses)
    assert all(gone(pid) for pid in pids)
    assert [state for name, state in seen if name == "web"] == [State.STARTING, State.READY, State.STOPPED]


async def test_a_dead_process_restarts(tmp_path: Path) -> None:
    async with supervising([server()], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        first = status(supervisor).pid
        os.kill(first, signal.SIGKILL)
        assert (await restarted(supervisor)).pid != first


async def test_restarts_slow_down_and_give_the_reason(tmp_path: Path) -> None:
    notes: asyncio.Queue[str] = asyncio.Queue()

    def changed(now: Status) -> None:
        if now.state is State.RESTARTING:
            notes.put_nowait(now.note)

    limits = Limits(backoff_s=0.01, backoff_max_s=0.04, poll_s=0.01)
    async with supervising([spec("ends", "raise SystemExit(3)")], tmp_path, changed, limits), asyncio.timeout(20):
        found = [await notes.get() for _ in range(4)]
    delays = ("0.01", "0.02", "0.04", "0.04")
    assert found == [f"ended with code 3; restarting in {delay} s" for delay in delays]


@pytest.mark.parametrize(
    ("code", "fields", "error"),
    [
        (BROKEN, {}, r"first did not start: ended with code 2: no such model\nIts log: .*first.log"),
        (BROKEN, {"may_be_late": True}, "first did not start: ended with code 2: no such model"),
        (FOREVER, {"start_s": 0.3}, r"first did not start: not healthy after 0\.3 s"),
        (FOREVER, {**LATE, "role": "decode"}, r"first did not start: not healthy after 0\.3 s"),  # the only one
    ],
)
async def test_a_failed_start_shows_its_cause_and_stops_the_other_processes(
    tmp_path: Path, code: str, fields: dict[str, Any], error: str
) -> None:
    pids: list[int] = []
    first = replace(spec("first", code, health=NOWHERE), **fields)
    others = [spec("quiet"), replace(server(), may_be_late=True, role="prefill")]
    with pytest.raises(StartFailed, match=error):
        async with supervising([*others, first], tmp_path, lambda s: pids.append(s.pid), QUICK) as supervisor:
            await supervisor.started()
    assert all(gone(pid) for pid in pids if pid)


async def test_a_late_instance_does_not_end_the_suite(tmp_path: Path) -> None:
    """The others serve; the late instance restarts, and counts as any other once it is ready."""
    gate = tmp_path / "gate"
    slow = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{SERVER}"
    late = replace(server("late", slow), role="decode", **{**LATE, "start_s": 3.0})  # once the gate is there
    elsewhere = replace(spec("stuck", health=NOWHERE), **LATE)  # another host may have its role
    fine = replace(server("fine"), may_be_late=True, role="decode")
    notes: list[str] = []
    specs = [late, fine, elsewhere]
    async with supervising(specs, tmp_path, lambda s: notes.append(s.note), QUICK) as supervisor:
        await supervisor.started()
        assert supervisor.late == ("late", "stuck")
        assert any(note.startswith("not healthy after 0.3 s") and "restarting" in note for note in notes)
        assert status(supervisor, "fine").state is State.READY
        gate.touch()
        await until(lambda: supervisor.late == ("stuck",), 20, "the late one")
        assert status(supervisor, "late").state is State.READY


DOWNLOADING = f"""
import os
open(os.environ["POLYPHASE_DOWNLOAD_FILE"], "w").write("1500000 3000000")
{FOREVER}
"""


async def test_a_download_is_shown_while_the_process_starts(tmp_path: Path) -> None:
    shown = asyncio.Event()
    statuses: list[Status] = []

    def changed(now: Status) -> None:
        statuses.append(now)
        if now.download is not None:
            shown.set()

    (tmp_path / "downloads.download").write_text("3000000 3000000")  # of an earlier start
    async with supervising([spec("downloads", DOWNLOADING, health=NOWHERE)], tmp_path, changed, QUICK):
        await asyncio.wait_for(shown.wait(), QUICK.start_s)
    found = next(each for each in statuses if each.download is not None)
    assert (found.state, found.download) == (State.STARTING, Download(1_500_000, 3_000_000))
    assert found.note == "downloads weights: 1.5 of 3.0 MB"


def test_progress_is_printed_at_a_low_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("services.launcher.display.time.monotonic", lambda: now_s)
    printed = io.StringIO()
    display = StatusDisplay(Console(file=printed, width=200), "Starting")
    with display.start([]):
        for step in range(61):
            now_s = float(step)
            download = Download(step * 10**9, 60 * 10**9)
            note = f"downloads weights: {download}"
            display.update(Status("p", tmp_path, State.STARTING, note=note, download=download))
        display.update(Status("p", tmp_path, State.READY))
    lines = printed.getvalue().splitlines()
    assert [line.partition(": ")[2] for line in lines[1:-1]] == [
        f"downloads weights: {done}.0 of 60.0 GB" for done in (0, 15, 30, 45, 60)
    ]
    assert "p: ready" in lines[-1]


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with supervising([spec("deaf", DEAF)], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        await logged(tmp_path / "deaf.log", "up")
        pid, began = status(supervisor, "deaf").pid, time.monotonic()
    assert gone(pid)
    assert QUICK.stop_s <= time.monotonic() - began < 10


async def test_grandchildren_end_with_their_parent(tmp_path: Path) -> None:
    log = tmp_path / "parent.log"
    async with supervising([spec("parent", PARENT)], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        await logged(log, "\n")
        os.kill(status(supervisor, "parent").pid, signal.SIGKILL)
        await logged(log, "\n", 2)
        first, second = map(int, log.read_text().split())
        await until(lambda: gone(first), 10, "the grandchild of a dead child to end")
    await until(lambda: gone(second), 10, "the second grandchild to end")


async def test_a_requested_restart_adds_variables(tmp_path: Path) -> None:
    web = server()
    async with supervising([web], tmp_path, lambda _: None, QUICK) as supervisor, httpx.AsyncClient() as http:
        await supervisor.started()
        await supervisor.restart("web", {"WORD": "changed"})
        await restarted(supervisor)
        assert "changed" in (await http.get(web.health_url)).text
        with pytest.raises(NotFound, match="web"):
            await supervisor.restart("unknown")


async def test_a_restart_that_is_requested_during_the_delay_follows_immediately_and_counts_once(tmp_path: Path) -> None:
    web, limits = server(), replace(QUICK, backoff_s=600.0, backoff_max_s=600.0)
    async with supervising([web], tmp_path, lambda _: None, limits) as supervisor, httpx.AsyncClient() as http:
        await supervisor.started()
        os.kill(status(supervisor).pid, signal.SIGKILL)
        await until(lambda: status(supervisor).state is State.RESTARTING, 20, "the end of web to be seen")
        await supervisor.restart("web", {"WORD": "changed"})
        assert (await restarted(supervisor)).restarts == 1
        assert "changed" in (await http.get(web.health_url)).text
        os.kill(status(supervisor).pid, signal.SIGKILL)  # the request is used up: this end is delayed as any other
        await until(lambda: status(supervisor).state is State.RESTARTING, 20, "the second end of web to be seen")
        assert status(supervisor).note == "killed by signal 9; restarting in 600 s"


async def test_a_restart_that_is_requested_during_the_first_start_is_not_a_failed_start(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = (
        f"import os, time\nprint('up', flush=True)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{SERVER}"
    )
    web = server(code=slow)
    async with supervising([web], tmp_path, lambda _: None, QUICK) as supervisor, httpx.AsyncClient() as http:
        await logged(tmp_path / "web.log", "up")
        await supervisor.restart("web", {"WORD": "changed"})
        gate.touch()
        await supervisor.started()
        assert status(supervisor).restarts == 1
        assert "changed" in (await http.get(web.health_url)).text


async def test_a_restart_that_is_requested_while_the_process_is_created_adds_variables(tmp_path: Path) -> None:
    creating, created = asyncio.Event(), asyncio.Event()
    words: list[str] = []

    class SlowStarter(ProgramStarter):
        async def start(self, spec: ProcessSpec, log: Path) -> Child:
            words.append(spec.env.get("WORD", ""))
            creating.set()
            await created.wait()
            return await super().start(spec, log)

    quiet = spec("quiet")
    process = SupervisedProcess(quiet, tmp_path, lambda _: None, QUICK, SlowStarter(), None)
    keeping = asyncio.create_task(process.keep(asyncio.Semaphore(1)))
    try:
        await asyncio.wait_for(creating.wait(), 20)
        await process.restart({"WORD": "changed"})
        created.set()
        await until(lambda: len(words) == 2 and process.status.state is State.READY, 20, "the second start")
        assert words == ["", "changed"]
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await stop_all([process.child] if process.child is not None else [], 1.0)


async def test_an_error_in_the_block_stops_all_processes_and_passes_through(tmp_path: Path) -> None:
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with supervising([spec("quiet")], tmp_path, lambda s: pids.append(s.pid), QUICK) as supervisor:
            await supervisor.started()
            raise ZeroDivisionError
    assert all(gone(pid) for pid in pids if pid)


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from services.launcher.spec import ProcessSpec
from services.launcher.supervisor import supervising

async def main():
    specs = [ProcessSpec(f"p{i}", (sys.executable, "-S", "-c", sys.argv[2]), {}) for i in range(3)]
    async with supervising(specs, Path(sys.argv[1]), lambda _: None) as supervisor:
        await supervisor.started()
        print(*(s.pid for s in supervisor.statuses), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("frozen", [False, True])
async def test_children_end_with_a_launcher_that_is_killed(tmp_path: Path, frozen: bool) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), DEAF]
    launcher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    pids = [int(word) for word in (await launcher.stdout.readline()).split()]
    assert len(pids) == 3
    if frozen:
        launcher.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED, 10, "it to be stopped")
    assert not any(gone(pid) for pid in pids)
    launcher.kill()
    await launcher.wait()
    await until(lambda: all(gone(pid) for pid in pids), 10, "the children to end")
