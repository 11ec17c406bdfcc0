"""Ties its life to the launcher's and then becomes the program that it is to start.

Run as a file: `python child.py PARENT_PID PROGRAM ARGUMENT…`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def main(arguments: list[str]) -> None:
    parent, program = int(arguments[0]), arguments[1:]
    tie_to_parent(parent)
    os.execv(program[0], program)


def tie_to_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, even after an exec.

    The kernel watches the *thread* that forked: a parent must fork on its main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:  # it died before the call above
        os._exit(1)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `top` shows, at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
