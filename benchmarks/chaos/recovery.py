"""Whether a suite is as it was before a fault: processes and roles, and without users no KV, job, row, memory, open
file or process that is left behind.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.chaos.under_test import RUN, SuiteUnderTest
from benchmarks.suite import background
from services.launcher.supervisor import State
from shared.domain.instance import InstanceState
from shared.errors import PolyphaseError

RECOVER_S = 10.0
POLL_S = 0.1
_FILES = 12  # growth that passes: kept-alive HTTP connections come and go


@dataclass(frozen=True, slots=True)
class Footprint:
    """What each process of the plan holds, and how often it was restarted."""

    restarts: dict[str, int]
    memory_bytes: dict[str, int]
    files: dict[str, int]
    helpers: frozenset[int]  # processes of the run that are not in the plan, such as the fork server


def footprint(suite: SuiteUnderTest) -> Footprint:
    memory: dict[str, int] = {}
    files: Counter[str] = Counter()
    monitors = suite.named("monitor")  # counted together: the acting monitor has more files, and may be another one
    restarts = {name: status.restarts for name, status in suite.processes.statuses.items()}
    for name, status in suite.processes.statuses.items():
        with suppress(psutil.Error):
            process = psutil.Process(status.pid)
            memory[name] = process.memory_info().rss
            files["monitor" if name in monitors else name] += process.num_fds()
    return Footprint(restarts, memory, files, frozenset(pid for pid, _ in _unknown(suite)))


async def missing(suite: SuiteUnderTest) -> list[str]:
    """Processes and instances that do not run or serve as before."""
    found = [
        f"{name} is {status.state.value}"
        for name, status in suite.processes.statuses.items()
        if status.state is not State.READY
    ]
    try:
        wrong = await suite.wrong_roles()
    except PolyphaseError as error:
        return [*found, f"monitor: {error.message}"]
    return found + [
        f"{name} is {entry.state.value} as {entry.role.value}" if entry else f"{name} is not registered"
        for name, entry in wrong.items()
    ]


async def left_behind(suite: SuiteUnderTest, before: Footprint, since_s: float) -> list[str]:
    """What is held without users after RECOVER_S at most; of jobs those that arrived after the Unix time `since_s`."""
    give_up = time.monotonic() + RECOVER_S
    while True:
        left = [*await _held(suite), *_grown(suite, before), *_orphans(suite, before), *await _unended(suite, since_s)]
        if not left or time.monotonic() > give_up:
            return left
        await asyncio.sleep(POLL_S)


async def _held(suite: SuiteUnderTest) -> list[str]:
    held = []
    try:
        for name, entry in (await suite.instances()).items():
            if entry.state is InstanceState.DEAD:  # its last report
                continue
            load, total = entry.load, entry.info.total_blocks
            amounts = {"inflight": load.inflight, "staged_bytes": load.staged_bytes, "waiting": load.waiting}
            held += [f"{name}: {amount} {what}" for what, amount in amounts.items() if amount]
            if load.free_blocks < total:
                held.append(f"{name}: {total - load.free_blocks} KV blocks")
    except PolyphaseError as error:
        held.append(error.message)
    return held


async def _unended(suite: SuiteUnderTest, since_s: float) -> list[str]:
    found = []
    for scheduler in suite.schedulers():
        async with scheduler:
            try:
                rows = await scheduler.requests(limit=5_000)
            except PolyphaseError as error:
                found.append(error.message)
                continue
        late = [row for row in rows if row.arrived_s >= since_s and not row.phase.final]
        found += [f"{len(late)} jobs that do not end at {scheduler.base_url}"] if late else []
    return found


def _grown(suite: SuiteUnderTest, before: Footprint) -> list[str]:
    now, grown = footprint(suite), []
    for name, size in now.memory_bytes.items():
        if size > before.memory_bytes.get(name, size) + suite.bed.memory_bytes:
            grown.append(f"{name}: {(size - before.memory_bytes[name]) >> 20} MiB more memory")
    for name, count in now.files.items():
        if count > before.files.get(name, count) + _FILES:
            grown.append(f"{name}: {count - before.files[name]} more open files")
    return grown


def _orphans(suite: SuiteUnderTest, before: Footprint) -> list[str]:
    return [f"orphan {pid} ({name})" for pid, name in _unknown(suite) if pid not in before.helpers]


def _unknown(suite: SuiteUnderTest) -> list[tuple[int, str]]:
    """Processes of this run that are neither in the launcher's list nor descend from a process in it."""
    known, found = {status.pid for status in suite.processes.statuses.values()}, []
    for pid, name in of_run(suite.run):
        with suppress(psutil.Error):  # it has ended
            if known.isdisjoint({pid, *(parent.pid for parent in psutil.Process(pid).parents())}):
                found.append((pid, name))
    return found


def of_run(run: str) -> list[tuple[int, str]]:
    """All living processes that were started for that run, as (process id, name)."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            mine = f"{RUN}={run}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, process.name()))
    return found


@asynccontextmanager
async def stall_watch(beat_s: float = 0.02) -> AsyncIterator[list[float]]:
    """Measures how long this process was kept from running: a list whose only element is the longest time in seconds.

    Such a time is the machine's, and no fault of the suite.
    """
    longest_s = [0.0]

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(beat_s)
            longest_s[0] = max(longest_s[0], time.monotonic() - began - beat_s)

    async with background(watch()):
        yield longest_s
