"""A scenario (a fault, and what it may cost clients), its run, and the check that the suite is as it was before.

A run has load, the fault, and recovery. Afterwards processes, roles and the rate of tokens must be as before, and
without users nothing may be left behind: no KV, job, row, memory, open file or process.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.load import BROKEN, HARM, UNCLEAN, Load, Tally, Verdict
from benchmarks.chaos.testbeds import EMULATED, Testbed
from benchmarks.chaos.under_test import RUN, SuiteUnderTest
from services.launcher.supervisor import State
from shared.domain.instance import InstanceState
from shared.errors import PolyphaseError

HANG_S = 1.0  # a wait beyond the scenario's outage that passes
RECOVER_S = 10.0
WARM_S = 30.0
CALM_S = 3.0
BEFORE_S = 1.0  # the machine's speed may have changed since: the rate just before the fault counts too
_POLL_S = 0.1
_RATE_SHARE = 0.6  # of the calm rate, over _WINDOW_S: with few users chance alone moves it by a fifth or so
_WINDOW_S = 1.0
_FILES = 12  # growth that passes: kept-alive HTTP connections come and go


@dataclass(frozen=True, slots=True)
class Footprint:
    """What each process of the plan holds, and how often it was restarted."""

    restarts: dict[str, int]
    memory_bytes: dict[str, int]
    files: dict[str, int]
    helpers: frozenset[int]  # processes of the run that are not in the plan, such as the fork server


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault under load.

    outage_s: the time for which the fault keeps clients waiting, beside the time that the fault itself measures with
    `SuiteUnderTest.outage`. errors: clients may get typed errors. breaks: the fault takes a gateway away, and with it
    the connections of its clients. bound_s: the longest time of the fault itself; beyond it the scenario fails.
    resets: roles are put right afterwards; otherwise the suite has to recover without help.
    """

    name: str
    does: str
    fault: Callable[[SuiteUnderTest], Awaitable[None]]
    bed: Testbed = EMULATED
    outage_s: float = 0.0
    errors: bool = False
    breaks: bool = False
    bound_s: float = 40.0
    resets: bool = False


# All scenarios by family, in the order of the report. The modules of `scenarios` fill them.
_ORDER = "processes, roles, links, frames, clients, bodies, connections, database, control plane, failover, losses"
FAMILIES: dict[str, list[Scenario]] = {
    name: [] for name in f"{_ORDER}, clocks, versions, strangers, KV, one request".split(", ")
}


def scenario(
    family: str, name: str, does: str, bed: Testbed = EMULATED, **costs: Any
) -> Callable[[Callable[[SuiteUnderTest], Awaitable[None]]], None]:
    """Add a fault to a family, also as a decorator. costs: `outage_s`, `errors`, `breaks`, `bound_s` of `Scenario`."""
    return lambda fault: FAMILIES[family].append(Scenario(name, does, fault, bed, **costs))


@dataclass(slots=True)
class Outcome:
    """The result of one run of a scenario."""

    scenario: Scenario
    tally: Tally = field(default_factory=Tally)
    outage_s: float = 0.0
    calm_gap_s: float = 0.0  # the longest wait without a fault, on this machine
    stalled_s: float = 0.0  # the longest time for which the machine kept the bench from running
    recovered_s: float | None = None  # None: not within the bound
    missing: list[str] = field(default_factory=list)  # what was not back within the bound
    left: list[str] = field(default_factory=list)  # what was left behind, without users
    died: list[str] = field(default_factory=list)  # processes that ended and were not the fault's targets
    broke: str = ""  # why the fault could not be carried out, or what it found
    took_s: float = 0.0
    notes: list[str] = field(default_factory=list)  # measurements of the fault

    @property
    def allowed_gap_s(self) -> float:
        """The longest wait between two signs of life that passes."""
        return max(self.outage_s, self.scenario.outage_s) + HANG_S + self.calm_gap_s + self.stalled_s

    @property
    def faults(self) -> list[str]:
        found = [f"{self.tally.count(v)} {v}" for v in (*HARM, *UNCLEAN) if self.tally.count(v)]
        if not self.scenario.errors and (count := self.tally.count(Verdict.ERROR)):
            found.append(f"{count} refused or failed")
        if not self.scenario.breaks:
            found += [f"{self.tally.count(v)} {v}" for v in BROKEN if self.tally.count(v)]
        if self.tally.longest_gap_s > self.allowed_gap_s:
            found.append(f"a wait of {self.tally.longest_gap_s:.1f} s, {self.allowed_gap_s:.1f} s allowed")
        if self.recovered_s is None:
            found.append(f"not back after {RECOVER_S:.0f} s: {'; '.join(self.missing)}")
        if self.left:
            found.append(f"left behind: {'; '.join(self.left)}")
        return [*([self.broke] if self.broke else []), *self.died, *found]

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def well(self) -> bool:
        """Whether the next scenario can use the suite."""
        return self.recovered_s is not None and not (self.broke or self.left)


@dataclass(frozen=True, slots=True)
class Calm:
    """The undisturbed suite, with which the suite after a fault is compared."""

    rate: float  # tokens per second
    gap_s: float
    footprint: Footprint


async def calm(suite: SuiteUnderTest, seed: int) -> Calm:
    """Load the suite for some seconds. Raises TimeoutError when it does not serve."""
    async with suite.users(seed) as load:
        await load.warm(WARM_S)
        began = time.monotonic()
        await asyncio.sleep(CALM_S)
        rate = load.rate(began, time.monotonic())
    await left_behind(suite, footprint(suite), time.time())
    return Calm(rate, load.tally.longest_gap_s, footprint(suite))


