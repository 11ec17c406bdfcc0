"""One instance on the node that Ray has chosen: the actor's only work is its worker process."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from services.launcher import child, child_process
from services.launcher.child_process import ending
from services.launcher.health import HEALTH_URL
from services.launcher.ports import free_range
from services.launcher.spec import child_environment
from services.worker.settings import WorkerSettings

_WATCHED = (sys.executable, "-P", "-m", "services.launcher.container", sys.executable, "-P", "-m", "services.worker")
_SOON_S, _PAUSE_S = 30.0, 2.0  # who ends within so long of its start is started again after that pause


class InstanceActor:
    """A worker process, watched as a container's is. When it ends, so does the actor, and Ray starts both again.

    settings: WorkerSettings but for host and ports, which are the node's. env: further variables of the process.
    """

    def __init__(self, settings: dict[str, Any], env: dict[str, str]) -> None:
        self._host = _node_address()
        placed = _placed(settings, self._host)
        url = f"http://{self._host}:{placed.http_port}"
        imitated = placed.engine == "emulated"
        variables = {**child_environment(placed.model, imitated), **placed.to_environment(), **env}
        self._about = {"host": self._host, "url": url, "node": ray.get_runtime_context().get_node_id()}
        self._log = _logs() / f"polyphase-{placed.instance_id}.log"
        self._fault = ""
        self._stopping = False
        self._began = time.monotonic()
        # On the main thread: the kernel ends the process with the thread that started it. See `child`.
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-S", "-E", str(Path(child.__file__)), str(os.getpid()), *_WATCHED),
                env={**variables, HEALTH_URL: f"{url}/health"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=self._until_ended, daemon=True, name="until it ends").start()

    def about(self) -> dict[str, Any]:
        """Where it runs; `fault`: how it ended, of one that did."""
        return {**self._about, "pid": self._process.pid, "log": str(self._log), "fault": self._fault}

    def stop(self, within_s: float) -> None:
        """Let it end in good order, within that time."""
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _until_ended(self) -> None:
        code = self._process.wait()
        if self._stopping:
            return
        self._fault = f"{ending(code)}: {child_process.last_error(self._log) or 'its log says nothing'}"
        if time.monotonic() - self._began < _SOON_S:
            time.sleep(_PAUSE_S)  # in which it can be asked for the fault
        os._exit(1)


def _placed(settings: dict[str, Any], host: str) -> WorkerSettings:
    """The settings on this node."""
    ranks = int(settings["tensor_parallel"]) * int(settings["pipeline_parallel"])
    first = free_range(size=2 + ranks, host=host)
    return WorkerSettings(**{**settings, "host": host, "rpc_port": first, "http_port": first + 1, "kv_port": first + 2})


def _node_address() -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


def _logs() -> Path:
    """Where this process' own output goes: `ray logs` and Ray's dashboard find what lies there."""
    try:
        folder = Path(os.readlink("/proc/self/fd/1")).parent
    except OSError:
        folder = Path.cwd()
    return folder if os.access(folder, os.W_OK) else Path.cwd()
