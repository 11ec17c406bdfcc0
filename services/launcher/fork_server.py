"""Imports the engine once and forks the processes that need it: an import costs 10 s of CPU time, a fork almost none.

Run as `python -m services.launcher.fork_server DESCRIPTOR MODULE…`: the descriptor is one end of a socket pair, the
modules are imported first. Requests are JSON lines: {"name", "module", "env", "log"} for a process, {} for a health
check. The server writes {"ready"} once, then one reply for each request in order: {"pid"}, {"failed"} or {"alive"}.

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
from typing import Any

from services.launcher.child import name_process, tie_to_parent

Request = dict[str, Any]


def main(arguments: list[str]) -> None:
    """Serve until the launcher ends; in a forked process, run the requested module."""
    channel, launcher = socket.socket(fileno=int(arguments[0])), os.getppid()
    faulthandler.register(signal.SIGUSR1)  # as every service does, see `shared.runtime.logs`
    for module in arguments[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of the parent's objects
    request = _serve(channel, launcher)
    if request is not None:
        sys.argv = [request["module"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket, launcher: int) -> Request | None:
    """Fork on request. Returns the request in the forked process, None in the server when the launcher has ended."""
    _send(channel, {"ready": True})
    received = b""
    while data := channel.recv(1 << 16):
        *lines, received = (received + data).split(b"\n")
        for line in lines:
            request: Request = json.loads(line)
            if "module" not in request:
                _send(channel, {"alive": True})
            elif _fork(channel, request, launcher):
                return request
    return None


def _fork(channel: socket.socket, request: Request, launcher: int) -> bool:
    """Fork; True in the new process, which first waits until the launcher knows its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    known_read, known_write = os.pipe()
    pid = _fork_away()
    if not pid:
        os.close(known_write)
        if not os.read(known_read, 1):
            os._exit(1)  # the server ended before it sent the pid
        os.close(known_read)
        _detach(request, launcher, channel)
        return True
    _send(channel, {"pid": pid} if pid > 0 else {"failed": "out of memory, or too many processes"})
    if pid > 0:
        os.write(known_write, b"!")
    os.close(known_read)
    os.close(known_write)
    return False


def _fork_away() -> int:
    """The pid of a new process that is not our child; 0 in that process, -1 if the fork failed."""
    server, (pid_read, pid_write) = os.getpid(), os.pipe()
    try:
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                os.close(pid_read)
                os.close(pid_write)
                return 0
            os.setpgid(pid, pid)  # before anyone knows the pid, since signals go to the group
            os.write(pid_write, str(pid).encode())
            os._exit(0)
    except OSError:
        if os.getpid() != server:
            os._exit(1)
        between = 0
    os.close(pid_write)
    if between:
        os.waitpid(between, 0)  # from here on the process is the launcher's child
    reported = os.read(pid_read, 32)
    os.close(pid_read)
    return int(reported) if reported else -1


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _detach(request: Request, launcher: int, channel: socket.socket) -> None:
    """Make a forked process independent of the server's descriptors, output and environment."""
    tie_to_parent(launcher)
    name_process(request["name"])
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in (output, nothing):
        os.close(descriptor)
    channel.close()
    os.environ.clear()
    os.environ.update(request["env"])


if __name__ == "__main__":
    main(sys.argv[1:])
