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

from services.launcher.child_process import Child, Limits
from services.launcher.fork_client import ForkServer
from services.launcher.spec import ProcessSpec
from services.launcher.suite import until
from services.launcher.supervisor import State, Status, Supervisor, supervising
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
QUICK = Limits(poll_s=0.02, hang_s=0.6, check_s=0.05, backoff_s=0.01)


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
    forks.close()
    process.kill()
    await process.wait()


Server = tuple[ForkServer, Child]


def spec(environment: dict[str, str], word: str) -> ProcessSpec:
    argv = (sys.executable, "-P", "-m", "probe")
    return ProcessSpec("probe", argv, {**environment, "WORD": word}, module="probe")


def ran(log: Path) -> int:
    """How often the module has run."""
    return log.read_text().count("stay") if log.exists() else 0


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_forked_process_has_its_own_environment_log_group_and_code(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    forks, _ = server
    assert await forks.ready()
    child = await forks.fork(spec(environment, "go"), tmp_path / "probe.log")
    assert await asyncio.wait_for(child.wait(), 10) == 7
    assert not child.running
    assert (tmp_path / "probe.log").read_text() == "go None True True\n"  # `heavy` was imported by the server


async def test_many_at_once_are_told_apart(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    forks, _ = server
    await forks.ready()
    logs = [tmp_path / f"{n}.log" for n in range(5)]
    children = await asyncio.gather(*(forks.fork(spec(environment, f"w{n}"), log) for n, log in enumerate(logs)))
    assert len({child.pid for child in children}) == 5
    assert await asyncio.gather(*(child.wait() for child in children)) == [7] * 5
    assert [log.read_text().split()[0] for log in logs] == [f"w{n}" for n in range(5)]


async def test_a_signal_is_its_exit_code(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    forks, _ = server
    await forks.ready()
    child = await forks.fork(spec(environment, "stay"), tmp_path / "probe.log")
    child.kill()
    assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL


async def test_what_it_forked_lives_on_when_the_server_is_killed(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    forks, process = server
    await forks.ready()
    log = tmp_path / "probe.log"
    child = await forks.fork(spec(environment, "stay"), log)
    await until(lambda: ran(log) == 1, 10, "the process to run its module")
    process.kill()
    await process.wait()
    with pytest.raises(Unavailable):
        await forks.fork(spec(environment, "stay"), log)
    assert child.running
    assert psutil.Process(child.pid).ppid() == os.getpid()
    child.kill()
    assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL


async def test_one_that_is_forked_too_late_ends_by_itself(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    """A frozen server gives no answer in time; thawed, it forks what nobody waits for any more."""
    forks, process = server
    await forks.ready()
    log = tmp_path / "probe.log"
    before = {child.pid for child in psutil.Process().children()}  # the server, and what other tests left running
    os.kill(process.pid, signal.SIGSTOP)
    await until(lambda: process.stopped, 10, "the server to be stopped")
    assert "did not reply" in await forks.ask(0.1)
    asking = asyncio.create_task(forks.fork(spec(environment, "stay"), log))
    await asyncio.sleep(0)  # the request is written
    asking.cancel()
    os.kill(process.pid, signal.SIGCONT)
    assert not await forks.ask(10.0)  # answered after the request
    forked = [child.pid for child in psutil.Process().children() if child.pid not in before]
    await until(lambda: all(gone(pid) for pid in forked), 10, "the unwanted process to end")


async def test_a_server_that_cannot_import_is_never_ready(tmp_path: Path, environment: dict[str, str]) -> None:
    forks = ForkServer(environment, ["no_such_module"])
    process = await forks.start(forks.spec, tmp_path / "server.log")
    assert not await forks.ready()
    assert await process.wait() == 1
    assert "no_such_module" in (tmp_path / "server.log").read_text()
    forks.close()


@asynccontextmanager
async def supervised(tmp_path: Path, environment: dict[str, str], preload: str = "heavy") -> AsyncIterator[Supervisor]:
    """`probe` can be forked, `plain` cannot."""
    probe = spec(environment, "stay")
    plain = replace(probe, name="plain", module="")
    logs = tmp_path / "logs"
    async with supervising([probe, plain], logs, lambda _: None, QUICK, environment, [preload]) as supervisor:
        await supervisor.started()
        yield supervisor


def status(supervisor: Supervisor, name: str) -> Status:
    return next(each for each in supervisor.statuses if each.name == name)


async def restarted(supervisor: Supervisor, name: str) -> Status:
    await until(lambda: status(supervisor, name).restarts == 1, 20, f"the end of {name} to be seen")
    await until(lambda: status(supervisor, name).state is State.READY, 20, f"the restart of {name}")
    return status(supervisor, name)


@pytest.mark.parametrize(("number", "why"), [(signal.SIGKILL, "signal 9"), (signal.SIGSTOP, "hung")])
async def test_a_server_that_dies_or_hangs_is_started_again_and_harms_nobody(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals, why: str
) -> None:
    async with supervised(tmp_path, environment) as supervisor:
        log = tmp_path / "logs" / "probe.log"
        await until(lambda: status(supervisor, "fork-server").state is State.READY, 20, "the server")
        await until(lambda: ran(log) == 1, 10, "the process to run its module")
        first = status(supervisor, "probe")
        os.kill(status(supervisor, "fork-server").pid, number)
        assert why in (await restarted(supervisor, "fork-server")).fault
        assert status(supervisor, "probe") == first
        os.kill(first.pid, signal.SIGKILL)
        again = await restarted(supervisor, "probe")
        await until(lambda: ran(log) == 2, 10, "the second start")
        assert log.read_text() == "stay None True True\n" * 2  # the new server forked it
    assert all(gone(pid) for pid in (first.pid, again.pid))


async def test_without_a_server_processes_are_started_the_plain_way(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    async with supervised(tmp_path, environment, "no_such_module") as supervisor:
        await until(lambda: status(supervisor, "fork-server").state is State.FAILED, 20, "the server to give up")
        assert status(supervisor, "probe").state is State.READY
        log = tmp_path / "logs" / "probe.log"
        await until(lambda: ran(log) == 1, 10, "the module to run")
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
    await until(lambda: ran(tmp_path / "logs" / "probe.log") == 1, 10, "the forked process to run")
    assert not any(gone(pid) for pid in pids)
    launcher.kill()
    await launcher.wait()
    await until(lambda: all(gone(pid) for pid in pids), 10, "both to end")
