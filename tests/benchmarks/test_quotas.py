"""CPU quotas of engines, on a folder like a mounted cgroup and on the real one."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import quotas
from benchmarks.quotas import PERIOD_US, cpu_quota
from shared.errors import InvalidRequest, Unavailable


@pytest.fixture
def v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quotas, "rmdir", shutil.rmtree)  # the kernel removes a group's own files
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cgroup.procs").write_text("")
    return tmp_path / "cpu"


def v2(root: Path, controllers: str = "cpu memory") -> None:
    files = {"cgroup.procs": "", "cgroup.controllers": controllers, "cgroup.subtree_control": ""}
    for name, text in files.items():
        (root / name).write_text(text)


def test_v1(v1: Path) -> None:
    with cpu_quota("slow", 0.32, v1.parent) as group:
        assert group.path.parent == v1
        assert (group.path / "cpu.cfs_period_us").read_text() == str(PERIOD_US)
        assert (group.path / "cpu.cfs_quota_us").read_text() == str(round(0.32 * PERIOD_US))
        assert (group.path / "cpu.shares").read_text() == "262144"
        group.limit(0.25)
        assert (group.path / "cpu.cfs_quota_us").read_text() == str(round(0.25 * PERIOD_US))
    assert not group.path.exists()


def test_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "rmdir", shutil.rmtree)
    v2(tmp_path)
    with cpu_quota("slow", 0.32, tmp_path) as group:
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
        assert (group.path / "cpu.max").read_text() == f"{round(0.32 * PERIOD_US)} {PERIOD_US}"
        assert (group.path / "cpu.weight").read_text() == "10000"
    assert not group.path.exists()


def test_a_process_is_limited_until_the_group_is_removed(v1: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with cpu_quota("slow", 0.5, v1.parent) as group:
            group.add(process.pid)
            assert (group.path / "cgroup.procs").read_text() == str(process.pid)
            with pytest.raises(Unavailable, match="no process 4194305"):
                group.add(4194305)
        assert (v1 / "cgroup.procs").read_text() == str(process.pid)
        process.kill()
    assert not list(v1.glob("polyphase-*"))


def test_groups_of_dead_processes_are_removed(v1: Path) -> None:
    mine = round(psutil.Process().create_time() * 100)
    reused, running = (v1 / f"polyphase-{os.getpid()}-{started}-slow" for started in (100, mine))
    dead, foreign = v1 / "polyphase-4194305-100-slow", v1 / "docker"
    for path in (dead, reused, running, foreign):
        path.mkdir()
    with cpu_quota("other", 0.5, v1.parent):
        assert [path.exists() for path in (dead, reused, running, foreign)] == [False, False, True, True]


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no cgroup is mounted at .*neither v1"), cpu_quota("slow", 0.5, tmp_path):
        pass
    with pytest.raises(InvalidRequest, match=r"slow: a quota of 0.01 cores"), cpu_quota("slow", 0.01, tmp_path):
        pass
    v2(tmp_path, controllers="memory")
    with pytest.raises(Unavailable, match="does not name the controller `cpu`"), cpu_quota("slow", 0.5, tmp_path):
        pass


def test_without_permission_the_error_names_the_path(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, *args: object, **more: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(quotas, "geteuid", lambda: 1000)
    with (
        pytest.raises(Unavailable, match=f"{v1} cannot be changed .Read-only file system.; this needs root"),
        cpu_quota("slow", 0.5, v1.parent),
    ):
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
                began, before = time.monotonic(), sum(process.cpu_times()[:2])  # within the time that is measured
                used_s = took_s = 0.0
                while took_s < 1.0 or (not used_s and took_s < 60.0):
                    time.sleep(0.1)
                    used_s = sum(process.cpu_times()[:2]) - before
                    took_s = time.monotonic() - began
            finally:
                spinning.kill()
    except Unavailable as error:
        pytest.skip(error.message)
    assert 0.0 < used_s < 0.25 * took_s + 0.1
    assert not group.path.exists()
