"""Imports the engine once and forks the processes that need it: an import costs 10 s of CPU time, a fork almost none.

Run as `python -m services.launcher.fork_server DESCRIPTOR MODULE…`: the descriptor is one end of a socket pair, the
modules are imported first. The server writes {"ready"} once. Then it reads one request at a time, a JSON line {"name",
"module", "env", "log"}, and replies {"pid"} or {"failed"}. The new process runs its module when the launcher has
acknowledged the pid with an empty line; if the server ends first, the process ends, too.

A forked process is a child of the launcher, not of this server (it is forked twice, and the launcher adopts orphans):
it ends with the launcher and survives this server. Nothing here may start a thread, because a fork copies only the
thread that forks.
"""

import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from services.launcher.child import name_process, tie_to_parent

Request = dict[str, Any]


def main(arguments: list[str]) -> None:
    """Serve until the launcher ends; in a forked process, run the requested module."""
    channel, launcher = socket.socket(fileno=int(arguments[0])), os.getppid()
    faulthandler.register(signal.SIGUSR1)  # as every service does, see `shared.runtime.logs`
    for module in arguments[1:]:
        importlib.import_module(module)
    sys.stdout.flush()  # else each child would write what is in the buffers
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of the parent's objects
    with channel, channel.makefile("rb") as lines:
        request = _serve(channel, lines)
    if request is not None:
        _detach(request, launcher)
        sys.argv = [request["module"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket, lines: BinaryIO) -> Request | None:
    """Fork on request. Returns the request in a forked process, None in the server when the launcher has ended."""
    _send(channel, {"ready": True})
    while line := lines.readline():
        request: Request = json.loads(line)
        process, forked = socket.socketpair()
        with process, forked:
            if _fork(process, forked):
                return request
            forked.close()
            pid = process.recv(32)
            _send(channel, {"pid": int(pid)} if pid else {"failed": "out of memory, or too many processes"})
            if pid and lines.readline():
                with suppress(OSError):  # it has been killed
                    process.send(b"!")
    return None


def _fork(process: socket.socket, forked: socket.socket) -> bool:
    """Fork a process that is not our child. Returns True in that process once the launcher knows its pid.

    The process is forked by one that ends at once, so that the launcher adopts it. It sends its pid through `forked`;
    without one, the fork has failed.
    """
    server = os.getpid()
    try:
        between = os.fork()
        if between:
            os.waitpid(between, 0)  # from here on the process is the launcher's child
            return False
        if os.fork():
            os._exit(0)
    except OSError:
        if os.getpid() == server:
            return False
        os._exit(1)
    process.close()
    os.setpgid(0, 0)  # before the pid is known, since signals go to the group
    forked.send(str(os.getpid()).encode())
    if not forked.recv(1):
        os._exit(1)
    return True


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _detach(request: Request, launcher: int) -> None:
    """Make a forked process independent of the server's output and environment."""
    tie_to_parent(launcher)
    name_process(request["name"])
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in (output, nothing):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])


if __name__ == "__main__":
    main(sys.argv[1:])
