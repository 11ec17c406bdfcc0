"""SIGTERM before a process has a handler of its own. Only the standard library is used: this runs before imports."""

import os
import signal
from types import FrameType


def end_at_sigterm() -> None:
    """Make SIGTERM end this process from now on.

    The kernel ignores a signal without a handler for the first process of a container, which would then import and
    start for seconds to minutes before it ends.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # so that the parent sees which signal it was
    os._exit(128 + number)  # the first process of a container is still here
