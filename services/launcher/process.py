"""One child process: tied to the launcher's life, in a process group of its own, stopped with all its descendants."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from services.launcher import child

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
