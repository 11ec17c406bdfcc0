"""`polyphase` commands for tests: one process imports the command, which takes longer than most commands run, and forks
for each. A command has the words, the environment and the output that it would have in a process started anew.
"""

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Commands:
    """Runs commands; its process is started with the first one and ends with this one. `modules` are imported once,
    beside the command.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._address = ""

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. `environment`: all of it."""
        with tempfile.TemporaryDirectory(prefix="polyphase-command-") as folder, socket.socket(socket.AF_UNIX) as end:
            end.connect(self._server())
            outputs = [Path(folder, name) for name in ("stdout", "stderr")]
            order = {"words": words, "environment": dict(environment), "outputs": [str(each) for each in outputs]}
            end.sendall(json.dumps(order).encode() + b"\n")
            code = end.makefile().read()
            assert code, f"{words} ended by a signal: {outputs[1].read_text()}"
            stdout, stderr = (each.read_text() for each in outputs)
        return subprocess.CompletedProcess(list(words), int(code), stdout, stderr)

    def _server(self) -> str:
        if not self._address:
            self._address = str(Path(tempfile.mkdtemp(prefix="polyphase-commands-")) / "socket")
            words = [sys.executable, "-P", "-m", "tests.commands", self._address, *self._modules]
            paths = {**os.environ, "PYTHONPATH": str(ROOT)}
            server = subprocess.Popen(words, env=paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert server.stdout is not None
            assert server.stdout.readline(), "the server of commands has ended"
        return self._address


def serve(address: str, modules: Sequence[str]) -> None:
    """Fork for each connection, which sends an order as a line of JSON and is answered with the exit code; until stdin
    ends, which is with the process that started this one.
    """
    for module in ("services.launcher.cli", *modules):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("ready", flush=True)
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                carry_out(connection)
            connection.close()


def carry_out(connection: socket.socket) -> None:
    """Become the command of an order."""
    from services.launcher.cli import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order = json.loads(connection.makefile().readline())
    for stream, path in enumerate((os.devnull, *order["outputs"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ |= order["environment"]
    sys.argv = ["polyphase", *order["words"]]
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(str(code).encode())
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
