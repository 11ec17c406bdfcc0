"""Counts the calls of this project's functions in each process of a suite, for `tests.structure.request_path`.

Python imports this module at its start where the folder is on PYTHONPATH. A memory-mapped byte in the file
PATHTRACE_FLAG names the window that is being recorded: 0 for none, 9 to write the counts to the folder PATHTRACE_OUT.
With PATHTRACE_FROM a process counts from the first call of the function of that name on, so that its imports do not
count.
"""

import atexit
import inspect
import json
import mmap
import os
import sys
import threading
import time
from types import CodeType, FrameType

ROOT, FLAG, OUT, FROM = (os.environ.get(f"PATHTRACE_{name}", "") for name in ("ROOT", "FLAG", "OUT", "FROM"))
OFF, WRITE = 0, 9


def _install() -> None:
    with open(FLAG, "rb") as file:
        state = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    counts: dict[int, dict[CodeType, int]] = {}
    environment = os.path.join(ROOT, ".venv")

    begun = not FROM

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal begun
        window = state[0]
        if event == "call" and OFF < window < WRITE and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function
            code = frame.f_code
            begun = begun or code.co_name == FROM
            if begun and code.co_filename.startswith(ROOT) and not code.co_filename.startswith(environment):
                calls = counts.setdefault(window, {})
                calls[code] = calls.get(code, 0) + 1

    def write() -> None:
        rows = [
            [window, code.co_filename[len(ROOT) + 1 :], code.co_qualname, code.co_firstlineno, number]
            for window, calls in list(counts.items())
            for code, number in list(calls.items())
        ]
        path = os.path.join(OUT, f"{os.getpid()}.json")
        with open(path + ".tmp", "w") as out:
            json.dump({"argv": sys.argv, "rows": rows}, out)
        os.rename(path + ".tmp", path)

    def poll() -> None:
        written = False
        while True:
            time.sleep(0.1)
            if (writing := state[0] == WRITE) and not written:
                write()
                counts.clear()
            written = writing

    def start() -> None:
        threading.Thread(target=poll, daemon=True, name="path-trace").start()

    threading.setprofile(count)
    sys.setprofile(count)
    if "services.launcher.fork_server" not in sys.orig_argv:  # it forks, and a thread would not survive that
        start()
        atexit.register(write)
    os.register_at_fork(after_in_child=start)


if FLAG:
    _install()
