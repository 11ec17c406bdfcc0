"""The supervisor, on trivial processes: start, restart, stop, and what is left when the launcher is killed."""

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.launcher.child_process import Limits
from services.launcher.ports import free_range
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import StartFailed, State, Status, Supervisor, supervising
from shared.errors import NotFound

QUICK = Limits(start_s=20.0, poll_s=0.02, backoff_s=0.01, backoff_max_s=0.05, stop_s=0.5, at_once=2)
FOREVER = "import signal\nwhile True: signal.pause()"
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n{FOREVER}"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])
print(child.pid, flush=True)
child.wait()
"""
SERVER = """
import http.server, os, sys
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ.get("WORD", "").encode())
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ok).serve_forever()
"""


def spec(name: str, code: str, *arguments: str, health: str = "") -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-S", "-c", code, *arguments), dict(os.environ), health)


def server(name: str, code: str = SERVER) -> ProcessSpec:
    port = free_range(size=10)
    return spec(name, code, str(port), health=f"http://127.0.0.1:{port}/")


def status(supervisor: Supervisor, name: str) -> Status:
    return next(each for each in supervisor.statuses if each.name == name)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_starts_reports_and_stops(tmp_path: Path) -> None:
    seen: list[tuple[str, State]] = []
    specs = [server("web"), spec("quiet", FOREVER)]
    async with supervising(specs, tmp_path, lambda s: seen.append((s.name, s.state)), QUICK) as supervisor:
        await supervisor.started()
        pids = [each.pid for each in supervisor.statuses]
        assert all(each.state is State.READY and each.took_s > 0 for each in supervisor.statuses)
    assert all(gone(pid) for pid in pids)
    assert ("web", State.STARTING) in seen
    assert seen[-1][1] is State.STOPPED


async def test_a_process_that_dies_is_started_again(tmp_path: Path) -> None:
    async with supervising([server("web")], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        first = status(supervisor, "web").pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: status(supervisor, "web").restarts == 1, 10, "the death to be seen")
        await until(lambda: status(supervisor, "web").state is State.READY, 10, "the restart")
        assert status(supervisor, "web").pid != first


async def test_restarts_slow_down_and_say_why(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import sys; sys.exit(3)"
    limits = Limits(backoff_s=0.01, backoff_max_s=0.04, poll_s=0.01)
    seen = asyncio.Event()

    def changed(now: Status) -> None:
        if now.state is State.RESTARTING:
            notes.append(now.note)
            if len(notes) == 4:
                seen.set()

    async with supervising([spec("ends", code)], tmp_path, changed, limits):
        await asyncio.wait_for(seen.wait(), 20)
    assert [note.rsplit(" in ")[1] for note in notes[:4]] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
    assert "ended with code 3" in notes[0]


async def test_a_failed_start_shows_the_log_and_stops_the_rest(tmp_path: Path) -> None:
    broken = spec("broken", "print('no such model'); raise SystemExit(2)", health="http://127.0.0.1:1/")
    pids: list[int] = []
    said = r"broken did not start: ended with code 2: no such model\nIts log: .*broken.log"
    with pytest.raises(StartFailed, match=said):
        async with supervising([spec("fine", FOREVER), broken], tmp_path, lambda s: pids.append(s.pid), QUICK) as s:
            await s.started()
    assert all(gone(pid) for pid in pids if pid)


async def test_a_start_that_takes_too_long_fails(tmp_path: Path) -> None:
    stuck = spec("stuck", FOREVER, health="http://127.0.0.1:1/")
    with pytest.raises(StartFailed, match="not healthy"):
        async with supervising([stuck], tmp_path, lambda _: None, Limits(start_s=0.3, poll_s=0.02)) as supervisor:
            await supervisor.started()


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with supervising([spec("deaf", DEAF)], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        await until(lambda: "up" in (tmp_path / "deaf.log").read_text(), 10, "the process to ignore SIGTERM")
        pid, began = status(supervisor, "deaf").pid, time.monotonic()
    assert gone(pid)
    assert QUICK.stop_s <= time.monotonic() - began < 10


async def test_grandchildren_end_too(tmp_path: Path) -> None:
    log = tmp_path / "parent.log"
    async with supervising([spec("parent", PARENT)], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        await until(lambda: log.read_text().strip().isdigit(), 10, "the grandchild")
        grandchild = int(log.read_text())
        os.kill(status(supervisor, "parent").pid, signal.SIGKILL)  # a crash leaves none behind either
        await until(lambda: gone(grandchild), 10, "the grandchild of a dead child to end")
        await until(lambda: len(log.read_text().split()) == 2, 10, "the second grandchild")
        second = int(log.read_text().split()[1])
    await until(lambda: gone(second), 10, "the second grandchild to end")


async def test_restart_with_another_environment(tmp_path: Path) -> None:
    import httpx

    web = server("web")
    async with supervising([web], tmp_path, lambda _: None, QUICK) as supervisor, httpx.AsyncClient() as http:
        await supervisor.started()
        first = status(supervisor, "web").pid
        await supervisor.restart("web", {"WORD": "changed"})
        await until(lambda: status(supervisor, "web").pid not in (0, first), 10, "the new process")
        await until(lambda: status(supervisor, "web").state is State.READY, 10, "the restart")
        assert (await http.get(web.health_url)).text == "changed"
        with pytest.raises(NotFound, match="web"):
            await supervisor.restart("nobody")


async def test_an_error_in_the_block_stops_everything_and_passes_through(tmp_path: Path) -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with supervising([spec("quiet", FOREVER)], tmp_path, lambda s: pids.append(s.pid), QUICK) as supervisor:
            await supervisor.started()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
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
async def test_children_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path, frozen: bool) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), DEAF]
    launcher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    pids = [int(word) for word in (await launcher.stdout.readline()).split()]
    assert len(pids) == 3
    assert not any(gone(pid) for pid in pids)
    if frozen:
        launcher.send_signal(signal.SIGSTOP)
        await until(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED, 10, "it to be stopped")
        assert not any(gone(pid) for pid in pids)  # a frozen launcher takes nothing with it
    launcher.kill()
    await launcher.wait()
    await until(lambda: all(gone(pid) for pid in pids), 10, "the children to end")


async def test_one_instance_that_is_late_does_not_end_the_suite(tmp_path: Path) -> None:
    """The others serve; it is started again, with a word, and counts as any other once it is ready."""
    gate = tmp_path / "gate"
    slow = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{SERVER}"
    late_one = replace(server("late", slow), start_s=0.3, may_be_late=True, role="decode")
    notes: list[str] = []
    fine = replace(server("fine"), may_be_late=True, role="decode")
    specs = [late_one, fine, server("gateway")]
    async with supervising(specs, tmp_path, lambda s: notes.append(s.note), QUICK) as supervisor:
        await supervisor.started()
        assert supervisor.late == ("late",)
        assert any(note.startswith("not healthy after 0.3 s") and "restarting" in note for note in notes)
        assert status(supervisor, "fine").state is State.READY
        gate.touch()
        await until(lambda: not supervisor.late, 20, "the late one")
        assert status(supervisor, "late").state is State.READY


async def test_an_instance_that_ends_by_itself_at_its_start_ends_the_suite(tmp_path: Path) -> None:
    broken = spec("broken", "print('no such model'); raise SystemExit(2)", health="http://127.0.0.1:1/")
    specs = [replace(broken, may_be_late=True), replace(server("fine"), may_be_late=True)]
    with pytest.raises(StartFailed, match="broken did not start: ended with code 2: no such model"):
        async with supervising(specs, tmp_path, lambda _: None, QUICK) as supervisor:
            await supervisor.started()


async def test_where_every_instance_of_a_role_is_late_the_start_has_failed(tmp_path: Path) -> None:
    stuck = replace(spec("stuck", FOREVER, health="http://127.0.0.1:1/"), start_s=0.2, may_be_late=True, role="decode")
    specs = [server("gateway"), replace(server("fine"), may_be_late=True, role="prefill"), stuck]
    with pytest.raises(StartFailed, match=r"stuck did not start: not healthy after 0\.2 s"):
        async with supervising(specs, tmp_path, lambda _: None, QUICK) as supervisor:
            await supervisor.started()


async def test_another_host_may_have_the_role_of_one_that_is_late(tmp_path: Path) -> None:
    stuck = replace(spec("stuck", FOREVER, health="http://127.0.0.1:1/"), start_s=0.2, may_be_late=True)
    async with supervising([stuck], tmp_path, lambda _: None, QUICK) as supervisor:
        await supervisor.started()
        assert supervisor.late == ("stuck",)


async def test_a_service_that_is_late_ends_the_suite(tmp_path: Path) -> None:
    stuck = replace(spec("gateway", FOREVER, health="http://127.0.0.1:1/"), start_s=0.2)
    with pytest.raises(StartFailed, match="gateway did not start"):
        async with supervising(
            [replace(server("fine"), may_be_late=True), stuck], tmp_path, lambda _: None, QUICK
        ) as s:
            await s.started()
