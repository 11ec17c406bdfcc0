"""CPU quotas that make engines on this machine unlike, and suites of real engines under them."""

import re
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from os import geteuid, getpid, rmdir
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.cluster_files import ClusterDict, LlamaShape, make_llama
from benchmarks.experiment import WHO, Session, measured
from shared.errors import InvalidRequest, Unavailable

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000  # short, so that a quota slows a step down evenly
MIN_QUOTA_US = 1_000  # the kernel refuses less
REMOVE_S = 5.0
_NAME = re.compile(r"polyphase-(\d+)-(\d+)-[\w.-]+")


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """A cgroup with a CPU quota."""

    path: Path
    unified: bool  # cgroup v2

    def add(self, pid: int) -> None:
        """Hold a process, its threads and its children to the quota. Raises Unavailable."""
        try:
            root = psutil.Process(pid)
            pids = [pid, *(child.pid for child in root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise Unavailable(f"{self.path.name}: there is no process {pid}") from error
        for each in pids:
            _write(self.path / "cgroup.procs", str(each))

    def limit(self, cores: float) -> None:
        """Set the quota. Raises Unavailable, and InvalidRequest for one that is too small."""
        _check(self.path.name, cores)
        quota_us = round(cores * PERIOD_US)
        if self.unified:
            _write(self.path / "cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            _write(self.path / "cpu.cfs_period_us", str(PERIOD_US))
            _write(self.path / "cpu.cfs_quota_us", str(quota_us))


@contextmanager
def cpu_quota(name: str, cores: float, cgroups: Path = CGROUPS) -> Iterator[CpuGroup]:
    """A group that may use so many cores, with the highest priority where cores are short.

    Groups of processes that have ended are removed first. Raises Unavailable, which says what is missing, where this
    machine does not allow quotas, and InvalidRequest for a quota that is too small.
    """
    _check(name, cores)
    parent, unified = _parent(cgroups)
    for path in parent.glob("polyphase-*"):
        found = _NAME.fullmatch(path.name)
        if found is not None and not _alive(int(found[1]), int(found[2])):
            _remove(path)
    started = round(psutil.Process().create_time() * 100)
    group = CpuGroup(parent / f"polyphase-{getpid()}-{started}-{name}", unified)
    try:
        group.path.mkdir()
    except OSError as error:
        raise _refusal(parent, error) from error
    try:
        group.limit(cores)
        _write(*((group.path / "cpu.weight", "10000") if unified else (group.path / "cpu.shares", "262144")))
        yield group
    finally:
        _remove(group.path)


def _check(name: str, cores: float) -> None:
    if cores * PERIOD_US < MIN_QUOTA_US:
        raise InvalidRequest(f"{name}: a quota of {cores:g} cores is less than {MIN_QUOTA_US / PERIOD_US:g}")


def _parent(cgroups: Path) -> tuple[Path, bool]:
    """The cgroup below which new groups are made, and whether it is v2."""
    for name in ("cpu", "cpu,cpuacct"):
        if (cgroups / name / "cgroup.procs").exists():
            return cgroups / name, False
    known, enabled = cgroups / "cgroup.controllers", cgroups / "cgroup.subtree_control"
    if not known.exists():
        raise Unavailable(f"CPU quotas: no cgroup is mounted at {cgroups}, neither v1 with `cpu` nor v2")
    if "cpu" not in known.read_text().split():
        raise Unavailable(f"CPU quotas: {known} does not name the controller `cpu`")
    if "cpu" not in enabled.read_text().split():
        _write(enabled, "+cpu")
    return cgroups, True


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise _refusal(file, error) from error


def _refusal(where: Path, error: OSError) -> Unavailable:
    root = "" if geteuid() == 0 else "; this needs root"
    return Unavailable(f"CPU quotas: {where} cannot be changed ({error.strerror}){root}")


def _alive(pid: int, started: int) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() * 100 - started) <= 2
    except psutil.NoSuchProcess:
        return False


def _remove(path: Path) -> None:
    """Move the group's processes out of it, and remove it; a process that is ending keeps it a moment longer."""
    deadline = time.monotonic() + REMOVE_S
    while path.exists():
        for pid in (path / "cgroup.procs").read_text().split() if (path / "cgroup.procs").exists() else ():
            with suppress(OSError):  # it has ended
                (path.parent / "cgroup.procs").write_text(pid)
        try:
            rmdir(path)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"CPU quotas: {path} cannot be removed ({error.strerror})") from error
            time.sleep(0.02)


# Suites.

DRAIN_TIMEOUT_S = 60.0
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class QuotaSession(Session):
    """A running suite of which each instance is held to its share of the cores."""

    groups: Mapping[str, CpuGroup]
    pids: Mapping[str, int]

    async def flip(self, *names: str) -> None:
        """Change the roles of these instances. Raises the monitor's errors."""
        async with self.suite.monitor() as monitor:
            for name in names:
                await monitor.flip(name, drain_timeout_s=DRAIN_TIMEOUT_S, force=True, who=WHO)

    def check(self) -> None:
        """Raises Unavailable when an instance was restarted, and so without its quota."""
        for name, pid in self.pids.items():
            if self.suite.state.pid(name) != pid:
                raise Unavailable(f"the instance {name} was restarted without its quota: nothing can be compared")


async def measured_under_quotas(
    shape: LlamaShape,
    cores: Mapping[str, float],
    cluster_of: Callable[[Path], ClusterDict],
    work: Callable[[QuotaSession], Coroutine[Any, Any, Value]],
    seed: int,
) -> Value:
    """The result of `work` on a suite of real engines of a random Llama. cores: of each instance.

    cluster_of: makes the cluster file of the model's folder. Raises Unavailable where this machine allows no quotas.
    """
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cpu_quota(name, share)) for name, share in cores.items()}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyphase-engines-")))

        async def limited(on: Session) -> Value:
            pids = {name: on.suite.state.pid(name) for name in groups}
            for name, pid in pids.items():
                groups[name].add(pid)
            return await work(QuotaSession(on.running, on.target, on.traffic, groups, pids))

        return await measured(cluster_of(make_llama(folder / "model", shape)), limited, seed=seed)
