"""One child process: tied to the launcher's life, in a process group of its own, stopped with all its descendants."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.launcher import child
from services.launcher.health import Health

STOP_S = 8.0  # from SIGTERM to SIGKILL; services give their own clean-up 5 s
KILL_S = 5.0  # from SIGKILL to giving up on a process that even that does not end: one that hangs in the kernel
_REAP_S, _REAP_POLL_S = 2.0, 0.01


class Child:
    """A started process. Its pid is also the id of its process group."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self._ended = ended

    @classmethod
    def adopt(cls, pid: int) -> "Child":
        """A process that became our child when the one that forked it ended: see `child.adopt_orphans`."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        descriptor = os.pidfd_open(pid)

        def reap() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            ended.set_result(os.waitstatus_to_exitcode(status))

        loop.add_reader(descriptor, reap)
        return cls(pid, ended)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.done()

    @property
    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it."""
        try:
            return self.running and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    async def wait(self) -> int:
        """Its exit code, negative for a signal; whatever it left behind in its group is killed."""
        code = await asyncio.shield(self._ended)
        self.kill()
        await self._reap()
        return code

    def terminate(self) -> None:
        """Ask it, and all its descendants, to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all its descendants now."""
        self._signal(signal.SIGKILL)

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def _reap(self) -> None:
        """Its killed descendants are ours by now (see `child.adopt_orphans`): wait until they are gone."""
        for _ in range(round(_REAP_S / _REAP_POLL_S)):
            if not self._leaves_some():
                return
            await asyncio.sleep(_REAP_POLL_S)

    def _leaves_some(self) -> bool:
        try:
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True


