"""Imports the engine once and forks processes that need it: an import costs 10 s of CPU, a fork nothing to speak of.

Run as `python -m services.launcher.fork_server DESCRIPTOR MODULE…`: the descriptor is one end of a socket pair, the
modules are imported first. JSON lines in: {"name", "module", "env", "log"} asks for a process, {} whether we live.
Lines out: {"ready"} once, then one for each question in turn: {"pid"}, {"failed"} or {"alive"}.

What it forks is the launcher's child, not its own (it is forked twice, and the launcher adopts orphans): it ends with
the launcher, and lives on when this server dies or hangs. Nothing here may start a thread: only the forking one would
live on in a child.
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
    """Serve until the launcher is gone; in a forked process, become what was asked for."""
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
    """Fork on request. Returns the request in the process that it is for, None in the server at the end."""
    _say(channel, {"ready": True})
    received = b""
    while data := channel.recv(1 << 16):
        *lines, received = (received + data).split(b"\n")
        for line in lines:
            request: Request = json.loads(line)
            if "module" not in request:
                _say(channel, {"alive": True})
            elif _fork(channel, request, launcher):
                return request
    return None


def _fork(channel: socket.socket, request: Request, launcher: int) -> bool:
    """Whether this is the new process, which waits until the launcher has been told of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    told_read, told_write = os.pipe()
    pid = _fork_away()
    if not pid:
        os.close(told_write)
        if not os.read(told_read, 1):
            os._exit(1)  # the server ended before it could tell
        os.close(told_read)
        _settle(request, launcher, channel)
        return True
    _say(channel, {"pid": pid} if pid > 0 else {"failed": "no memory, or too many processes"})
    if pid > 0:
        os.write(told_write, b"!")
    os.close(told_read)
    os.close(told_write)
    return False


def _fork_away() -> int:
    """The pid of a new process that is no child of ours; 0 in it, -1 when it could not be forked."""
    server, (pid_read, pid_write) = os.getpid(), os.pipe()
    try:
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                os.close(pid_read)
                os.close(pid_write)
                return 0
            os.setpgid(pid, pid)  # before anybody knows the pid: signals go to the group
            os.write(pid_write, str(pid).encode())
            os._exit(0)
    except OSError:
        if os.getpid() != server:
            os._exit(1)
        between = 0
    os.close(pid_write)
    if between:
        os.waitpid(between, 0)  # from here on the process is the launcher's child
    said = os.read(pid_read, 32)
    os.close(pid_read)
    return int(said) if said else -1


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _settle(request: Request, launcher: int, channel: socket.socket) -> None:
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
