"""Docker and compose as commands, and a suite in a compose project as seen from outside."""

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite import CommandFailed, run_command, until_found
from shared.errors import NotFound

POSTGRES, STAND_IN = "postgres:16", "polyphase-check-postgres:15"
MONITOR = "http://127.0.0.1:8200"  # within its container
TOKEN = ("-e", "POLYPHASE_CLUSTER_TOKEN_FILE=/keys/cluster-token")  # for commands that change something
_HOW = (
    "Docker's engine is needed: Docker Desktop, or Docker Engine with the compose plugin "
    "(https://docs.docker.com/engine/install); on Debian: apt-get install docker.io docker-compose"
)


def docker(*words: str, timeout_s: float = 600.0) -> str:
    """The output of `docker WORDS`. Raises CommandFailed."""
    return run_command(["docker", *words], timeout_s=timeout_s)


def succeeds(*words: str) -> bool:
    """Whether `docker WORDS` ends without an error."""
    try:
        docker(*words)
    except CommandFailed:
        return False
    return True


def compose_command(check: str) -> list[str]:
    """Compose v2, else docker-compose. Without Docker, prints how to install it and ends the process with code 2."""
    try:
        if shutil.which("docker") is None:
            raise NotFound(f"`docker` is not installed. {_HOW}")
        try:
            docker("info")
        except CommandFailed as error:
            raise NotFound(f"Docker's engine does not answer: {error.message.splitlines()[-1]} {_HOW}") from error
        if succeeds("compose", "version"):
            return ["docker", "compose"]
        if shutil.which("docker-compose") is None:
            raise NotFound(f"neither `docker compose` nor `docker-compose` is installed. {_HOW}")
    except NotFound as error:
        print(f"{check}: {error.message}", file=sys.stderr)
        sys.exit(2)
    return ["docker-compose"]


def postgres_image() -> str:
    """The official image; where it cannot be pulled, a stand-in with Debian's server."""
    if succeeds("image", "inspect", POSTGRES) or succeeds("pull", "-q", POSTGRES):
        return POSTGRES
    docker("build", "-q", "-t", STAND_IN, "benchmarks/deploy/postgres", timeout_s=900)
    print(f"{POSTGRES} cannot be pulled here: {STAND_IN}, Debian's PostgreSQL, stands in for it")
    return STAND_IN


class Project:
    """A compose project with a name and an environment of its own."""

    def __init__(self, command: Sequence[str], name: str, env: Mapping[str, str]) -> None:
        self.name = name
        self.env = dict(env)
        self._words = [*command, "-p", name, "--profile", "cpu"]

    def compose(self, *words: str, timeout_s: float = 600.0) -> str:
        """`compose WORDS`. Raises CommandFailed."""
        return run_command([*self._words, *words], self.env, timeout_s)

    def containers(self, service: str = "", *, stopped: bool = True) -> list[dict[str, Any]]:
        """`docker inspect` of the project's containers, or of those of a service."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", label)]
        ids = docker("ps", "-q", *(["-a"] if stopped else []), *filters).split()
        found: list[dict[str, Any]] = json.loads(docker("inspect", *ids)) if ids else []
        return found

    def all_healthy(self) -> bool:
        """Whether all containers that run are healthy. Raises NotFound when one has failed."""
        states = {each["Name"]: each["State"] for each in self.containers()}
        failed = {name: s["ExitCode"] for name, s in states.items() if s["Status"] == "exited" and s["ExitCode"]}
        if failed:
            raise NotFound(f"containers ended: {failed}")
        return all(s["Health"]["Status"] == "healthy" for s in states.values() if s["Status"] != "exited")

    def one_shots(self) -> dict[str, int]:
        """The exit codes of the services that have ended."""
        label = "com.docker.compose.service"
        ended = [each for each in self.containers() if each["State"]["Status"] == "exited"]
        return {each["Config"]["Labels"][label]: each["State"]["ExitCode"] for each in ended}

    async def instances(self) -> dict[str, dict[str, Any]]:
        """The monitor's instances, by id, as requested inside its container."""
        code = f"import urllib.request as u; print(u.urlopen('{MONITOR}/instances', timeout=5).read().decode())"
        command = ("exec", "-T", "monitor", "python3", "-S", "-c", code)
        found = json.loads(await asyncio.to_thread(self.compose, *command))
        return {each["instance_id"]: each for each in found}

    async def until_ready(self, *, prefill: int, decode: int) -> list[str]:
        """Wait until exactly so many instances are ready in each role; returns them. Raises DeadlineExceeded."""

        async def all_ready() -> list[str] | None:
            found = await self.instances()
            ready = {name: each["role"] for name, each in found.items() if each["state"] == "ready"}
            roles = list(ready.values())
            return sorted(ready) if (roles.count("prefill"), roles.count("decode")) == (prefill, decode) else None

        what = f"{prefill} prefill and {decode} decode instances ready"
        return await until_found(all_ready, 300, what, poll_s=0.5)

    def rows(self) -> int:
        query = ["psql", "-h", "/run/postgresql", "-U", "polyphase", "-tAc"]
        return int(self.compose("exec", "-T", "postgres", *query, "select count(*) from requests", "polyphase"))
