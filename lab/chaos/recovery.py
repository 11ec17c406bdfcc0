"""Whether a suite is as it was before: who runs, who serves, at which rate, and what was left behind."""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lab.chaos.arena import RUN, Arena
from lab.chaos.load import Load
from services.launcher.keeper import State
from shared.domain.instance import InstanceState
from shared.domain.job import Phase
from shared.errors import PolyphaseError

RECOVER_S = 10.0
_POLL_S = 0.1
_RATE_SHARE = 0.6  # of the calm rate, over _WINDOW_S: with few users chance alone moves it by a fifth or so
_WINDOW_S = 1.0
_FILES = 12  # kept-alive HTTP connections come and go


@dataclass(frozen=True, slots=True)
class Footprint:
    """What each process of the plan holds, and how often it was started again."""

    restarts: dict[str, int]
    memory_bytes: dict[str, int]
    files: dict[str, int]
    helpers: frozenset[int]  # processes of the run that are not of the plan, such as the fork server


@dataclass(slots=True)
class Recovery:
    """How it went. Empty lists: everything is as it was."""

    recovered_s: float | None = None  # None: not within the bound
    missing: list[str] = field(default_factory=list)  # what was not back at the end
    left: list[str] = field(default_factory=list)  # what was left behind
    ghosts: list[str] = field(default_factory=list)  # jobs that are over, and are under way in a status table


def footprint(arena: Arena) -> Footprint:
    """Now."""
    memory: dict[str, int] = {}
    files: Counter[str] = Counter()
    monitors = arena.named("monitor")  # together: the one that acts has more, and that may be another one
    restarts = {name: status.restarts for name, status in arena.processes.statuses.items()}
    for name, status in arena.processes.statuses.items():
        with suppress(psutil.Error):
            process = psutil.Process(status.pid)
            memory[name] = process.memory_info().rss
            files["monitor" if name in monitors else name] += process.num_fds()
    return Footprint(restarts, memory, files, frozenset(pid for pid, _ in _unknown(arena)))


async def recovered(arena: Arena, load: Load, calm_rate: float, since_s: float) -> Recovery:
    """Wait until everybody serves again, and users get tokens at the former rate; RECOVER_S and a window at most."""
    found, missing, whole_s = Recovery(), ["nothing was looked at"], 0.0
    while time.monotonic() < since_s + RECOVER_S + _WINDOW_S:
        missing = await _away(arena)
        now = time.monotonic()
        whole_s = 0.0 if missing else whole_s or now
        enough = load.rate(now - _WINDOW_S, now) >= _RATE_SHARE * calm_rate and load.served_since(since_s)
        if whole_s and enough and now - _WINDOW_S >= since_s:
            found.recovered_s = max(whole_s, now - _WINDOW_S) - since_s
            return found
        if not missing and not enough:
            missing = [f"{load.rate(now - _WINDOW_S, now):.0f} tokens/s of {calm_rate:.0f}"]
        await asyncio.sleep(_POLL_S)
    found.missing = missing
    return found


async def _away(arena: Arena) -> list[str]:
    """Who does not run or serve as at first."""
    away = [
        f"{name} is {status.state.value}"
        for name, status in arena.processes.statuses.items()
        if status.state is not State.READY
    ]
    try:
        found = await arena.suite.instances()
    except PolyphaseError as error:
        return [*away, f"monitor: {error.message}"]
    for name, role in arena.roles.first.items():
        entry = found.get(name)
        if entry is None:
            away.append(f"{name} is not registered")
        elif entry["state"] != InstanceState.READY.value or entry["role"] != role.value:
            away.append(f"{name} is {entry['state']} as {entry['role']}")
    return away


def died(arena: Arena, before: Footprint) -> list[str]:
    """Processes that ended though nobody did anything to them."""
    return [
        f"{name} died by itself: {status.note or 'it was started again'}"
        for name, status in arena.processes.statuses.items()
        if status.restarts > before.restarts[name] and name not in arena.processes.touched
    ]


async def look_behind(arena: Arena, before: Footprint, recovery: Recovery, since_s: float) -> None:
    """With no user there: wait up to RECOVER_S until nothing is held any more, and note what still is.

    Of the status tables only jobs that arrived after the unix time `since_s` count.
    """
    give_up = time.monotonic() + RECOVER_S
    while time.monotonic() < give_up:
        recovery.left = [*await _held(arena), *_grown(arena, before), *_orphans(arena, before)]
        recovery.ghosts = await _ghosts(arena, since_s)
        if not recovery.left and not recovery.ghosts:
            return
        await asyncio.sleep(_POLL_S)


async def _held(arena: Arena) -> list[str]:
    """KV and jobs that nobody needs."""
    held = []
    try:
        for name, entry in (await arena.suite.instances()).items():
            if entry["state"] == InstanceState.DEAD.value:  # what it last said of itself
                continue
            load, total = entry["load"], entry["info"]["total_blocks"]
            held += [f"{name}: {load[key]} {key}" for key in ("inflight", "staged_bytes", "waiting") if load[key]]
            if load["free_blocks"] < total:
                held.append(f"{name}: {total - load['free_blocks']} KV blocks")
    except PolyphaseError as error:
        held.append(error.message)
    return held


async def _ghosts(arena: Arena, since_s: float) -> list[str]:
    ghosts = []
    for scheduler in arena.suite.schedulers():
        async with scheduler:
            try:
                rows = await scheduler.requests(limit=5_000)
            except PolyphaseError as error:
                ghosts.append(error.message)
                continue
        late = [row for row in rows if row["arrived_s"] >= since_s and not Phase(row["phase"]).final]
        if late:
            ghosts.append(f"{len(late)} jobs under way for ever at {scheduler.base_url}")
    return ghosts


def _grown(arena: Arena, before: Footprint) -> list[str]:
    now, grown = footprint(arena), []
    for name, size in now.memory_bytes.items():
        if size > before.memory_bytes.get(name, size) + arena.bed.memory_bytes:
            grown.append(f"{name}: {(size - before.memory_bytes[name]) >> 20} MiB more memory")
    for name, count in now.files.items():
        if count > before.files.get(name, count) + _FILES:
            grown.append(f"{name}: {count - before.files[name]} more open files")
    return grown


def _orphans(arena: Arena, before: Footprint) -> list[str]:
    return [f"orphan {pid} ({name})" for pid, name in _unknown(arena) if pid not in before.helpers]


def _unknown(arena: Arena) -> list[tuple[int, str]]:
    """Processes of this run that the launcher does not list, nor anybody whom it lists has started."""
    known = {status.pid for status in arena.processes.statuses.values()}
    return [(pid, name) for pid, name in of_run(arena.run) if not known & _line(pid)]


def _line(pid: int) -> set[int]:
    """A process and its ancestors."""
    try:
        process = psutil.Process(pid)
        return {pid, *(parent.pid for parent in process.parents())}
    except psutil.Error:  # it ended meanwhile
        return set()


def of_run(run: str) -> list[tuple[int, str]]:
    """Every living process, wherever it hangs, that was started for that run: its pid and name."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            mine = f"{RUN}={run}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, process.name()))
    return found
