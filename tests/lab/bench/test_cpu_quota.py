"""A share of the cores for a group of processes."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lab.bench import real_engines
from lab.bench.real_engines import PERIOD_US, Throttled, cpu_quota
from shared.errors import InvalidRequest, Unavailable


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
