"""One child process: in its own session, tied to the launcher's life, stopped with all its descendants."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from services.launcher import child

STOP_S = 8.0  # from SIGTERM to SIGKILL; services give their own clean-up 5 s
_TAIL_BYTES = 64 << 10


class Child:
    """A started process. Its pid is also the id of its process group."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self._ended = ended

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.done()

    async def wait(self) -> int:
        """Its exit code, negative for a signal; whatever it left behind in its group is killed."""
        code = await asyncio.shield(self._ended)
        self._signal(signal.SIGKILL)
        return code

    def terminate(self) -> None:
        """Ask it, and all its descendants, to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all its descendants now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


async def spawn(program: Sequence[str], env: dict[str, str], log: Path, pass_fds: Sequence[int] = ()) -> Child:
    """Start a program with its output appended to `log`. Call on the main thread only: see `child`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    wrapper = (sys.executable, "-S", "-E", str(Path(child.__file__)), str(os.getpid()))
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *wrapper, *program, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip
    return Child(process.pid, asyncio.ensure_future(process.wait()))


async def stop_all(children: Iterable[Child], bound_s: float = STOP_S) -> None:
    """SIGTERM to all, and SIGKILL to what is left after `bound_s`. Returns when every one has ended."""
    children = [each for each in children if each.running]
    for each in children:
        each.terminate()
    waits = [asyncio.ensure_future(each.wait()) for each in children]
    if waits:
        await asyncio.wait(waits, timeout=bound_s)
    for each in children:
        each.kill()
    await asyncio.gather(*waits)


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as data:
            data.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = data.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
