"""A handle to a running suite: its addresses and processes, and what checks and tests do to it."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from services.launcher import cluster_keys, log_cause, state_file
from services.launcher.state_file import SuiteState
from shared.domain.instance import InstanceState, Role
from shared.domain.route import PolicySpec
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.wire.addresses import several
from shared.wire.api.monitor import InstanceRow, PoliciesInForce
from shared.wire.clients.http import TIMEOUT_S
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin

POLL_S = 0.05
READY_S = 120.0
FOLLOW_S = 30.0  # covers an engine step and the restart of a process
ANSWER_S = 20.0  # of a monitor or scheduler on a busy machine; of several monitors the next one is called sooner


class Suite:
    """Reads the state file on each use, since pids change when the launcher restarts a process.

    answer_s: time limit of calls to the only monitor and to schedulers.
    """

    answer_s = ANSWER_S

    def __init__(self, data_dir: Path, load: Callable[[], SuiteState] | None = None) -> None:
        self.data_dir = data_dir
        self._load = load or (lambda: state_file.read(data_dir))

    @property
    def state(self) -> SuiteState:
        """The present state. Raises NotFound if the suite is not running."""
        return self._load()

    def monitor(self) -> MonitorClient:
        """A client of the monitor, which the caller closes."""
        url = self.state.monitor_url
        timeout_s = self.answer_s if len(several(url)) == 1 else TIMEOUT_S
        return MonitorClient(url, token=cluster_keys.kept_token(self.data_dir), timeout_s=timeout_s)

    def schedulers(self) -> tuple[SchedulerAdmin, ...]:
        """A client of each scheduler, which the caller closes."""
        return tuple(SchedulerAdmin(url, timeout_s=self.answer_s) for url in self.state.scheduler_urls)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a process by its name in the plan; the launcher restarts it. Returns its pid."""
        pid = self.state.pid(name)
        os.kill(pid, number)
        return pid

    async def restarted(self, name: str, old_pid: int, timeout_s: float = READY_S) -> float:
        """Wait until `name` is ready again under another pid. Returns the seconds it took."""
        began = time.monotonic()

        def again() -> bool:
            process = next(p for p in self.state.processes if p.name == name)
            return process.state == "ready" and process.pid not in (0, old_pid)

        await until(again, timeout_s, f"the restart of {name}")
        return time.monotonic() - began

    async def instances(self) -> dict[str, InstanceRow]:
        async with self.monitor() as monitor:
            return {entry.instance_id: entry for entry in await monitor.instances()}

    async def ready(self, role: Role) -> list[str]:
        found = await self.instances()
        return [name for name, entry in found.items() if entry.role is role and entry.state is InstanceState.READY]

    async def wait_ready(self, names: Collection[str] = (), timeout_s: float = READY_S) -> None:
        """Wait until these instances (default: all of this suite) are ready."""
        wanted = set(names or self.state.instance_ids)
        states: dict[str, InstanceState] = {}  # of all instances that have registered
        async with self.monitor() as monitor:

            async def all_ready() -> bool:
                states.update({entry.instance_id: entry.state for entry in await monitor.instances()})
                return all(states.get(name) is InstanceState.READY for name in wanted)

            try:
                await until(all_ready, timeout_s, "instances")
            except DeadlineExceeded as error:
                late = sorted(name for name in wanted if states.get(name) != InstanceState.READY.value)
                lines = [self._lateness(name, states.get(name, "not registered")) for name in late]
                raise DeadlineExceeded(f"not ready after {timeout_s:.0f} s:\n" + "\n".join(lines)) from error

    def _lateness(self, name: str, state: str) -> str:
        log = self.data_dir / "logs" / f"{name}.log"
        reason = log_cause.last_error(log)  # such as the monitor's reason to refuse the instance
        return f"{name}: {state}{f'; {reason}' if reason else ''}; its log: {log}"

    async def wait_idle(self, timeout_s: float = 30.0) -> float:
        """Wait until new reports show no job, KV block or staged KV at any instance. Returns the seconds it took."""
        began, now_s = time.monotonic(), time.time()
        async with self.monitor() as monitor:

            async def idle() -> bool:
                entries = [e for e in await monitor.instances() if e.state is not InstanceState.DEAD]
                return all(e.load.time_s > now_s and _idle(e) for e in entries)

            await until(idle, timeout_s, "the instances to be idle")
        return time.monotonic() - began

    async def set_policies(self, change: Mapping[str, PolicySpec | None], who: str) -> None:
        """Change policies (None: back to that of the cluster file) and wait until all processes follow."""
        async with self.monitor() as monitor:
            await change_policies(monitor, change, who, len(self.state.scheduler_urls))

    def memory_bytes(self) -> int:
        """The proportional set size of the launcher and its descendants."""
        return memory_of([self.state.launcher_pid])


def memory_of(pids: Sequence[int]) -> int:
    """The PSS of these processes and their descendants, in which shared pages count once."""
    total = 0
    for pid in pids:
        try:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                total += _pss(process)
        except psutil.NoSuchProcess:
            continue
    return total


async def change_policies(
    monitor: MonitorClient,
    change: Mapping[str, PolicySpec | None],
    who: str,
    schedulers: int = 0,
    timeout_s: float = FOLLOW_S,
    *,
    must_follow: bool = True,
) -> PoliciesInForce:
    """Change policies and wait until all instances and at least so many schedulers follow. Returns those in force.

    Raises the monitor's own error. When not all follow in time: DeadlineExceeded that names the processes which do not,
    or, without `must_follow`, the answer shows them.
    """
    answer = await monitor.set_policies(change, who=who)
    give_up = time.monotonic() + timeout_s
    while not _followed(answer, schedulers) and time.monotonic() < give_up:
        await asyncio.sleep(POLL_S)
        try:
            answer = await monitor.policies()
        except PolyphaseError:
            if time.monotonic() >= give_up:
                raise
    if must_follow and not _followed(answer, schedulers):
        late = [f"{each.name} {each.trouble}".strip() for each in answer.followers if not each.follows]
        raise DeadlineExceeded(
            f"waited {timeout_s:.0f} s for all processes to follow; late: {'; '.join(late) or 'a scheduler'}"
        )
    return answer


def _followed(answer: PoliciesInForce, schedulers: int) -> bool:
    known = sum(each.process == "scheduler" for each in answer.followers)
    return known >= schedulers and all(each.follows for each in answer.followers)


async def until(condition: Callable[[], Any], timeout_s: float, what: str, poll_s: float = POLL_S) -> None:
    """Poll until `condition()` (plain or async) is true. Raises DeadlineExceeded that names `what`."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            holds = condition()
            if asyncio.iscoroutine(holds):
                holds = await holds
            if holds:
                return
        except PolyphaseError:
            if time.monotonic() > give_up:
                raise
        if time.monotonic() > give_up:
            raise DeadlineExceeded(f"waited {timeout_s:.0f} s for {what}")
        await asyncio.sleep(poll_s)


def _idle(entry: InstanceRow) -> bool:
    load = entry.load
    return not load.inflight and not load.staged_bytes and load.free_blocks >= entry.info.total_blocks


def _pss(process: psutil.Process) -> int:
    """The proportional set size where the system has it, else the resident set size; 0 for an ended process."""
    with suppress(psutil.Error, AttributeError):
        return int(process.memory_full_info().pss)
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0
