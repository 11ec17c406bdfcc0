"""Runs `polyphase` commands for tests: a process imports the command once, which takes longer than most commands, and
forks for each. A command has the words, environment and output that it would have in a process started anew.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import traceback

PR_SET_PDEATHSIG = 1


def serve(path: str) -> None:
    """Accept connections at this UNIX address. Each sends a line of JSON, and reads what its command prints, a zero
    byte, and the exit code.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    from services.launcher.cli import main

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child is waited for
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork():
                connection.close()
                continue
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with connection:
                order = json.loads(connection.makefile().readline())
                for stream in (1, 2):
                    os.dup2(connection.fileno(), stream)
            os.environ.clear()
            os.environ |= order["environment"]
            sys.argv[1:] = order["words"]
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
            os.write(1, b"\0%d" % code)
            os._exit(code)


if __name__ == "__main__":
    serve(sys.argv.pop(1))
