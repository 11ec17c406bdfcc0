"""One search in a process of its own, so that nothing it does can harm the planner.

The process (`search_work`) reads one line, an Order, and writes one JSON object a line: Progress, and at its end an
Answer or Failed.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from shared.wire.api.planner import SearchResult

MAX_LINE_BYTES = 8 << 20
COMMAND = (sys.executable, "-m", "services.planner.search_work")
GRACE_S = 8.0  # from SIGINT to SIGKILL: the best plan so far is simulated once more, for what it promises
_END_S = 5.0  # from SIGKILL until a process that hangs in the kernel is abandoned
_SHOWN = 80  # characters of a line that is not understood
# A search has one core; numerical libraries would take all of them.
_ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Order(msgspec.Struct, frozen=True):
    """request: JSON of `edge.SearchIn`. seconds: the longest that the search may take."""

    request: str
    seconds: float


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """best_goodput: requests a second; None until there is a plan."""

    what: str
    best_goodput: float | None = None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The search ended with a plan. result: see `search_answer.result`. stopped: by SIGINT, with the best so far."""

    result: SearchResult
    stopped: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The search ended without a plan. stopped: by SIGINT."""

    error: str
    stopped: bool = False


Message = Progress | Answer | Failed
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class SearchProcess:
    """Runs one search, and stops it after `seconds`.

    The process is in a session of its own, so that signals of a terminal or the launcher do not reach it. It ends with
    the planner, because its standard input does.
    """

    def __init__(self, request: str, seconds: float, on_progress: Callable[[Progress], None]) -> None:
        self._order = Order(request, seconds)
        self._on_progress = on_progress
        self._process: Process | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._overdue = False
        self.stopping = False

    async def run(self, command: Sequence[str] = COMMAND) -> Answer | Failed:
        """How the search ended; a process that dies or writes anything else has failed. Takes at most `seconds` and
        GRACE_S. When it is cancelled it kills the process.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
                env={**os.environ, **_ONE_CORE},
            )
        except OSError as error:
            return Failed(f"its process cannot be started: {error.strerror}")
        try:
            self._after(self._order.seconds, self._time_is_up)
            if self.stopping:
                self._interrupt()
            ended = await self._read_until_end(self._process)
        finally:
            for timer in self._timers:
                timer.cancel()
            await _reap(self._process)
        if self._overdue and isinstance(ended, Failed) and ended.stopped:
            return Failed(f"it had no plan after the {self._order.seconds:g} s that a search may take")
        return ended

    def stop(self) -> None:
        """Have the search end soon, with the best so far."""
        if not self.stopping:
            self.stopping = True
            self._interrupt()

    def _time_is_up(self) -> None:
        self._overdue = not self.stopping
        self.stop()

    def _interrupt(self) -> None:
        if self._process is not None:
            _signal(self._process, signal.SIGINT)
            self._after(GRACE_S, partial(_signal, self._process, signal.SIGKILL))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, act))

    async def _read_until_end(self, process: Process) -> Answer | Failed:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # the process is dead, and reading shows it
            stdin.write(msgspec.json.encode(self._order) + b"\n")
            await stdin.drain()
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                return Failed(f"its process wrote more than {MAX_LINE_BYTES} bytes in one line")
            message = _parse(line) if line else _failure_of_exit(await process.wait(), self.stopping)
            if not isinstance(message, Progress):
                return message
            self._on_progress(message)


def _failure_of_exit(code: int, stopping: bool) -> Failed:
    if stopping:
        return Failed("stopped before it had a plan", stopped=True)
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Failed(f"its process was killed ({name}): by the system, if memory was short, or by hand")
    return Failed(f"its process ended with code {code} and no result: see the planner's log")


def _parse(line: bytes) -> Message:
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = line[:_SHOWN].decode(errors="replace").strip()
        return Failed(f"its process wrote a line that is not understood: {shown!r}")


async def _reap(process: Process) -> None:
    """Kill the process if it still runs, and wait up to _END_S for its end."""
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
