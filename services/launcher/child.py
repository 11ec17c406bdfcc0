"""Becomes the process that it is told to start, after tying its life to the launcher's.

Run as a file: `python child.py PARENT_PID PROGRAM ARGUMENT…`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(arguments: list[str]) -> None:
    """Tie and exec."""
    parent, program = int(arguments[0]), arguments[1:]
    tie_to_parent(parent)
    os.execv(program[0], program)


def tie_to_parent(parent: int) -> None:
    """When `parent` dies, however it dies, the kernel kills this process. That survives exec.

    It follows the *thread* that forked: a parent forks on its main thread only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def name_process(name: str) -> None:
    """What `top` shows; 15 characters at most."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
