"""One child process: started with its life tied to the launcher's, observed until it is healthy and until it ends or
hangs, and stopped with all its descendants.

A process that hangs (stopped, deadlocked, its event loop blocked) does not die: it is killed, so that the launcher or
the orchestrator of its container can restart it. The entry of a container uses this module, which imports no settings.
"""

import asyncio
import os
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
KILL_S = 5.0  # from SIGKILL to giving up on a process that hangs in the kernel
_REAP_S, _REAP_POLL_S = 2.0, 0.01
CHECK_S = 2.0  # for one health check while a process starts
DUMP_S = 1.0  # for the stacks of a process that hangs
WriteLine = Callable[[str], None]


class Child:
    """A started process. Its pid is also the id of its process group."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self._ended = ended

    @classmethod
    def adopt(cls, pid: int) -> "Child":
        """A process that became our child when its parent ended: see `child.adopt_orphans`."""
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
        return not self._ended.done()

    @property
    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it."""
        try:
            return self.running and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    async def wait(self) -> int:
        """Its exit code, negative for a signal; other processes of its group are killed."""
        code = await asyncio.shield(self._ended)
        self.kill()
        await self._reap()
        return code

    def terminate(self) -> None:
        """Send SIGTERM to it and its descendants."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it and its descendants."""
        self._signal(signal.SIGKILL)

    def signal_leader(self, number: signal.Signals) -> None:
        """Send a signal to this process only."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def _reap(self) -> None:
        """Wait for its killed descendants, which are our children by now: see `child.adopt_orphans`."""
        for _ in range(round(_REAP_S / _REAP_POLL_S)):
            if not self._has_descendants():
                return
            await asyncio.sleep(_REAP_POLL_S)

    def _has_descendants(self) -> bool:
        try:
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True


async def spawn(program: Sequence[str], env: dict[str, str], log: Path | None, pass_fds: Sequence[int] = ()) -> Child:
    """Start a program whose output is appended to `log`, or goes where ours does (None).

    Call on the main thread only: see `child`.
    """
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
    """SIGTERM to all, SIGKILL after `bound_s`. Returns the pids of processes that still run KILL_S later."""
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


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of processes in seconds."""

    start_s: float = 300.0  # the longest a process may take to become healthy
    poll_s: float = 0.1  # between two health checks while it starts
    hang_s: float = 6.0  # a healthy process hangs after so long without a good answer; 0: no further health checks
    check_s: float = 2.0  # between two health checks of a running process
    backoff_s: float = 0.2  # before the first restart; doubles with each further one
    backoff_max_s: float = 10.0
    stable_s: float = 30.0  # ready for so long, the next restart counts as the first one
    stop_s: float = STOP_S
    at_once: int = 3  # processes that start at the same time


@dataclass(frozen=True, slots=True)
class Unready:
    """Why a process did not become healthy. late: it exceeded the time limit; else it ended by itself."""

    text: str
    late: bool = False


async def until_healthy(
    child: Child, health: Health | None, limits: Limits, went_on: Callable[[], bool] = lambda: False
) -> Unready | None:
    """Wait until a process is healthy. Returns None, or why it did not become healthy; it has ended then.

    went_on: whether a download of the process has gone on since the last call; the start limit then counts anew.
    """
    if health is None:
        return None
    ended = asyncio.ensure_future(child.wait())
    started_mono = running_mono = time.monotonic()  # running_mono: the last time when no signal had stopped it
    try:
        while fault := await health.check(CHECK_S):
            if (await asyncio.wait([ended], timeout=limits.poll_s))[0]:
                return Unready(ending(ended.result()))
            now_mono = time.monotonic()
            if went_on():
                started_mono = now_mono
            if not child.stopped:
                running_mono = now_mono
            if limits.hang_s and now_mono - running_mono > limits.hang_s:
                text = f"stopped by a signal for {limits.hang_s:g} s while it started"
                return Unready(await _kill(child, text), late=True)
            if now_mono - started_mono > limits.start_s:
                return Unready(await _kill(child, f"not healthy after {limits.start_s:g} s ({fault})"), late=True)
    finally:
        ended.cancel()
    return None


async def until_ended(child: Child, health: Health | None, limits: Limits, write_line: WriteLine) -> str:
    """How a healthy process ended: by itself, or killed because it hung. `write_line` writes into its log."""
    ended = asyncio.ensure_future(child.wait())
    hung = asyncio.ensure_future(_until_hung(health, limits))
    try:
        await asyncio.wait([ended, hung], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ending(ended.result())
        fault = f"hung: no good answer for {limits.hang_s:g} s ({hung.result()})"
        return await _kill(child, fault + await _dump(child, fault, write_line))
    finally:
        ended.cancel()
        hung.cancel()


def ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"ended with code {code}"


async def _until_hung(health: Health | None, limits: Limits) -> str:
    """The fault of the last health check, once there was no good answer for `hang_s`.

    That takes at least two checks. A check that took much longer than its time limit does not count: then the launcher
    itself was stopped, or the machine suspended.
    """
    if health is None or not limits.hang_s:
        await asyncio.Event().wait()
    assert health is not None
    patience_s, silent_s = limits.hang_s / 2, 0.0
    pause_s = min(limits.check_s, patience_s)
    while True:
        began = time.monotonic()
        fault = await health.check(patience_s)
        await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))
        took = time.monotonic() - began
        if not fault:
            silent_s = 0.0
        elif took < 2 * patience_s:
            silent_s += took
        if silent_s > 0.99 * limits.hang_s:  # timers are not exact
            return fault


async def _dump(child: Child, fault: str, write_line: WriteLine) -> str:
    """Have the process write the stacks of its threads, as our services do on SIGUSR1."""
    if child.stopped:
        return ", stopped by a signal"
    write_line(f"polyphase: {fault}; the process writes the stacks of its threads and is then killed")
    child.signal_leader(signal.SIGUSR1)
    with suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), DUMP_S)
    return ", its stacks are in its log"


async def _kill(child: Child, fault: str) -> str:
    child.kill()
    await child.wait()
    return fault