async def run_scenario(suite: SuiteUnderTest, scenario: Scenario, before: Calm, seed: int) -> Outcome:
    """Run a scenario on a suite that is well. Failures are in the outcome."""
    outcome = Outcome(scenario, calm_gap_s=before.gap_s)
    began, suite.outage_s, now = time.monotonic(), 0.0, footprint(suite)
    suite.notes = outcome.notes
    suite.processes.touched.clear()
    since_s = time.time()
    async with stall_watch() as stalled:
        async with suite.users(seed) as load:
            suite.load, outcome.tally = load, load.tally
            try:
                await load.warm(WARM_S)
            except TimeoutError:
                outcome.broke = f"before the fault, not every user was answered within {WARM_S:.0f} s"
            await asyncio.sleep(BEFORE_S)
            rate = load.rate(time.monotonic() - BEFORE_S, time.monotonic())
            await _fault(suite, scenario, outcome)
            resetting = [asyncio.create_task(suite.reset_roles())] if scenario.resets else []
            await _recover(suite, load, min(rate, before.rate), outcome)
            await asyncio.gather(*resetting, return_exceptions=True)
        outcome.left = await left_behind(suite, before.footprint, since_s)
    outcome.died = [
        f"{name} died by itself: {status.note or 'it was restarted'}"
        for name, status in suite.processes.statuses.items()
        if status.restarts > now.restarts[name] and name not in suite.processes.touched
    ]
    outcome.stalled_s, outcome.outage_s = stalled[0], suite.outage_s
    outcome.took_s = time.monotonic() - began
    return outcome


async def _fault(suite: SuiteUnderTest, scenario: Scenario, outcome: Outcome) -> None:
    try:
        async with asyncio.timeout(scenario.bound_s):
            await scenario.fault(suite)
    except TimeoutError:
        outcome.broke = f"the fault did not end within {scenario.bound_s:.0f} s"
    except Exception as error:  # a boundary: a scenario that breaks must not end the bench
        outcome.broke = f"{type(error).__name__}: {error}"
    finally:
        await suite.restore()


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


async def _recover(suite: SuiteUnderTest, load: Load, calm_rate: float, outcome: Outcome) -> None:
    """Wait until all processes serve and users get tokens at the former rate; RECOVER_S and a window at most."""
    since_s, whole_s = time.monotonic(), 0.0
    while time.monotonic() < since_s + RECOVER_S + _WINDOW_S:
        outcome.missing = await _missing(suite)
        now = time.monotonic()
        whole_s = 0.0 if outcome.missing else whole_s or now
        rate = load.rate(now - _WINDOW_S, now)
        enough = rate >= _RATE_SHARE * calm_rate and load.served_since(since_s)
        if whole_s and enough and now - _WINDOW_S >= since_s:
            outcome.recovered_s = max(whole_s, now - _WINDOW_S) - since_s
            return
        if whole_s and not enough:
            outcome.missing = [f"{rate:.0f} tokens/s of {calm_rate:.0f}"]
        await asyncio.sleep(_POLL_S)


async def _missing(suite: SuiteUnderTest) -> list[str]:
    """Processes and instances that do not run or serve as before."""
    missing = [
        f"{name} is {status.state.value}"
        for name, status in suite.processes.statuses.items()
        if status.state is not State.READY
    ]
    try:
        wrong = await suite.wrong_roles()
    except PolyphaseError as error:
        return [*missing, f"monitor: {error.message}"]
    return missing + [
        f"{name} is {entry.state} as {entry.role}" if entry else f"{name} is not registered"
        for name, entry in wrong.items()
    ]


async def left_behind(suite: SuiteUnderTest, before: Footprint, since_s: float) -> list[str]:
    """What is held without users after RECOVER_S at most; of jobs those that arrived after the Unix time `since_s`."""
    give_up = time.monotonic() + RECOVER_S
    while True:
        left = [*await _held(suite), *_grown(suite, before), *_orphans(suite, before), *await _unended(suite, since_s)]
        if not left or time.monotonic() > give_up:
            return left
        await asyncio.sleep(_POLL_S)


async def _held(suite: SuiteUnderTest) -> list[str]:
    """KV and jobs, without users."""
    held = []
    try:
        for name, entry in (await suite.instances()).items():
            if entry.state == InstanceState.DEAD.value:  # its last report
                continue
            load, total = entry.load, entry.info.total_blocks
            held += [
                f"{name}: {getattr(load, key)} {key}"
                for key in ("inflight", "staged_bytes", "waiting")
                if getattr(load, key)
            ]
            if load.free_blocks < total:
                held.append(f"{name}: {total - load.free_blocks} KV blocks")
    except PolyphaseError as error:
        held.append(error.message)
    return held


async def _unended(suite: SuiteUnderTest, since_s: float) -> list[str]:
    """Jobs that do not end, according to the status tables."""
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
    known = {status.pid for status in suite.processes.statuses.values()}
    return [(pid, name) for pid, name in of_run(suite.run) if not known & _with_ancestors(pid)]


def _with_ancestors(pid: int) -> set[int]:
    try:
        process = psutil.Process(pid)
        return {pid, *(parent.pid for parent in process.parents())}
    except psutil.Error:  # it has ended
        return set()


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

    task = asyncio.create_task(watch())
    try:
        yield longest_s
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
