"""Docker and compose as commands."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import NotFound, PolyphaseError

ROOT = Path(__file__).parents[2]
_HOW = (
    "Docker's engine is needed: Docker Desktop, or Docker Engine with the compose plugin "
    "(https://docs.docker.com/engine/install); on Debian: apt-get install docker.io docker-compose"
)


class CommandFailed(PolyphaseError):
    """A command ended with an error."""


def compose_command() -> list[str]:
    """Compose v2 if it is there, else docker-compose. Raises NotFound that says what is missing and how to get it."""
    if shutil.which("docker") is None:
        raise NotFound(f"there is no `docker`. {_HOW}")
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if engine.returncode:
        raise NotFound(f"Docker's engine does not answer: {engine.stderr.strip()[-200:]}. {_HOW}")
    if not subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        raise NotFound(f"there is neither `docker compose` nor `docker-compose`. {_HOW}")
    return ["docker-compose"]


def run(words: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 600.0) -> str:
    """What a command says. Raises CommandFailed with the end of what it said."""
    done = subprocess.run(
        words,
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise CommandFailed(f"{' '.join(words)} ended with code {done.returncode}:\n{said}")
    return done.stdout


class Project:
    """One compose project of its own name, with its environment."""

    def __init__(self, command: Sequence[str], name: str, env: Mapping[str, str]) -> None:
        self.name = name
        self.env = dict(env)
        self._words = [*command, "-p", name, "--profile", "cpu"]

    def compose(self, *words: str, timeout_s: float = 600.0) -> str:
        """`compose WORDS`. Raises CommandFailed."""
        return run([*self._words, *words], self.env, timeout_s)

    def containers(self, service: str = "", *, stopped: bool = True) -> list[dict[str, Any]]:
        """What `docker inspect` says of the project's containers, or of one service's."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", label)]
        ids = run(["docker", "ps", "-q", *(["-a"] if stopped else []), *filters]).split()
        found: list[dict[str, Any]] = json.loads(run(["docker", "inspect", *ids])) if ids else []
        return found

    def service_of(self, container: dict[str, Any]) -> str:
        """The name of its service."""
        return str(container["Config"]["Labels"]["com.docker.compose.service"])

    def ask(self, service: str, url: str) -> Any:
        """JSON of a URL, asked for within a service's container. Raises CommandFailed."""
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
        return json.loads(self.compose("exec", "-T", service, "python3", "-S", "-c", code))


def image_bytes(name: str) -> int:
    """Of all its layers."""
    return int(run(["docker", "image", "inspect", "-f", "{{.Size}}", name]))


def has_image(name: str) -> bool:
    """Whether it is on this machine, or came from its registry now."""
    if not subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode:
        return True
    try:
        pulled = subprocess.run(["docker", "pull", "-q", name], capture_output=True, check=False, timeout=600)
    except subprocess.TimeoutExpired:
        return False
    return not pulled.returncode


def until(condition: Any, timeout_s: float, what: str, poll_s: float = 0.5) -> Any:
    """What `condition` gives once it is true. Raises NotFound that says what did not happen."""
    end = time.monotonic() + timeout_s
    last: object = ""
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except (PolyphaseError, ValueError, OSError) as error:
            last = error
        time.sleep(poll_s)
    raise NotFound(f"{what}: not within {timeout_s:g} s. {last}")
