"""The entry of a container: takes the cluster's keys, says who it is and where its peers reach it, runs the command.

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
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from services.launcher.child_process import Limits, spawn, stop_all, until_ended, until_healthy
from services.launcher.health import HEALTH_URL, HttpHealth
from shared.files.text import read_text
from shared.runtime.signals import end_at_sigterm

KEYS = Path("/keys")  # what `polyphase keys init` made of the cluster's keys
START, HANG, STOP = "POLYPHASE_START_S", "POLYPHASE_HANG_S", "POLYPHASE_STOP_S"
_ADVERTISE, _INSTANCE, _ROLE = (f"POLYPHASE_WORKER_{name}" for name in ("ADVERTISE_HOST", "INSTANCE_ID", "ROLE"))
_NAMED = (  # what only such a container has to be told of; its id; what the id begins with
    ("POLYPHASE_SCHEDULER_RPC_ADDRESS", "POLYPHASE_SCHEDULER_SCHEDULER_ID", "scheduler"),
    ("POLYPHASE_GATEWAY_SCHEDULERS", "POLYPHASE_GATEWAY_GATEWAY_ID", "gateway"),
)
TOKEN_FILE = KEYS / "cluster-token"
_GUARDED = ("MONITOR", "SCHEDULER", "WORKER", "PREDICTOR", "PLANNER", "DASHBOARD")


def main() -> None:
    """Become the command, or run it watched where there is something to watch."""
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
    sys.exit(asyncio.run(run_watched(command, url, _limits())))


def _limits() -> Limits:
    usual, said = Limits(), os.environ
    return Limits(
        start_s=float(said.get(START, usual.start_s)),
        hang_s=float(said.get(HANG, usual.hang_s)),
        stop_s=float(said.get(STOP, usual.stop_s)),
    )


def name_container(environment: MutableMapping[str, str], host: str) -> None:
    """Where peers reach this container, as an address (ZeroMQ listens on none by name), and what it is called.

    Containers of one service are alike but for their host's name, which a restart keeps: so the instances, schedulers
    and gateways of a scaled service have ids of their own. Two schedulers of one id would each take the other's open
    requests for what a former life of their own left.
    """
    environment[_ADVERTISE] = environment.get(_ADVERTISE) or socket.gethostbyname(host)
    if role := environment.get(_ROLE):
        environment[_INSTANCE] = environment.get(_INSTANCE) or f"{role}-{host}"
    for told, key, kind in _NAMED:
        if environment.get(told):
            environment[key] = environment.get(key) or f"{kind}-{host}"


def token_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Where each process finds the cluster's secret, but for those that `given` tells of one."""
    names = (f"POLYPHASE_{service}_CLUSTER_TOKEN" for service in _GUARDED)
    return {f"{name}_FILE": str(TOKEN_FILE) for name in names if name not in given and f"{name}_FILE" not in given}


def read_environment(text: str) -> dict[str, str]:
    """The variables of a file of NAME='value' lines."""
    pairs = (word.partition("=") for line in text.split("\n") for word in shlex.split(line, comments=True))
    return {name: value for name, _, value in pairs}


async def run_watched(command: Sequence[str], url: str, limits: Limits) -> int:
    """Run until it ends, hangs, or we are told to stop. The exit code: 0 when told to, else 1."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    child = await spawn((shutil.which(command[0]) or command[0], *command[1:]), dict(os.environ), None)
    health = HttpHealth(url)

    async def life() -> str:
        unready = await until_healthy(child, health, limits)
        return unready.text if unready else await until_ended(child, health, limits, _say)

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
