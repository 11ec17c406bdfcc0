"""The entry of a container: reads the cluster's keys, sets the name and address of the container, runs the command.

An orchestrator such as compose restarts a container whose process ends, but not one whose process hangs: with
POLYPHASE_HEALTH_URL a command that hangs is killed, and the container ends with it.
"""

import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from services.launcher.child_process import Limits, spawn, stop_all, until_ended, until_healthy
from services.launcher.health import HEALTH_URL, HttpHealth
from shared.files.text import read_text
from shared.model.source import DOWNLOAD_FILE, Download
from shared.runtime.signals import end_at_sigterm

KEYS = Path("/keys")  # the folder that `polyphase keys init` fills
START, HANG, STOP = "POLYPHASE_START_S", "POLYPHASE_HANG_S", "POLYPHASE_STOP_S"
_ADVERTISE, _INSTANCE, _ROLE = (f"POLYPHASE_WORKER_{name}" for name in ("ADVERTISE_HOST", "INSTANCE_ID", "ROLE"))
_NAMED = (  # a variable that only such a container needs; the variable of its id; the prefix of the id
    ("POLYPHASE_SCHEDULER_RPC_ADDRESS", "POLYPHASE_SCHEDULER_SCHEDULER_ID", "scheduler"),
    ("POLYPHASE_GATEWAY_SCHEDULERS", "POLYPHASE_GATEWAY_GATEWAY_ID", "gateway"),
)
TOKEN_FILE = KEYS / "cluster-token"
_GUARDED = ("MONITOR", "SCHEDULER", "WORKER", "PREDICTOR", "PLANNER", "DASHBOARD")


def main() -> None:
    """Become the command, or with a health check run and watch it."""
    end_at_sigterm()
    command = sys.argv[1:]
    for file in sorted(KEYS.glob("*.env")):
        os.environ.update(read_environment(read_text(file)))
    if TOKEN_FILE.exists():
        os.environ.update(token_environment(os.environ))
    name_container(os.environ, socket.gethostname())
    url = os.environ.get(HEALTH_URL, "")
    if not url:
        os.execvp(command[0], command)
    usual, given = Limits(), os.environ
    limits = Limits(
        start_s=float(given.get(START, usual.start_s)),
        hang_s=float(given.get(HANG, usual.hang_s)),
        stop_s=float(given.get(STOP, usual.stop_s)),
    )
    sys.exit(asyncio.run(run_watched(command, url, limits)))


def name_container(environment: MutableMapping[str, str], host: str) -> None:
    """Set the address under which peers reach this container (ZeroMQ binds no names), and its id.

    Containers of a service differ only in their host name, which a restart keeps: instances, schedulers and gateways of
    a scaled service get their ids from it. Two schedulers with one id would each consider the other's open requests as
    left over from their own previous process.
    """
    environment[_ADVERTISE] = environment.get(_ADVERTISE) or socket.gethostbyname(host)
    if role := environment.get(_ROLE):
        environment[_INSTANCE] = environment.get(_INSTANCE) or f"{role}-{host}"
    for needed, key, kind in _NAMED:
        if environment.get(needed):
            environment[key] = environment.get(key) or f"{kind}-{host}"


def token_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that name the token's file to each process, except those for which `given` has a token."""
    names = (f"POLYPHASE_{service}_CLUSTER_TOKEN" for service in _GUARDED)
    return {f"{name}_FILE": str(TOKEN_FILE) for name in names if name not in given and f"{name}_FILE" not in given}


def read_environment(text: str) -> dict[str, str]:
    """The variables of a file with lines NAME='value'."""
    pairs = (word.partition("=") for line in text.split("\n") for word in shlex.split(line, comments=True))
    return {name: value for name, _, value in pairs}


async def run_watched(command: Sequence[str], url: str, limits: Limits) -> int:
    """Run a command until it ends or hangs (exit code 1), or until SIGTERM or SIGINT (exit code 0)."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    download_file = Path(
        os.environ.get(DOWNLOAD_FILE) or Path(tempfile.gettempdir(), f"polyphase-{os.getpid()}.download")
    )
    download_file.unlink(missing_ok=True)
    variables = {**os.environ, DOWNLOAD_FILE: str(download_file)}
    child = await spawn((shutil.which(command[0]) or command[0], *command[1:]), variables, None)
    health, last = HttpHealth(url), None

    def went_on() -> bool:
        nonlocal last
        before, last = last, Download.read(download_file)
        return last != before

    async def life() -> str:
        unready = await until_healthy(child, health, limits, went_on)
        return unready.text if unready else await until_ended(child, health, limits, _log)

    living, stopping = asyncio.create_task(life()), asyncio.create_task(stop.wait())
    await asyncio.wait([living, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not living.done():
        living.cancel()
        await stop_all([child], limits.stop_s)
        return 0
    _log(f"polyphase: {living.result()}; the container ends")
    return 1


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
