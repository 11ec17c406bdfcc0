"""The process of one search: `python -m services.planner.search_work`. `search_process` says what it reads and writes.

SIGINT ends the search, and the best so far is its result. When standard input ends, the planner is gone, and the
process ends.
"""

import os
import signal
import sys
import threading
import traceback
from time import monotonic

import msgspec

from services.planner.search_process import Answer, Failed, Message, Order, Progress
from shared.errors import PolyphaseError

_NICE = 10  # processes that serve go first
_PAUSE_S = 0.2  # between two lines of progress without a better plan


def main() -> None:
    """Read the order, search, and write how the search ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent that ignores SIGINT passes that on
    os.nice(_NICE)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the parent is gone already
        return
    order = msgspec.json.decode(line, type=Order)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    ended = _search(order)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the last line must be whole
    _write(ended)


def _die_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns at the end of the stream only
    os._exit(1)


def _search(order: Order) -> Answer | Failed:
    try:
        from services.planner.search_answer import answer  # takes a second, in which SIGINT may come
        from shared.plan.search import Stopped
    except KeyboardInterrupt:
        return Failed("stopped before it had begun", stopped=True)
    try:
        return answer(order.request, order.seconds, _Reporter().report)
    except (Stopped, KeyboardInterrupt) as error:
        return Failed(str(error) or "stopped before it had a plan", stopped=True)
    except PolyphaseError as error:
        return Failed(error.message)
    except Exception as error:  # the boundary of the process: the log has the traceback
        traceback.print_exc()
        return Failed(f"the planner itself failed: {type(error).__name__}: {error}"[:500])


class _Reporter:
    """Writes the search's progress, at most every `_PAUSE_S` unless there is a better plan."""

    def __init__(self) -> None:
        self._best: float | None = None
        self._written_mono = 0.0

    def report(self, what: str, found: tuple[object, float] | None) -> None:
        """For `Search.report`."""
        better = found is not None and found[1] > (self._best or 0.0)
        if found is not None and better:
            self._best = found[1]
        if better or monotonic() - self._written_mono >= _PAUSE_S:
            self._written_mono = monotonic()
            _write(Progress(what, self._best))


def _write(message: Message) -> None:
    """In one system call, so that a short line is written whole or not at all."""
    line = memoryview(msgspec.json.encode(message) + b"\n")
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]


if __name__ == "__main__":
    main()
