"""A share of this machine's cores for a group of processes, by a cgroup (v1 or v2), so that engines differ in speed.

Source: Linux, Documentation/scheduler/sched-bwc.rst (v1: cpu.cfs_quota_us) and admin-guide/cgroup-v2.rst (cpu.max).
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import geteuid, getpid, rmdir
from pathlib import Path

import psutil

from shared.errors import InvalidRequest, Unavailable

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # short, so that a step is slowed down evenly and not now and then
LEAST_US = 1_000  # the kernel takes no less
REMOVE_S = 5.0
_NAME = re.compile(r"polyphase-(\d+)-(\d+)-[\w.-]+")


@dataclass(frozen=True, slots=True)
class Throttled:
    """What a group has met so far: periods in which it ran, those in which it used its quota up, seconds lost so."""

    periods: int
    throttled: int
    lost_s: float

    def since(self, before: "Throttled") -> "Throttled":
        """The same from `before` on."""
        return Throttled(self.periods - before.periods, self.throttled - before.throttled, self.lost_s - before.lost_s)

    @property
    def share(self) -> float:
        """Of the periods, those in which the quota was used up: 1 when computing is all there is."""
        return self.throttled / self.periods if self.periods else 0.0


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """A cgroup with a quota, at first of `cores`."""

    path: Path
    cores: float
    unified: bool  # v2

    def add(self, pid: int) -> None:
        """Hold a process, its threads and its children to the quota. Raises Unavailable."""
        try:
            root = psutil.Process(pid)
            pids = [pid, *(child.pid for child in root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise Unavailable(f"{self.path.name}: there is no process {pid}") from error
        for one in pids:
            _write(self.path / "cgroup.procs", str(one))

    def limit(self, cores: float) -> None:
        """Another quota from now on. Raises Unavailable, and InvalidRequest for one that is too small."""
        _limit(self.path, self.unified, cores)

    def pids(self) -> tuple[int, ...]:
        """The processes that it holds."""
        return tuple(map(int, (self.path / "cgroup.procs").read_text().split()))

    def throttled(self) -> Throttled:
        """So far."""
        rows = (line.split() for line in (self.path / "cpu.stat").read_text().splitlines())
        said = {row[0]: int(row[1]) for row in rows if len(row) == 2}
        lost_s = said.get("throttled_usec", 0) / 1e6 if self.unified else said.get("throttled_time", 0) / 1e9
        return Throttled(said.get("nr_periods", 0), said.get("nr_throttled", 0), lost_s)


@contextmanager
def cpu_quota(name: str, cores: float, cgroups: Path = CGROUPS) -> Iterator[CpuGroup]:
    """A group that may use so many cores, for the block's length; before others where cores are short.

    Groups that a killed process has left are removed first. Raises Unavailable, which says what is missing, where this
    machine does not allow it, and InvalidRequest for a quota that is too small.
    """
    _check(name, cores)
    parent, unified = _parent(cgroups)
    _remove_leftovers(parent)
    started = round(psutil.Process().create_time() * 100)
    path = parent / f"polyphase-{getpid()}-{started}-{name}"
    _make(path)
    try:
        _limit(path, unified, cores)
        if unified:
            _write(path / "cpu.weight", "10000")  # the greatest there is
        else:
            _write(path / "cpu.shares", "262144")  # the greatest there is
        yield CpuGroup(path, cores, unified)
    finally:
        _remove(path)


def _check(name: str, cores: float) -> None:
    if cores * PERIOD_US < LEAST_US:
        raise InvalidRequest(f"{name}: a quota of {cores:g} cores is less than {LEAST_US / PERIOD_US:g}")


def _limit(path: Path, unified: bool, cores: float) -> None:
    _check(path.name, cores)
    quota_us = round(cores * PERIOD_US)
    if unified:
        _write(path / "cpu.max", f"{quota_us} {PERIOD_US}")
    else:
        _write(path / "cpu.cfs_period_us", str(PERIOD_US))
        _write(path / "cpu.cfs_quota_us", str(quota_us))


def _parent(cgroups: Path) -> tuple[Path, bool]:
    """The group in which ours are made, and whether it is v2."""
    for name in ("cpu", "cpu,cpuacct"):
        if (cgroups / name / "cgroup.procs").exists():
            return cgroups / name, False
    known = cgroups / "cgroup.controllers"
    if not known.exists():
        raise Unavailable(f"CPU quotas: no cgroup is mounted at {cgroups}, neither v1 with `cpu` nor v2")
    if "cpu" not in known.read_text().split():
        raise Unavailable(f"CPU quotas: {known} does not name the controller `cpu`")
    control = cgroups / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        _write(control, "+cpu")
    return cgroups, True


def _make(path: Path) -> None:
    try:
        path.mkdir()
    except OSError as error:
        raise _refusal(path.parent, error) from error


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise _refusal(file, error) from error


def _refusal(where: Path, error: OSError) -> Unavailable:
    who = "" if geteuid() == 0 else "; this needs root"
    return Unavailable(f"CPU quotas: {where} cannot be changed ({error.strerror}){who}")


def _remove_leftovers(parent: Path) -> None:
    for path in parent.glob("polyphase-*"):
        found = _NAME.fullmatch(path.name)
        if found is not None and not _alive(int(found[1]), int(found[2])):
            _remove(path)


def _alive(pid: int, started: int) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() * 100 - started) <= 2
    except psutil.NoSuchProcess:
        return False


def _remove(path: Path) -> None:
    """Let its processes go on without a quota, and remove it; a process that is ending keeps it a moment longer."""
    give_up = time.monotonic() + REMOVE_S
    while path.exists():
        for pid in (path / "cgroup.procs").read_text().split() if (path / "cgroup.procs").exists() else ():
            with suppress(OSError):  # it has ended
                (path.parent / "cgroup.procs").write_text(pid)
        try:
            rmdir(path)
        except OSError as error:
            if time.monotonic() > give_up:
                raise Unavailable(f"CPU quotas: {path} cannot be removed ({error.strerror})") from error
            time.sleep(0.02)
