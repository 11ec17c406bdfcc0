"""Imports the engine once and forks processes that need it: an import costs 10 s of CPU, a fork nothing to speak of.

Run as `python -m services.launcher.fork_server DESCRIPTOR MODULE…`: the descriptor is one end of a socket pair, the
modules are imported first. JSON lines in: {"name", "module", "env", "log"}. Lines out: {"ready"} once, {"pid"} for each
request in turn, {"exited", "code"} when a process has ended. It ends with its launcher, and what it forked ends with
it. Nothing here may start a thread: only the forking one would live on in a child.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from services.launcher.child import name_process, tie_to_parent

Request = dict[str, Any]


def main(arguments: list[str]) -> None:
    """Serve until the launcher is gone; in a forked process, become what was asked for."""
    channel = socket.socket(fileno=int(arguments[0]))
    for module in arguments[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of the parent's objects
    request = _serve(channel)
    if request is not None:
        sys.argv = [request["module"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket) -> Request | None:
    """Fork on request. Returns the request in the process that it is for, None in the server at the end."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _say(channel, {"ready": True})
    received = b""
    while True:
        readable, _, _ = select.select([channel, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 512)
            _reap(channel)
        if channel in readable:
            data = channel.recv(1 << 16)
            if not data:
                return None
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                request: Request = json.loads(line)
                if _fork(channel, request, (channel.fileno(), wake_read, wake_write)):
                    return request


def _fork(channel: socket.socket, request: Request, inherited: tuple[int, ...]) -> bool:
    """Whether this is the new process."""
    sys.stdout.flush()
    sys.stderr.flush()
    server = os.getpid()
    pid = os.fork()
    if not pid:
        _settle(request, server, inherited)
        return True
    with suppress(OSError):  # it may have done so, or even ended, already
        os.setpgid(pid, pid)  # before anybody knows the pid: signals go to the group
    _say(channel, {"pid": pid})
    return False


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(channel, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _settle(request: Request, server: int, inherited: tuple[int, ...]) -> None:
    """Make a forked process independent of the server's terminal, signals, descriptors, output and environment."""
    os.setpgid(0, 0)
    tie_to_parent(server)
    name_process(request["name"])
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for descriptor in (output, nothing, *inherited):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])


if __name__ == "__main__":
    main(sys.argv[1:])
