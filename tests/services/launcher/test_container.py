"""The entry of a container, as a process: it ends when its command does, hangs, or when it is told to."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from services.launcher import cluster_keys, container
from services.launcher.health import HEALTH_URL
from services.launcher.ports import free_range
from services.launcher.suite import until

SERVICE = """
import faulthandler, http.server, os, signal, sys
faulthandler.register(signal.SIGUSR1)
print("pid", os.getpid(), os.environ.get("POLYPHASE_WORKER_ADVERTISE_HOST"), flush=True)
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end": os._exit(3)
        self.send_response(200); self.end_headers()
    def log_message(self, *args): print("asked", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ok).serve_forever()
"""
Running = tuple[asyncio.subprocess.Process, int]


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    """The entry, and the pid of its command, once that is healthy."""
    port, log = free_range(size=10), tmp_path / "log"
    entry = [sys.executable, "-m", "services.launcher.container", sys.executable, "-S", "-c", SERVICE, str(port)]
    env = {**os.environ, HEALTH_URL: f"http://127.0.0.1:{port}/health", container.HANG: "0.6"}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*entry, env=env, stdout=out, stderr=out)
    try:
        await until(lambda: log.read_text().count("asked") >= 2, 20, "the command to be watched")
        yield process, int(log.read_text().split()[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("number", "said"), [(signal.SIGSTOP, "hung: no good"), (signal.SIGKILL, "signal 9")])
async def test_it_ends_when_its_command_hangs_or_dies(tmp_path: Path, number: signal.Signals, said: str) -> None:
    async with running(tmp_path) as (entry, command):
        os.kill(command, number)
        assert await asyncio.wait_for(entry.wait(), 20) == 1
        assert gone(command)
        assert said in (tmp_path / "log").read_text()


async def test_told_to_end_it_ends_its_command(tmp_path: Path) -> None:
    async with running(tmp_path) as (entry, command):
        entry.terminate()
        assert await asyncio.wait_for(entry.wait(), 20) == 0
        assert gone(command)


async def test_killed_it_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as (entry, command):
        entry.kill()
        await entry.wait()
        await until(lambda: gone(command), 10, "the command to end")


async def test_without_a_url_it_becomes_the_command() -> None:
    entry = [sys.executable, "-m", "services.launcher.container", sys.executable, "-c", "raise SystemExit(5)"]
    env = {key: value for key, value in os.environ.items() if key != HEALTH_URL}
    process = await asyncio.create_subprocess_exec(*entry, env=env)
    assert await process.wait() == 5


def test_the_keys_are_read_as_they_were_made(tmp_path: Path) -> None:
    cluster_keys.init_folder(tmp_path)
    found = container.read_environment((tmp_path / "curve.env").read_text())
    assert len(found) == 12
    assert len(found["POLYPHASE_WORKER_CURVE_SECRET"]) == 40


def test_an_instance_is_called_by_its_role_and_host() -> None:
    found = {"POLYPHASE_WORKER_ROLE": "decode"}
    container.name_container(found, "localhost")
    assert found["POLYPHASE_WORKER_INSTANCE_ID"] == "decode-localhost"
    assert found["POLYPHASE_WORKER_ADVERTISE_HOST"] == "127.0.0.1"


def test_what_is_written_down_stays() -> None:
    said = {
        "POLYPHASE_WORKER_ROLE": "decode",
        "POLYPHASE_WORKER_INSTANCE_ID": "gpu-3",
        "POLYPHASE_WORKER_ADVERTISE_HOST": "10.0.0.7",
    }
    found = dict(said)
    container.name_container(found, "localhost")
    assert found == said


@pytest.mark.parametrize("kind", ["scheduler", "gateway"])
def test_an_id_of_a_scheduler_or_gateway_stays(kind: str) -> None:
    told = {"scheduler": "POLYPHASE_SCHEDULER_RPC_ADDRESS", "gateway": "POLYPHASE_GATEWAY_SCHEDULERS"}[kind]
    key = f"POLYPHASE_{kind}_{kind}_ID".upper()
    found = {told: "tcp://0.0.0.0:8101"}
    container.name_container(found, "localhost")
    assert found.pop("POLYPHASE_WORKER_ADVERTISE_HOST") == "127.0.0.1"
    assert found == {told: "tcp://0.0.0.0:8101", key: f"{kind}-localhost"}
    found[key] = f"{kind}-east"
    container.name_container(found, "localhost")
    assert found[key] == f"{kind}-east"


def test_who_is_no_instance_gets_no_id() -> None:
    found: dict[str, str] = {}
    container.name_container(found, "localhost")
    assert set(found) == {"POLYPHASE_WORKER_ADVERTISE_HOST"}
