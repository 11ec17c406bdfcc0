"""The process of one search: `python -m services.planner.search_work`. See `search_messages` for what goes in and out.

SIGINT ends the search, and the best so far is its result. When standard input ends, so does the process: its parent is
gone.
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

_NICE = 10  # who serves goes first
_PAUSE_S = 0.2  # between two lines that tell nothing better


def main() -> None:
    """Read the order, search, say how it ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent that ignores it hands that on
    os.nice(_NICE)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the parent is gone already
        return
    order = msgspec.json.decode(line, type=Order)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    ended = _searched(order)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # half a line says nothing
    _say(ended)


def _die_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing comes but the end
    os._exit(1)


def _searched(order: Order) -> Answer | Failed:
    try:
        from services.planner.search_answer import answer  # takes a second, in which SIGINT may come
        from shared.plan.search import Stopped
    except KeyboardInterrupt:
        return Failed("stopped before it had begun", stopped=True)
    try:
        return answer(order.request, order.seconds, _Teller().tell)
    except (Stopped, KeyboardInterrupt) as error:
        return Failed(str(error) or "stopped before it had a plan", stopped=True)
    except PolyphaseError as error:
        return Failed(error.message)
    except Exception as error:  # the process's boundary: whoever asked hears of it, and the log has the rest
        traceback.print_exc()
        return Failed(f"the planner itself failed: {type(error).__name__}: {error}"[:500])


class _Teller:
    """Says what goes on, not too often."""

    def __init__(self) -> None:
        self._best: float | None = None
        self._told_s = 0.0

    def tell(self, what: str, found: tuple[object, float] | None) -> None:
        """For `Search.tell`."""
        better = found is not None and found[1] > (self._best or 0.0)
        if found is not None and better:
            self._best = found[1]
        if better or monotonic() - self._told_s >= _PAUSE_S:
            self._told_s = monotonic()
            _say(Progress(what, self._best))


def _say(message: Message) -> None:
    """In one write, so that a short line is never half of one."""
    line = memoryview(msgspec.json.encode(message) + b"\n")
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]


if __name__ == "__main__":
    main()
