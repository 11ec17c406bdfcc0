"""SIGTERM before a process has a handler of its own. Only the standard library is used: this runs before imports."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def end_at_sigterm() -> None:
    """Make SIGTERM end this process from now on.

    The kernel ignores a signal without a handler for the first process of a container, which would then import and
    start for seconds to minutes before it ends.
    """
    signal.signal(signal.SIGTERM, _end)


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process within the block, which leaves nothing to clean up. On the main thread only."""
    before = signal.getsignal(signal.SIGTERM)
    end_at_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # so that the parent sees which signal it was
    os._exit(128 + number)  # the first process of a container is still here
