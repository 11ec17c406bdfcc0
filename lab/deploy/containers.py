"""Docker and compose as commands."""

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

import httpx

from shared.errors import EngineFailed, NotFound, PolyphaseError

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


# MERGED client.py
# A client of the suite's API.


PROMPT = "Tell me about the sea, and about all that lives in it."


@dataclass(frozen=True, slots=True)
class Client:
    """By its base URL and an API key."""

    url: str
    key: str

    def chat(self, max_tokens: int = 16, **more: Any) -> str:
        """One whole answer. Raises EngineFailed."""
        with self._http() as http:
            answer = http.post("/v1/chat/completions", json=_body(max_tokens, **more))
        if answer.status_code != 200:
            raise EngineFailed(f"HTTP {answer.status_code}: {answer.text[:300]}")
        return str(answer.json()["choices"][0]["message"]["content"])

    def stream(self, max_tokens: int, on_token: Callable[[int], None] | None = None) -> str:
        """A streamed answer's text; `on_token(n)` is called after the n-th piece. Raises EngineFailed."""
        text, pieces, ended = "", 0, False
        with (
            self._http() as http,
            http.stream("POST", "/v1/chat/completions", json=_body(max_tokens, stream=True)) as lines,
        ):
            if lines.status_code != 200:
                raise EngineFailed(f"HTTP {lines.status_code}: {lines.read().decode()[:300]}")
            for line in lines.iter_lines():
                said = line.removeprefix("data: ")
                if not line.startswith("data: "):
                    continue
                if said == "[DONE]":
                    ended = True
                    break
                event = json.loads(said)
                if "error" in event:
                    raise EngineFailed(f"the stream says: {event['error']}")
                if piece := event["choices"][0]["delta"].get("content"):
                    text, pieces = text + piece, pieces + 1
                    if on_token is not None:
                        on_token(pieces)
        if not ended:
            raise EngineFailed(f"the stream was cut after {pieces} pieces")
        return text

    def _http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120.0)


@dataclass(slots=True)
class Load:
    """Requests one after the other from a few threads, until it is closed: use as a context manager."""

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
            except (EngineFailed, httpx.HTTPError) as error:
                self.failed.append(f"{type(error).__name__}: {error}"[:200])
            else:
                self.whole += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)


def _body(max_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {
        "model": "demo",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


# MERGED seen.py
# What is seen of a suite in containers, from outside.


MONITOR = "http://127.0.0.1:8200"  # within its container
TOKEN = ("-e", "POLYPHASE_CLUSTER_TOKEN_FILE=/keys/cluster-token")  # of who changes something


class Seen:
    """Of one project."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def instances(self) -> dict[str, dict[str, Any]]:
        """What the monitor knows, by id."""
        return {each["instance_id"]: each for each in self._project.ask("monitor", f"{MONITOR}/instances")}

    def wait_instances(self, *, prefill: int, decode: int) -> dict[str, dict[str, Any]]:
        """Until exactly so many are ready in each role."""

        def ready() -> dict[str, dict[str, Any]]:
            found = {name: each for name, each in self.instances().items() if each["state"] == "ready"}
            roles = [each["role"] for each in found.values()]
            return found if (roles.count("prefill"), roles.count("decode")) == (prefill, decode) else {}

        found: dict[str, dict[str, Any]] = until(ready, 300, f"{prefill} prefill and {decode} decode instances ready")
        return found

    def rows(self) -> int:
        """Requests in the database."""
        query = [
            "psql",
            "-h",
            "/run/postgresql",
            "-U",
            "polyphase",
            "-tAc",
            "select count(*) from requests",
            "polyphase",
        ]
        return int(self._project.compose("exec", "-T", "postgres", *query))

    def all_healthy(self) -> bool:
        """Whether every container that runs is. Raises NotFound when one has failed."""
        states = {c["Name"]: c["State"] for c in self._project.containers()}
        failed = {name: s["ExitCode"] for name, s in states.items() if s["Status"] == "exited" and s["ExitCode"]}
        if failed:
            raise NotFound(f"containers ended: {failed}")
        return all(s["Health"]["Status"] == "healthy" for s in states.values() if s["Status"] != "exited")
