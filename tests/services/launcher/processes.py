"""Small programs to supervise, and what became of them."""

import os
import sys
from pathlib import Path

import psutil

from services.launcher.child_process import Limits
from services.launcher.ports import free_range
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import State, Status, Supervisor

QUICK = Limits(
    start_s=20.0, poll_s=0.02, hang_s=2.0, check_s=0.05, backoff_s=0.01, backoff_max_s=0.05, stop_s=0.5, at_once=2
)
NOWHERE = "http://127.0.0.1:1/"  # nothing listens there
FOREVER = "import signal\nwhile True: signal.pause()"
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n{FOREVER}"
BROKEN = "print('no such model'); raise SystemExit(2)"
# It prints its pid and each health check. GET /block blocks its only thread, /ill makes it unhealthy, /slow slow, and
# /end ends it; other paths answer with the number of health checks and the variable WORD.
SERVER = """
import faulthandler, http.server, os, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1)
print("pid", os.getpid(), flush=True)
checks, state = 0, {"status": 200, "delay_s": 0.0}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global checks
        if self.path == "/block": threading.Event().wait()
        if self.path == "/ill": state["status"] = 503
        if self.path == "/slow": state["delay_s"] = 0.2
        if self.path == "/health":
            checks += 1
            print("checked", flush=True)
            time.sleep(state["delay_s"])
        self.send_response(state["status"] if self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(f"{checks} {os.environ.get('WORD', '')}".encode())
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spec(name: str, code: str = FOREVER, *arguments: str, health: str = "") -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-S", "-c", code, *arguments), dict(os.environ), health)


def server(name: str = "web", code: str = SERVER) -> ProcessSpec:
    port = free_range(size=10)
    return spec(name, code, str(port), health=f"http://127.0.0.1:{port}/health")


def status(supervisor: Supervisor, name: str = "web") -> Status:
    return next(each for each in supervisor.statuses if each.name == name)


async def restarted(supervisor: Supervisor, name: str = "web") -> Status:
    """Wait for the first restart of a process."""
    await until(lambda: status(supervisor, name).restarts == 1, 20, f"the end of {name} to be seen")
    await until(lambda: status(supervisor, name).state is State.READY, 20, f"the restart of {name}")
    return status(supervisor, name)


async def logged(log: Path, text: str, times: int = 1) -> None:
    """Wait until a log contains the text so often."""
    await until(lambda: log.exists() and log.read_text().count(text) >= times, 20, f"{text!r} in {log.name}")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
