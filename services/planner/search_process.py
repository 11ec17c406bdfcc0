"""One search in a process of its own: whatever becomes of it, the planner goes on."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

# MERGED search_messages.py
# What a search's process says: one JSON object a line on its standard output, the last of them how it ended.


MOST_LINE_BYTES = 8 << 20


class Order(msgspec.Struct, frozen=True):
    """The one line that the process reads. request: JSON of `edge.SearchIn`. seconds: the longest it may take."""

    request: str
    seconds: float


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """What goes on. best_goodput: requests a second; None until there is a plan."""

    what: str
    best_goodput: float | None = None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """It ended with a plan. result: see `search_answer.answer`. stopped: by SIGINT, so it is the best so far."""

    result: dict[str, Any]
    stopped: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It ended without one. stopped: by SIGINT."""

    error: str
    stopped: bool = False


Message = Progress | Answer | Failed
decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)

COMMAND = (sys.executable, "-m", "services.planner.search_work")
GRACE_S = 8.0  # from SIGINT to SIGKILL: the best so far is run once more, for what it promises
_END_S = 5.0  # from SIGKILL to giving up on a process that even that does not end: one that hangs in the kernel
_SHOWN = 80  # characters of what nobody understands
# A search has one core; libraries would take them all.
_ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class SearchProcess:
    """Runs one search. seconds: after which it is stopped. tell: hears of its progress.

    The process is in a session of its own, so that what a terminal or the launcher sends to ours does not reach it; it
    ends with us, since its standard input does.
    """

    def __init__(self, request: str, seconds: float, tell: Callable[[Progress], None]) -> None:
        self._order = Order(request, seconds)
        self._tell = tell
        self._process: Process | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._overdue = False
        self.stopping = False

    async def run(self, command: Sequence[str] = COMMAND) -> Answer | Failed:
        """How it ended; a process that dies or talks rubbish is a failure that says so. Takes at most the seconds and
        the grace. Cancelled, it kills the process.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                limit=MOST_LINE_BYTES,
                start_new_session=True,
                env={**os.environ, **_ONE_CORE},
            )
        except OSError as error:
            return Failed(f"its process cannot be started: {error.strerror}")
        try:
            self._after(self._order.seconds, self._time_is_up)
            if self.stopping:
                self._interrupt()
            return await self._listened(self._process)
        finally:
            for timer in self._timers:
                timer.cancel()
            await _ended(self._process)

    def stop(self) -> None:
        """Have it end soon, with the best so far."""
        if not self.stopping:
            self.stopping = True
            self._interrupt()

    def _time_is_up(self) -> None:
        self._overdue = not self.stopping
        self.stop()

    def _interrupt(self) -> None:
        if self._process is not None:
            _signal(self._process, signal.SIGINT)
            self._after(GRACE_S, self._kill)

    def _kill(self) -> None:
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, act))

    async def _listened(self, process: Process) -> Answer | Failed:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, and reading says so
            stdin.write(msgspec.json.encode(self._order) + b"\n")
            await stdin.drain()
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                return Failed(f"its process says more than {MOST_LINE_BYTES} bytes in one line")
            message = _understood(line) if line else _died(await process.wait(), self.stopping)
            if not isinstance(message, Progress):
                return self._judged(message)
            self._tell(message)

    def _judged(self, ended: Answer | Failed) -> Answer | Failed:
        """A search that our limit ended without a plan has failed for that reason."""
        if self._overdue and isinstance(ended, Failed) and ended.stopped:
            return Failed(f"it had no plan after the {self._order.seconds:g} s that a search may take")
        return ended


def _died(code: int, stopping: bool) -> Failed:
    if stopping:
        return Failed("stopped before it had a plan", stopped=True)
    if code < 0:
        return Failed(f"its process was killed ({_name(-code)}): by the system, if memory was short, or by hand")
    return Failed(f"its process ended with code {code} and no result: the planner's log says why")


def _understood(line: bytes) -> Message:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = line[:_SHOWN].decode(errors="replace").strip()
        return Failed(f"its process said what nobody understands: {shown!r}")


async def _ended(process: Process) -> None:
    """Kill what is left, and wait for it, not for ever."""
    _signal(process, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
