"""The entry of a container, as a process: it ends when its command does, hangs, or when it is told to."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.launcher import cluster_keys, container
from services.launcher.child_process import Child, Limits, Unready
from services.launcher.container import run_watched
from services.launcher.health import HEALTH_URL, Health
from services.launcher.ports import free_range
from services.launcher.suite import until
from tests.services.launcher.processes import FOREVER, NOWHERE, SERVER, gone, logged

Running = tuple[asyncio.subprocess.Process, int]


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    """The entry, and the pid of its command, once that is healthy."""
    port, log = free_range(size=10), tmp_path / "log"
    entry = [sys.executable, "-m", "services.launcher.container", sys.executable, "-S", "-c", SERVER, str(port)]
    env = {**os.environ, HEALTH_URL: f"http://127.0.0.1:{port}/health", container.HANG: "0.6"}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*entry, env=env, stdout=out, stderr=out)
    try:
        await logged(log, "checked", 2)
        yield process, int(log.read_text().split()[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(("number", "said"), [(signal.SIGSTOP, "hung: no good"), (signal.SIGKILL, "signal 9")])
async def test_it_ends_when_its_command_hangs_or_dies(tmp_path: Path, number: signal.Signals, said: str) -> None:
    async with running(tmp_path) as (entry, command):
        os.kill(command, number)
        assert await asyncio.wait_for(entry.wait(), 20) == 1
        assert gone(command)
        assert said in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
async def test_its_command_ends_with_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    async with running(tmp_path) as (entry, command):
        entry.send_signal(number)
        assert await asyncio.wait_for(entry.wait(), 20) == code
        await until(lambda: gone(command), 10, "the command to end")


async def test_the_start_limit_of_a_container_counts_from_the_last_byte_of_a_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command has the variable, and what it writes into that file reaches the wait for its health."""

    async def until_progress(child: Child, _: Health, __: Limits, went_on: Callable[[], bool]) -> Unready:
        async with asyncio.timeout(60):
            while not went_on():
                await asyncio.sleep(0.01)
        assert not went_on()
        child.kill()
        return Unready("it went on")

    monkeypatch.setattr("services.launcher.container.until_healthy", until_progress)
    code = "import os; open(os.environ['POLYPHASE_DOWNLOAD_FILE'], 'w').write('1 2')\n" + FOREVER
    assert await run_watched([sys.executable, "-S", "-c", code], NOWHERE, Limits()) == 1


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


ADVERTISED, ROLE, ID = (f"POLYPHASE_WORKER_{name}" for name in ("ADVERTISE_HOST", "ROLE", "INSTANCE_ID"))
HERE = {ADVERTISED: "127.0.0.1"}
SCHEDULER = {"POLYPHASE_SCHEDULER_RPC_ADDRESS": "tcp://0.0.0.0:8101"}
GATEWAY = {"POLYPHASE_GATEWAY_SCHEDULERS": "[]"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, HERE),
        ({ROLE: "decode"}, {**HERE, ID: "decode-localhost"}),
        ({ROLE: "decode", ID: "gpu-3", ADVERTISED: "10.0.0.7"}, {}),
        (SCHEDULER, {**HERE, "POLYPHASE_SCHEDULER_SCHEDULER_ID": "scheduler-localhost"}),
        ({**SCHEDULER, "POLYPHASE_SCHEDULER_SCHEDULER_ID": "east"}, HERE),
        (GATEWAY, {**HERE, "POLYPHASE_GATEWAY_GATEWAY_ID": "gateway-localhost"}),
        ({**GATEWAY, "POLYPHASE_GATEWAY_GATEWAY_ID": "east"}, HERE),
    ],
)
def test_a_container_has_the_address_and_the_id_of_its_host_unless_given(
    given: dict[str, str], added: dict[str, str]
) -> None:
    found = dict(given)
    container.name_container(found, "localhost")
    assert found == {**given, **added}
