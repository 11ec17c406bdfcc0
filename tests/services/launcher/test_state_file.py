"""The state file: written whole, read back, refused when stale."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.launcher import state_file
from services.launcher.spec import Plan
from services.launcher.supervisor import State, Status
from shared.errors import Conflict, InvalidRequest, NotFound

PLAN = Plan(
    model="m",
    processes=(),
    instance_ids=("p", "d"),
    api_url="http://a",
    monitor_url="http://m",
    scheduler_urls=("http://s",),
    predictor_url="",
    dashboard_url="",
    runs_control=True,
)
STATUSES = (Status("p", Path("p.log"), State.READY, pid=42), Status("d", Path("d.log"), State.RESTARTING))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    state = state_file.describe(PLAN, STATUSES)
    state_file.write(tmp_path, state)
    assert state_file.read(tmp_path) == state
    assert state.launcher_pid == os.getpid()
    assert [file.name for file in tmp_path.iterdir()] == [state_file.NAME]


def test_pids_by_name() -> None:
    state = state_file.describe(PLAN, STATUSES)
    assert state.pid("p") == 42
    for name in ("d", "nobody"):  # being restarted; unknown
        with pytest.raises(NotFound, match=name):
            state.pid(name)


def test_only_one_suite_a_folder(tmp_path: Path) -> None:
    with state_file.owning(tmp_path / "data"):
        with pytest.raises(Conflict, match=f"{tmp_path}/data.*process {os.getpid()}.*--data-dir"):
            state_file.owning(tmp_path / "data").__enter__()
        with state_file.owning(tmp_path / "other"):
            pass
    with state_file.owning(tmp_path / "data"):
        pass


def test_a_folder_that_a_killed_launcher_held_is_free(tmp_path: Path) -> None:
    code = "import sys, pathlib; from services.launcher import state_file as s\n"
    code += "with s.owning(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(Conflict, match=str(other.pid)):
            state_file.owning(tmp_path).__enter__()
        other.kill()
        other.wait()
    with state_file.owning(tmp_path):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file/data.*--data-dir"):
        state_file.owning(tmp_path / "file" / "data").__enter__()


def test_what_a_dead_launcher_left_is_no_suite(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as dead:
        dead.wait()
    state = replace(state_file.describe(PLAN, ()), launcher_pid=dead.pid)
    state_file.write(tmp_path, state)
    with pytest.raises(NotFound, match="polyphase up"):
        state_file.read(tmp_path)
    state_file.write(tmp_path, replace(state_file.describe(PLAN, ()), launcher_started_s=1.0))  # its pid was reused
    with pytest.raises(NotFound):
        state_file.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"launcher_pid": 1}'])
def test_a_broken_file_is_no_suite(tmp_path: Path, text: str) -> None:
    (tmp_path / state_file.NAME).write_text(text)
    with pytest.raises(NotFound):
        state_file.read(tmp_path)
