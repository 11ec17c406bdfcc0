"""Becomes the process that it is told to start, after tying its life to the launcher's.

Run as a file: `python child.py PARENT_PID PROGRAM ARGUMENT…`. When the launcher dies, however it dies, the
kernel kills this process. That survives exec. It follows the *thread* that forked: the launcher forks on its
main thread only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie and exec."""
    parent, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