async def spawn(program: Sequence[str], env: dict[str, str], log: Path | None, pass_fds: Sequence[int] = ()) -> Child:
    """Start a program with its output appended to `log`, or as ours. Call on the main thread only: see `child`."""
    wrapper = (sys.executable, "-S", "-E", str(Path(child.__file__)), str(os.getpid()))
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log is not None else None
    try:
        process = await asyncio.create_subprocess_exec(
            *wrapper,
            *program,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    finally:
        if output is not None:
            os.close(output)
    return Child(process.pid, asyncio.ensure_future(process.wait()))


async def stop_all(children: Iterable[Child], bound_s: float = STOP_S) -> list[int]:
    """SIGTERM to all, SIGKILL to what is left after `bound_s`. The pids that even that did not end in KILL_S."""
    children = [each for each in children if each.running]
    for each in children:
        each.terminate()
    waits = [asyncio.ensure_future(each.wait()) for each in children]
    if waits:
        await asyncio.wait(waits, timeout=bound_s)
    for each in children:
        each.kill()
    if waits:
        await asyncio.wait(waits, timeout=KILL_S)
    return [each.pid for each in children if each.running]


# MERGED watch.py
# A process from its start to its end: when it is ready, and that it ends when it hangs.
#
# What hangs (stopped, deadlocked, its event loop blocked) does not die by itself: it is put down, and whoever keeps it
# running starts another. The launcher does so for its processes, a container for its only one.


ASK_S = 2.0  # for one question while a process starts
DUMP_S = 1.0  # for the stacks of a process that hangs


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient the launcher is, in seconds."""

    start_s: float = 300.0  # the longest a process may take to become healthy
    poll_s: float = 0.1  # between two questions while it starts
    hang_s: float = 6.0  # so long without a good answer, once healthy, means that it hangs; 0: it is not asked again
    check_s: float = 1.0  # between two questions then
    backoff_s: float = 0.2  # before the first restart; doubles with each further one
    backoff_max_s: float = 10.0
    stable_s: float = 30.0  # ready for so long, and the next restart is again the first
    stop_s: float = STOP_S
    at_once: int = 3  # processes that start at the same time


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Unready:
    """Why a process did not become healthy. late: it took longer than it may; else it ended by itself."""

    text: str
    late: bool = False


async def until_healthy(child: Child, health: Health | None, limits: Limits) -> Unready | None:
    """Why it did not become healthy, if it did not; then it has ended."""
    if health is None:
        return None
    ended = asyncio.ensure_future(child.wait())
    since_s, stopped_s = time.monotonic(), 0.0
    try:
        while fault := await health.ask(ASK_S):
            if (await asyncio.wait([ended], timeout=limits.poll_s))[0]:
                return Unready(ending(ended.result()))
            stopped_s = time.monotonic() if not stopped_s or not child.stopped else stopped_s
            if limits.hang_s and time.monotonic() - stopped_s > limits.hang_s:
                text = f"stopped by a signal for {limits.hang_s:g} s while it started"
                return Unready(await _put_down(child, text), late=True)
            if time.monotonic() - since_s > limits.start_s:
                return Unready(await _put_down(child, f"not healthy after {limits.start_s:g} s ({fault})"), late=True)
    finally:
        ended.cancel()
    return None


async def until_ended(child: Child, health: Health | None, limits: Limits, say: Say) -> str:
    """How a process that was healthy ended: by itself, or by us because it hung. `say` writes into its log."""
    ended = asyncio.ensure_future(child.wait())
    hung = asyncio.ensure_future(_until_hung(health, limits))
    try:
        await asyncio.wait([ended, hung], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ending(ended.result())
        fault = f"hung: no good answer for {limits.hang_s:g} s ({hung.result()})"
        return await _put_down(child, fault + await _dump(child, fault, say))
    finally:
        ended.cancel()
        hung.cancel()


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"killed by signal {-code}" if code < 0 else f"ended with code {code}"


async def _until_hung(health: Health | None, limits: Limits) -> str:
    """What was wrong with the last answer, when there was no good one for `hang_s`.

    It takes two questions at least. Where one took much longer than it may, it was we who stood still (a suspended
    machine, a stopped launcher), and that does not count.
    """
    if health is None or not limits.hang_s:
        await asyncio.Event().wait()
    assert health is not None
    patience_s, silent_s = limits.hang_s / 2, 0.0
    pause_s = min(limits.check_s, patience_s)
    while True:
        began = time.monotonic()
        fault = await health.ask(patience_s)
        await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))
        took = time.monotonic() - began
        if not fault:
            silent_s = 0.0
        elif took < 2 * patience_s:
            silent_s += took
        if silent_s > 0.99 * limits.hang_s:  # timers are not exact
            return fault


async def _dump(child: Child, fault: str, say: Say) -> str:
    """Have the process write the stacks of its threads, as every service of ours does when asked by a signal."""
    if child.stopped:
        return ", stopped by a signal"
    say(f"polyphase: {fault}; the stacks of its threads follow, then it is killed")
    child.signal_leader(signal.SIGUSR1)
    with suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), DUMP_S)
    return ", its stacks are in its log"


async def _put_down(child: Child, fault: str) -> str:
    child.kill()
    await child.wait()
    return fault


# MERGED process_log.py
# What a process wrote last: its tail, and the cause of its end.


_TAIL_BYTES = 64 << 10
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = re.compile(r"^(Fatal Python error: .*|Killed|Segmentation fault.*|.*: error: .*)$")


def log_size(log: Path) -> int:
    """Bytes so far; 0 if there is none."""
    return log.stat().st_size if log.exists() else 0


def log_tail(log: Path, lines: int = 15, since: int = 0) -> str:
    """Its last lines, of what was written after `since` bytes."""
    return "\n".join(_read(log, since)[-lines:])


def cause_of(log: Path, since: int = 0) -> str:
    """Why the process that wrote it since then ended: its last exception, else its last error, else its last line."""
    lines = _read(log, since)
    for found in (_exception(lines), _error(lines)):
        if found:
            return found
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def last_error(log: Path) -> str:
    """What a running process complained of last, such as the monitor's reason to refuse it; empty if of nothing."""
    return _error(_read(log, 0))


def _read(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as data:
            data.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return data.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _exception(lines: list[str]) -> str:
    """The last line of the last traceback, which may stand in a JSON line."""
    found, inside = "", False
    for line in lines:
        entry = _entry(line)
        text = "\n".join(str(entry.get(key, "")) for key in ("event", "exception"))
        if _TRACEBACK in text:
            found = _last_of(text)
        elif line.strip().endswith(_TRACEBACK):
            inside = True
        elif _FATAL.match(line) or (inside and line and not line[0].isspace()):
            found, inside = line.strip(), False
    return found


def _error(lines: list[str]) -> str:
    for line in reversed(lines):
        entry = _entry(line)
        if entry.get("level") in ("error", "critical"):
            reason = entry.get("reason", entry.get("error", ""))
            return f"{entry.get('event', '')}: {reason}" if reason else str(entry.get("event", ""))
    return ""


def _last_of(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _entry(line: str) -> dict[str, object]:
    try:
        found = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
