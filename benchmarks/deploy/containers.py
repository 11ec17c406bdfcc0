"""Suites in containers: Docker and compose as commands, a client of the API, and the suite as seen from outside."""

import asyncio
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.errors import EngineFailed, NotFound, PolyphaseError
from tools.client import CHAT, Ending, Request, send

ROOT = Path(__file__).parents[2]
_HOW = (
    "Docker's engine is needed: Docker Desktop, or Docker Engine with the compose plugin "
    "(https://docs.docker.com/engine/install); on Debian: apt-get install docker.io docker-compose"
)


class CommandFailed(PolyphaseError):
    """A command ended with an error."""


def compose_command() -> list[str]:
    """Compose v2, else docker-compose. Raises NotFound that says what is missing and how to install it."""
    if shutil.which("docker") is None:
        raise NotFound(f"`docker` is not installed. {_HOW}")
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if engine.returncode:
        raise NotFound(f"Docker's engine does not answer: {engine.stderr.strip()[-200:]}. {_HOW}")
    if not subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        raise NotFound(f"neither `docker compose` nor `docker-compose` is installed. {_HOW}")
    return ["docker-compose"]


def run(words: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 600.0) -> str:
    """The output of a command. Raises CommandFailed with the end of it."""
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
        output = (done.stdout + done.stderr).strip()[-2000:]
        raise CommandFailed(f"{' '.join(words)} ended with code {done.returncode}:\n{output}")
    return done.stdout


class Project:
    """A compose project with a name and an environment of its own."""

    def __init__(self, command: Sequence[str], name: str, env: Mapping[str, str]) -> None:
        self.name = name
        self.env = dict(env)
        self._words = [*command, "-p", name, "--profile", "cpu"]

    def compose(self, *words: str, timeout_s: float = 600.0) -> str:
        """`compose WORDS`. Raises CommandFailed."""
        return run([*self._words, *words], self.env, timeout_s)

    def containers(self, service: str = "", *, stopped: bool = True) -> list[dict[str, Any]]:
        """`docker inspect` of the project's containers, or of those of a service."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", label)]
        ids = run(["docker", "ps", "-q", *(["-a"] if stopped else []), *filters]).split()
        found: list[dict[str, Any]] = json.loads(run(["docker", "inspect", *ids])) if ids else []
        return found

    def service_of(self, container: dict[str, Any]) -> str:
        return str(container["Config"]["Labels"]["com.docker.compose.service"])

    def get_json(self, service: str, url: str) -> Any:
        """The JSON of a URL, requested inside a service's container. Raises CommandFailed."""
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
        return json.loads(self.compose("exec", "-T", service, "python3", "-S", "-c", code))


def image_bytes(name: str) -> int:
    return int(run(["docker", "image", "inspect", "-f", "{{.Size}}", name]))


def has_image(name: str) -> bool:
    """Whether an image is on this machine; pulls it if not."""
    if not subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode:
        return True
    try:
        pulled = subprocess.run(["docker", "pull", "-q", name], capture_output=True, check=False, timeout=600)
    except subprocess.TimeoutExpired:
        return False
    return not pulled.returncode


def until(condition: Any, timeout_s: float, what: str, poll_s: float = 0.5) -> Any:
    """The value of `condition` once it is true. Raises NotFound that says what was awaited."""
    end = time.monotonic() + timeout_s
    last: object = ""
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except (PolyphaseError, ValueError, OSError) as error:
            last = error
        time.sleep(poll_s)
    raise NotFound(f"waited {timeout_s:g} s for {what}. {last}")


PROMPT = "Tell me about the sea, and about all that lives in it."


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the suite's API, by base URL and API key."""

    url: str
    key: str

    def chat(self, max_tokens: int = 16, **more: Any) -> str:
        """The text of an answer in one piece. Raises EngineFailed."""
        return self._send(max_tokens, more)

    def stream(self, max_tokens: int, on_tokens: Callable[[int], None] | None = None) -> str:
        """The text of a streamed answer; `on_tokens(n)` is called when n tokens have come. Raises EngineFailed."""
        return self._send(max_tokens, {"stream": True}, on_tokens)

    def _send(self, max_tokens: int, more: dict[str, Any], on_tokens: Callable[[int], None] | None = None) -> str:
        url = urlsplit(self.url)
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        request = Request(CHAT, body, api_key=self.key)
        note = None if on_tokens is None else lambda response: on_tokens(len(response.tokens))
        response = asyncio.run(send((url.hostname or "", url.port or 80), request, 120.0, note))
        if response.ending is not Ending.DONE:
            count = len(response.tokens)
            raise EngineFailed(f"HTTP {response.status}, {response.ending} after {count} tokens: {response.error}")
        return response.text


@dataclass(slots=True)
class Load:
    """Requests one after the other from a few threads. Use as a context manager."""

    client: Client
    threads: int = 2
    whole: int = 0
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    _end: threading.Event = field(default_factory=threading.Event)
    _running: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._running = [threading.Thread(target=self._go) for _ in range(self.threads)]
        for each in self._running:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for each in self._running:
            each.join()

    def _go(self) -> None:
        while not self._end.is_set():
            began = time.monotonic()
            try:
                self.client.chat(8)
            except EngineFailed as error:
                self.failed.append(str(error)[:200])
            else:
                self.whole += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)


MONITOR = "http://127.0.0.1:8200"  # within its container
TOKEN = ("-e", "POLYPHASE_CLUSTER_TOKEN_FILE=/keys/cluster-token")  # for commands that change something


class Observer:
    """The suite of a project, as seen from outside."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def instances(self) -> dict[str, dict[str, Any]]:
        """The monitor's instances, by id."""
        return {each["instance_id"]: each for each in self._project.get_json("monitor", f"{MONITOR}/instances")}

    def wait_instances(self, *, prefill: int, decode: int) -> dict[str, dict[str, Any]]:
        """Wait until exactly so many are ready in each role; returns them. Raises NotFound."""

        def ready() -> dict[str, dict[str, Any]]:
            found = {name: each for name, each in self.instances().items() if each["state"] == "ready"}
            roles = [each["role"] for each in found.values()]
            return found if (roles.count("prefill"), roles.count("decode")) == (prefill, decode) else {}

        found: dict[str, dict[str, Any]] = until(ready, 300, f"{prefill} prefill and {decode} decode instances ready")
        return found

    def rows(self) -> int:
        """The number of requests in the database."""
        query = ["psql", "-h", "/run/postgresql", "-U", "polyphase", "-tAc"]
        query += ["select count(*) from requests", "polyphase"]
        return int(self._project.compose("exec", "-T", "postgres", *query))

    def all_healthy(self) -> bool:
        """Whether all containers that run are healthy. Raises NotFound when one has failed."""
        states = {c["Name"]: c["State"] for c in self._project.containers()}
        failed = {name: s["ExitCode"] for name, s in states.items() if s["Status"] == "exited" and s["ExitCode"]}
        if failed:
            raise NotFound(f"containers ended: {failed}")
        return all(s["Health"]["Status"] == "healthy" for s in states.values() if s["Status"] != "exited")
