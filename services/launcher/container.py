"""The entry of a container: takes the cluster's keys, says where its peers reach it, and runs the command, watched.

An orchestrator such as compose restarts a container whose process ends, not one whose process hangs: with
POLYPHASE_HEALTH_URL the command is put down when it does, and its end is the container's.
"""

import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from services.launcher.health import HEALTH_URL, HttpHealth
from services.launcher.process import spawn, stop_all
from services.launcher.watch import Limits, until_ended, until_healthy

CURVE_FILE = Path("/keys/curve.env")
HANG = "POLYPHASE_HANG_S"
_ADVERTISE = "POLYPHASE_WORKER_ADVERTISE_HOST"


def main() -> None:
    """Become the command, or run it watched where there is something to watch."""
    command = sys.argv[1:]
    if CURVE_FILE.exists():
        os.environ.update(read_environment(CURVE_FILE.read_text()))
    # ZeroMQ listens on addresses, not on names.
    os.environ[_ADVERTISE] = os.environ.get(_ADVERTISE) or socket.gethostbyname(socket.gethostname())
    url = os.environ.get(HEALTH_URL, "")
    if not url:
        os.execvp(command[0], command)
    limits = Limits(hang_s=float(os.environ.get(HANG, Limits().hang_s)))
    sys.exit(asyncio.run(run_watched(command, url, limits)))


def read_environment(text: str) -> dict[str, str]:
    """The variables of a file of NAME='value' lines."""
    pairs = (word.partition("=") for line in text.splitlines() for word in shlex.split(line, comments=True))
    return {name: value for name, _, value in pairs}


async def run_watched(command: Sequence[str], url: str, limits: Limits) -> int:
    """Run until it ends, hangs, or we are told to stop. The exit code: 0 when told to, else 1."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    child = await spawn((shutil.which(command[0]) or command[0], *command[1:]), dict(os.environ), None)
    health = HttpHealth(url)

    async def life() -> str:
        fault = await until_healthy(child, health, limits)
        return fault or await until_ended(child, health, limits, _say)

    living, stopping = asyncio.create_task(life()), asyncio.create_task(stop.wait())
    await asyncio.wait([living, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not living.done():
        living.cancel()
        await stop_all([child], limits.stop_s)
        return 0
    _say(f"polyphase: {living.result()}; the container ends")
    return 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
