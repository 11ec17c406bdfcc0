"""The state file of a running suite, by which other commands and tests find its processes."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from services.launcher.spec import Plan
from services.launcher.supervisor import Status
from shared.errors import Conflict, InvalidRequest, NotFound

NAME = "state.json"


@dataclass(frozen=True, slots=True)
class RunningProcess:
    name: str
    pid: int
    state: str
    restarts: int
    took_s: float
    log: str
    fault: str = ""  # the reason of the last restart
    url: str = ""  # answers 200 while the process is healthy; empty without a health check


@dataclass(frozen=True, slots=True)
class SuiteState:
    launcher_pid: int
    launcher_started_s: float
    model: str
    api_url: str
    monitor_url: str
    scheduler_urls: tuple[str, ...]
    predictor_url: str
    dashboard_url: str
    instance_ids: tuple[str, ...]
    processes: tuple[RunningProcess, ...]
    planner_url: str = ""
    gateway_urls: tuple[str, ...] = ()  # of each process

    @property
    def alive(self) -> bool:
        """Whether the launcher that wrote it still runs."""
        try:
            started = psutil.Process(self.launcher_pid).create_time()
        except psutil.Error:
            return False
        return abs(started - self.launcher_started_s) < 1.0

    def pid(self, name: str) -> int:
        """The pid of a process. Raises NotFound, also while the process restarts."""
        for process in self.processes:
            if process.name == name and process.pid:
                return process.pid
        raise NotFound(f"no running process {name!r}; known: {', '.join(p.name for p in self.processes)}")


def describe(plan: Plan, statuses: Iterable[Status]) -> SuiteState:
    urls = {spec.name: spec.health_url for spec in plan.started}
    processes = [
        RunningProcess(
            name=each.name,
            pid=each.pid,
            state=each.state.value,
            restarts=each.restarts,
            took_s=round(each.took_s, 3),
            log=str(each.log),
            fault=each.fault,
            url=urls.get(each.name, ""),
        )
        for each in statuses
    ]
    return SuiteState(
        launcher_pid=os.getpid(),
        launcher_started_s=psutil.Process().create_time(),
        model=plan.model,
        api_url=plan.api_url,
        monitor_url=plan.monitor_url,
        scheduler_urls=plan.scheduler_urls,
        predictor_url=plan.predictor_url,
        dashboard_url=plan.dashboard_url,
        instance_ids=plan.instance_ids,
        processes=tuple(processes),
        planner_url=plan.planner_url,
        gateway_urls=plan.gateway_urls,
    )


def write(data_dir: Path, state: SuiteState) -> None:
    """Replace the file atomically."""
    data_dir.mkdir(parents=True, exist_ok=True)
    fresh = data_dir / f"{NAME}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
    fresh.replace(data_dir / NAME)


def read(data_dir: Path) -> SuiteState:
    """The running suite. Raises NotFound if none runs there."""
    try:
        state = msgspec.json.decode((data_dir / NAME).read_bytes(), type=SuiteState)
    except (OSError, msgspec.MsgspecError) as error:
        raise NotFound(f"no suite runs with its data in {data_dir}: start one with `polyphase up`") from error
    if not state.alive:
        raise NotFound(f"the suite in {data_dir} is not running any more: start it with `polyphase up`")
    return state


@contextmanager
def owning(data_dir: Path) -> Iterator[None]:
    """Lock the folder for one suite within the block. Raises Conflict, InvalidRequest."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InvalidRequest(f"cannot write to {data_dir} ({error.strerror}): choose another --data-dir") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace")
            raise Conflict(
                f"a suite already runs with its data in {data_dir} (process {holder}): "
                "stop it, or give this one a folder (--data-dir) and ports of its own"
            ) from None
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def remove(data_dir: Path) -> None:
    (data_dir / NAME).unlink(missing_ok=True)
