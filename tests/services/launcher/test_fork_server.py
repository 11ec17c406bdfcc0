"""The fork server, with a small module in the engine's place."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.launcher import fork_client
from services.launcher.child_process import Child
from services.launcher.fork_client import ForkServer
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import State, Supervisor, supervising
from shared.errors import Unavailable
from tests.services.launcher.processes import QUICK, gone, logged, restarted, status

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
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
async def server(tmp_path: Path, environment: dict[str, str]) -> AsyncIterator[tuple[ForkServer, Child]]:
    forks = ForkServer({**environment, "ONLY_SERVER": "1"}, ["heavy"])
    process = await forks.start(forks.spec, tmp_path / "server.log")
    yield forks, process
    process.kill()
    await process.wait()


Server = tuple[ForkServer, Child]


def spec(environment: dict[str, str], word: str) -> ProcessSpec:
    argv = (sys.executable, "-P", "-m", "probe")
    return ProcessSpec("probe", argv, {**environment, "WORD": word}, module="probe")


async def test_a_forked_process_has_its_own_environment_log_group_and_code(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    forks, _ = server
    assert await forks.imported()
    child = await forks.fork(spec(environment, "go"), tmp_path / "probe.log")
    assert await asyncio.wait_for(child.wait(), 10) == 7
    assert not child.running
    assert (tmp_path / "probe.log").read_text() == "go None True True\n"  # `heavy` was imported by the server


async def test_many_at_once_are_told_apart(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    forks, _ = server
    await forks.imported()
    logs = [tmp_path / f"{n}.log" for n in range(5)]
    children = await asyncio.gather(*(forks.fork(spec(environment, f"w{n}"), log) for n, log in enumerate(logs)))
    assert len({child.pid for child in children}) == 5
    assert await asyncio.gather(*(child.wait() for child in children)) == [7] * 5
    assert [log.read_text().split()[0] for log in logs] == [f"w{n}" for n in range(5)]


async def test_what_it_forked_lives_on_when_the_server_is_killed(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    forks, process = server
    await forks.imported()
    log = tmp_path / "probe.log"
    child = await forks.fork(spec(environment, "stay"), log)
    await logged(log, "stay")
    process.kill()
    await process.wait()
    with pytest.raises(Unavailable):
        await forks.fork(spec(environment, "stay"), log)
    assert child.running
    assert psutil.Process(child.pid).ppid() == os.getpid()
    child.kill()
    assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL


@pytest.mark.parametrize("given_up", ["cancelled", "timeout"])
async def test_a_fork_that_is_given_up_ends_the_server_and_leaves_no_process(
    server: Server, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: str
) -> None:
    monkeypatch.setattr(fork_client, "FORK_S", 0.1 if given_up == "timeout" else 60.0)
    forks, process = server
    await forks.imported()
    log = tmp_path / "probe.log"
    before = {child.pid for child in psutil.Process().children()}  # the server, and what other tests left running
    os.kill(process.pid, signal.SIGSTOP)
    await until(lambda: process.stopped, 10, "the server to be stopped")
    fork = asyncio.create_task(forks.fork(spec(environment, "stay"), log))
    await asyncio.sleep(0)  # the request is written
    if given_up == "cancelled":
        fork.cancel()
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await fork
    assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGKILL
    assert {child.pid for child in psutil.Process().children()} <= before
    assert not log.exists()


async def test_a_server_that_cannot_import_is_never_ready(tmp_path: Path, environment: dict[str, str]) -> None:
    forks = ForkServer(environment, ["no_such_module"])
    process = await forks.start(forks.spec, tmp_path / "server.log")
    assert not await forks.imported()
    assert await process.wait() == 1
    assert "no_such_module" in (tmp_path / "server.log").read_text()


@asynccontextmanager
async def supervised(tmp_path: Path, environment: dict[str, str], preload: str = "heavy") -> AsyncIterator[Supervisor]:
    """`probe` can be forked, `plain` cannot."""
    probe = spec(environment, "stay")
    plain = replace(probe, name="plain", module="")
    logs = tmp_path / "logs"
    async with supervising([probe, plain], logs, lambda _: None, QUICK, environment, [preload]) as supervisor:
        await supervisor.started()
        yield supervisor


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_dies_or_hangs_is_restarted_and_its_processes_go_on(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A hang is found by the next fork; that process is then started as a program."""
    async with supervised(tmp_path, environment) as supervisor:
        log = tmp_path / "logs" / "probe.log"
        await until(lambda: status(supervisor, "fork-server").state is State.READY, 20, "the server")
        await logged(log, "stay")
        first = status(supervisor, "probe")
        if number == signal.SIGSTOP:
            monkeypatch.setattr(fork_client, "FORK_S", 0.5)
        os.kill(status(supervisor, "fork-server").pid, number)
        if number == signal.SIGKILL:
            await restarted(supervisor, "fork-server")
            assert status(supervisor, "probe") == first
        os.kill(first.pid, signal.SIGKILL)
        again = await restarted(supervisor, "probe")
        assert "signal 9" in (await restarted(supervisor, "fork-server")).fault
        await logged(log, "stay", 2)
        forked = number == signal.SIGKILL
        assert log.read_text() == f"stay None True True\nstay None {forked} True\n"
    assert all(gone(pid) for pid in (first.pid, again.pid))


async def test_without_a_server_processes_are_started_the_plain_way(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    async with supervised(tmp_path, environment, "no_such_module") as supervisor:
        await until(lambda: status(supervisor, "fork-server").state is State.FAILED, 20, "the server to give up")
        assert status(supervisor, "probe").state is State.READY
        log = tmp_path / "logs" / "probe.log"
        await logged(log, "stay")
        assert log.read_text() == "stay None False True\n"


LAUNCHER = """
import asyncio, json, sys
from pathlib import Path
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import supervising

async def main():
    environment = json.loads(sys.argv[2])
    spec = ProcessSpec("probe", (), environment, module="probe")
    async with supervising([spec], Path(sys.argv[1]), lambda _: None, None, environment, ["heavy"]) as supervisor:
        await supervisor.started()
        await until(lambda: all(s.state == "ready" for s in supervisor.statuses), 20, "the fork server")
        print(*(s.pid for s in supervisor.statuses), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_neither_server_nor_forked_process_outlives_a_launcher_that_is_killed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    words = [str(tmp_path / "logs"), json.dumps({**environment, "WORD": "stay"})]
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER, *words, stdout=asyncio.subprocess.PIPE
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in (await launcher.stdout.readline()).split()]
    assert len(pids) == 2
    await logged(tmp_path / "logs" / "probe.log", "stay")
    assert not any(gone(pid) for pid in pids)
    launcher.kill()
    await launcher.wait()
    await until(lambda: all(gone(pid) for pid in pids), 10, "both to end")
