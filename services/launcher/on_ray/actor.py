"""One instance on the node that Ray has chosen: an actor that runs a worker process."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from services.launcher import child, log_cause
from services.launcher.child_process import ending
from services.launcher.health import HEALTH_URL
from services.launcher.ports import free_range
from services.launcher.spec import child_environment
from services.worker.settings import WorkerSettings
from shared.model.source import DOWNLOAD_FILE, Download

_WATCHED = (sys.executable, "-P", "-m", "services.launcher.container", sys.executable, "-P", "-m", "services.worker")
_SOON_S, _PAUSE_S = 30.0, 2.0  # a process that ends within so long of its start is restarted after that pause


class InstanceActor:
    """A worker process, watched like that of a container. The actor ends with it, and Ray restarts both.

    settings: WorkerSettings without host and ports, which the node determines. env: further variables of the process.
    """

    def __init__(self, settings: dict[str, Any], env: dict[str, str]) -> None:
        self._host = _node_address()
        placed = _placed(settings, self._host)
        url = f"http://{self._host}:{placed.http_port}"
        emulated = placed.engine == "emulated"
        variables = {**child_environment(placed.model, emulated), **placed.to_environment(), **env}
        self._about = {"host": self._host, "url": url, "node": ray.get_runtime_context().get_node_id()}
        self._log = _logs() / f"polyphase-{placed.instance_id}.log"
        self._download_file = self._log.with_suffix(".download")
        self._fault = ""
        self._stopping = False
        self._began = time.monotonic()
        # On the main thread: the kernel ends the process with the thread that started it, see `child`.
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-S", "-E", str(Path(child.__file__)), str(os.getpid()), *_WATCHED),
                env={**variables, HEALTH_URL: f"{url}/health", DOWNLOAD_FILE: str(self._download_file)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=self._until_ended, daemon=True, name="wait for worker").start()

    def about(self) -> dict[str, Any]:
        """Where the process runs; `fault`: how it ended, if it did; `download`: bytes of weights it has, and all."""
        known = Download.read(self._download_file)
        download = (known.done_bytes, known.total_bytes) if known is not None else None
        return {
            **self._about,
            "pid": self._process.pid,
            "log": str(self._log),
            "fault": self._fault,
            "download": download,
        }

    def stop(self, within_s: float) -> None:
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
        self._fault = f"{ending(code)}: {log_cause.last_error(self._log) or 'its log has no error'}"
        if time.monotonic() - self._began < _SOON_S:
            time.sleep(_PAUSE_S)  # so that the driver can read the fault
        os._exit(1)


def _placed(settings: dict[str, Any], host: str) -> WorkerSettings:
    ranks = int(settings["tensor_parallel"]) * int(settings["pipeline_parallel"])
    first = free_range(size=2 + ranks, host=host)
    return WorkerSettings(**{**settings, "host": host, "rpc_port": first, "http_port": first + 1, "kv_port": first + 2})


def _node_address() -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


def _logs() -> Path:
    """The folder of this process's own output, where `ray logs` and Ray's dashboard look for logs."""
    try:
        folder = Path(os.readlink("/proc/self/fd/1")).parent
    except OSError:
        folder = Path.cwd()
    return folder if os.access(folder, os.W_OK) else Path.cwd()
