"""Becomes the process that it is told to start, after tying its life to the launcher's.

Run as a file: `python child.py PARENT_PID PROGRAM ARGUMENT…`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def main(arguments: list[str]) -> None:
    """Tie and exec."""
    parent, program = int(arguments[0]), arguments[1:]
    tie_to_parent(parent)
    os.execv(program[0], program)


def tie_to_parent(parent: int) -> None:
    """When `parent` dies, however it dies, the kernel kills this process. That survives exec.

    It follows the *thread* that forked: a parent forks on its main thread only.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:  # it died before we asked
        os._exit(1)


def adopt_orphans() -> None:
    """A descendant whose parent ends becomes a child of this process, not of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """What `top` shows; 15 characters at most."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
