"""The fork server, with a small module in the engine's place."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.launcher.fork_client import ForkServer
from services.launcher.plan import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import Limits, State, supervising
from shared.errors import Unavailable

PROBE = """
import os, sys, signal
import heavy
forked, leads = heavy.PID != os.getpid(), os.getpgid(0) == os.getpid()
print(os.environ.get("WORD"), os.environ.get("ONLY_SERVER"), forked, leads, flush=True)
if os.environ["WORD"] == "stay":
    while True: signal.pause()
sys.exit(7)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "heavy.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "probe.py").write_text(PROBE)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.fixture
async def forks(tmp_path: Path, environment: dict[str, str]) -> AsyncIterator[ForkServer]:
    server = await ForkServer.start({**environment, "ONLY_SERVER": "1"}, ["heavy"], tmp_path / "server.log")
    yield server
    await server.close()


def spec(environment: dict[str, str], word: str) -> ProcessSpec:
    argv = (sys.executable, "-P", "-m", "probe")
    return ProcessSpec("probe", argv, {**environment, "WORD": word}, module="probe")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_forked_process_has_its_own_environment_log_group_and_code(
    forks: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    assert await forks.ready()
    child = await forks.fork(spec(environment, "go"), tmp_path / "probe.log")
    assert await asyncio.wait_for(child.wait(), 10) == 7
    assert not child.running
    assert (tmp_path / "probe.log").read_text() == "go None True True\n"  # `heavy` was imported by the server


async def test_many_at_once_are_told_apart(forks: ForkServer, environment: dict[str, str], tmp_path: Path) -> None:
    await forks.ready()
    logs = [tmp_path / f"{n}.log" for n in range(5)]
    children = await asyncio.gather(*(forks.fork(spec(environment, f"w{n}"), log) for n, log in enumerate(logs)))
    assert len({child.pid for child in children}) == 5
    assert await asyncio.gather(*(child.wait() for child in children)) == [7] * 5
    assert [log.read_text().split()[0] for log in logs] == [f"w{n}" for n in range(5)]


async def test_a_signal_is_its_exit_code(forks: ForkServer, environment: dict[str, str], tmp_path: Path) -> None:
    await forks.ready()
    child = await forks.fork(spec(environment, "stay"), tmp_path / "probe.log")
    child.kill()
    assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL


async def test_when_the_server_dies_its_processes_do_and_it_says_so(
    forks: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    await forks.ready()
    child = await forks.fork(spec(environment, "stay"), tmp_path / "probe.log")
    os.kill(psutil.Process(child.pid).ppid(), signal.SIGKILL)
    assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL
    await until(lambda: gone(child.pid), 10, "the forked process to end")
    with pytest.raises(Unavailable):
        await forks.fork(spec(environment, "stay"), tmp_path / "probe.log")


async def test_a_server_that_cannot_import_is_never_ready(tmp_path: Path, environment: dict[str, str]) -> None:
    server = await ForkServer.start(environment, ["no_such_module"], tmp_path / "server.log")
    try:
        assert not await server.ready()
        assert "no_such_module" in (tmp_path / "server.log").read_text()
    finally:
        await server.close()


async def test_the_supervisor_forks_and_without_a_server_starts_the_plain_way(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The first start is forked; then the server is killed, and the restart is a plain one."""
    limits = Limits(poll_s=0.02, backoff_s=0.01)
    logs, probe = tmp_path / "logs", spec(environment, "stay")
    plain = replace(probe, name="plain", module="")
    async with supervising([probe, plain], logs, lambda _: None, limits, environment, ["heavy"]) as supervisor:
        await supervisor.started()
        first = supervisor.statuses[0]
        server = psutil.Process(first.pid).ppid()
        assert server != os.getpid()
        assert psutil.Process(supervisor.statuses[1].pid).ppid() == os.getpid()
        os.kill(server, signal.SIGKILL)
        await until(lambda: supervisor.statuses[0].restarts == 1, 10, "the death to be seen")
        await until(lambda: supervisor.statuses[0].state is State.READY, 10, "the restart")
        again = supervisor.statuses[0].pid
        assert psutil.Process(again).ppid() == os.getpid()
    assert gone(again)
    assert gone(first.pid)
