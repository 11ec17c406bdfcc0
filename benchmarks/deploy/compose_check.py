"""`make compose-check`: tries compose.yaml with Docker, from the build to `down`, and reports each step.

Run as `python -m benchmarks.deploy.compose_check [--keep]`. Exit code 1: a step failed; 2: there is no Docker.
"""

import argparse
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable

from benchmarks.deploy.containers import (
    MONITOR,
    TOKEN,
    Client,
    Load,
    Observer,
    Project,
    compose_command,
    has_image,
    image_bytes,
    run,
    until,
)
from services.launcher.ports import free_range
from shared.errors import NotFound, PolyphaseError

IMAGE, POSTGRES, STAND_IN = "polyphase:check", "postgres:16", "polyphase-check-postgres:15"
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")  # this machine's, for the build only
LONG = 1000  # tokens of an answer that is disturbed: it takes a second to find the instance that decodes it
_FREEZE_WORKER = """
import os, psutil, signal
service, entry = "services.worker", "services.launcher.container"
lines = {p.pid: p.info["cmdline"] for p in psutil.process_iter(["cmdline"])}
(pid,) = (pid for pid, line in lines.items() if line[-1:] == [service] and entry not in line)
os.kill(pid, signal.SIGSTOP)
"""
CHOICES = ["blue", "green"]


class Check:
    """The steps, in their order; each returns what it saw, or raises."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.observer = Observer(project)
        self.client = Client("", "")
        self.reference = ""

    def build(self) -> str:
        """The image of all services."""
        given = [word for name in PIP if os.environ.get(name) for word in ("--build-arg", f"{name}={os.environ[name]}")]
        self.project.compose("build", *given, "gateway", timeout_s=3600)
        return ", ".join(
            f"{name} {image_bytes(name) / 1e9:.2f} GB" for name in (IMAGE, self.project.env["POSTGRES_IMAGE"])
        )

    def up(self) -> str:
        """All containers healthy after the schema upgrade, and an instance of each role."""
        port = free_range(start=33_000, stop=60_000, size=2)
        self.project.env |= {"POLYPHASE_PORT": str(port), "POLYPHASE_DASHBOARD_PORT": str(port + 1)}
        self.project.compose("up", "-d", timeout_s=1200)
        until(self.observer.all_healthy, 600, "all containers to be healthy")
        self.observer.wait_instances(prefill=1, decode=1)
        one_shot = {
            self.project.service_of(c): c["State"]
            for c in self.project.containers()
            if c["State"]["Status"] == "exited"
        }
        bad = {name: state["ExitCode"] for name, state in one_shot.items() if state["ExitCode"]}
        if set(one_shot) != {"keys", "migrate"} or bad:
            raise NotFound(f"keys and migrate should have ended with code 0: {one_shot.keys()}, {bad}")
        key = self.project.compose("exec", "-T", "gateway", "cat", "/api-keys/api-key").strip()
        self.client = Client(f"http://127.0.0.1:{port}", key)
        return f"{len(self.project.containers(stopped=False))} containers healthy"

    def chat(self) -> str:
        """Answers in one piece, streamed and by a grammar."""
        text = self.client.chat(24)
        self.reference = self.client.stream(LONG)
        if not text or not self.reference.startswith(text):
            raise NotFound(f"two answers to one prompt: {text!r} and {self.reference[:80]!r}")
        choice = self.client.chat(8, structured_outputs={"choice": CHOICES}, ignore_eos=False)
        if choice not in CHOICES:
            raise NotFound(f"a grammar of {CHOICES} let {choice!r} through")
        return f"{len(self.reference)} characters in {LONG} tokens"

    def scale(self) -> str:
        """`--scale decode=3`, without ids in a file."""
        self.project.compose("up", "-d", "--no-recreate", "--scale", "decode=3", timeout_s=1200)
        found = self.observer.wait_instances(prefill=1, decode=3)
        return ", ".join(sorted(found))

    def flip(self) -> str:
        """An instance takes the other role, and back, under load."""
        name = next(name for name, each in self.observer.instances().items() if each["role"] == "decode")
        with Load(self.client) as load:
            for prefill, decode in ((2, 2), (1, 3)):
                self.project.compose("exec", "-T", *TOKEN, "monitor", "polyphase", "flip", name, "--monitor", MONITOR)
                self.observer.wait_instances(prefill=prefill, decode=decode)
        _none_failed(load)
        return f"{name} twice; {load.whole} answers meanwhile, longest {load.longest_s:.1f} s"

    def kill(self) -> str:
        """`docker kill` of the instance that decodes an answer: the answer is the same as before."""
        return self._in_mid_stream(lambda container: run(["docker", "kill", container]))

    def drain(self) -> str:
        """`docker stop` of the instance that decodes an answer: it finishes the answer and ends with code 0."""
        exits: list[str] = []

        def stop(container: str) -> None:
            run(["docker", "stop", "-t", "80", container])
            exits.append(run(["docker", "inspect", "-f", "{{.State.ExitCode}}", container]).strip())

        result = self._in_mid_stream(stop)
        if exits != ["0"]:
            raise NotFound(f"after `docker stop` it ended with code {exits}")
        return f"{result}; exit code 0"

    def hang(self) -> str:
        """A container whose service is frozen ends and is restarted, under the same id."""
        container = self.project.containers("prefill")[0]
        before = container["RestartCount"]
        run(["docker", "exec", container["Id"], "python3", "-c", _FREEZE_WORKER])

        def again() -> bool:
            return bool(self.project.containers("prefill")[0]["RestartCount"] > before)

        began = time.monotonic()
        until(again, 60, "the frozen container to be restarted")
        restarted_s = time.monotonic() - began
        self.observer.wait_instances(prefill=1, decode=3)
        self.client.chat(4)
        return f"restarted after {restarted_s:.1f} s"

    def database(self) -> str:
        """PostgreSQL restarts under load: no request fails, and no row is lost."""
        before = self.observer.rows()
        with Load(self.client) as load:
            time.sleep(2.0)  # requests on both sides of the restart
            self.project.compose("restart", "postgres")
            time.sleep(4.0)
        _none_failed(load)
        wanted = before + load.whole
        until(lambda: self.observer.rows() >= wanted, 60, f"{wanted} rows of requests")
        written = self.observer.rows() - before
        return f"{load.whole} answers, longest {load.longest_s:.1f} s, none failed; {written} rows written"

    def down(self) -> str:
        """No container or volume is left."""
        self.project.compose("down", "-v", "--remove-orphans", timeout_s=300)
        left = run(["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={self.project.name}"])
        volumes = run(["docker", "volume", "ls", "-q", "--filter", f"name={self.project.name}_"])
        if left.strip() or volumes.strip():
            raise NotFound(f"left behind: containers {left.split()}, volumes {volumes.split()}")
        return ""

    def _in_mid_stream(self, act: Callable[[str], object]) -> str:
        """Act on the container that decodes a streamed answer, compare the answer, and start the container again."""
        acted: list[tuple[str, float]] = []

        def on_tokens(count: int) -> None:
            if count >= 5 and not acted:
                busy = next(name for name, each in self.observer.instances().items() if each["load"]["decoding"])
                container = busy.removeprefix("decode-")
                thread.append(_started(lambda: act(container)))
                acted.append((container, time.monotonic()))

        thread: list[threading.Thread] = []
        began = time.monotonic()
        text = self.client.stream(LONG, on_tokens)
        took = time.monotonic() - began
        if not acted:
            raise NotFound(f"the answer had ended before the container was found: {text!r}")
        thread[0].join()
        if text != self.reference:
            raise NotFound(f"the answer differs from the one before:\n{self.reference!r}\n{text!r}")
        stopped_s = time.monotonic() - acted[0][1]
        run(["docker", "start", acted[0][0]])
        self.observer.wait_instances(prefill=1, decode=3)
        return f"decode-{acted[0][0]}: gone after {stopped_s:.1f} s; the answer is the same, in {took:.1f} s"


def _started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _none_failed(load: Load) -> None:
    if load.failed or not load.whole:
        raise NotFound(f"{len(load.failed)} of {len(load.failed) + load.whole} requests failed: {load.failed[:3]}")


def main() -> None:
    """Run the steps until one fails, and remove what was started, unless with `--keep`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--keep", action="store_true", help="leave it running at the end, or where it failed")
    keep = options.parse_args().keep
    try:
        command = compose_command()
    except NotFound as error:
        print(f"compose-check: {error.message}", file=sys.stderr)
        sys.exit(2)
    print(f"with {' '.join(command)}, Docker {run(['docker', 'version', '-f', '{{.Server.Version}}']).strip()}")
    sys.exit(0 if _check(command, keep) else 1)


def _check(command: list[str], keep: bool) -> bool:
    env = {
        "POLYPHASE_IMAGE": IMAGE,
        "POLYPHASE_DTYPE": "float32",  # answers are compared letter by letter
        "POSTGRES_IMAGE": postgres_image(),
    }
    project = Project(command, f"polyphase-check-{secrets.token_hex(3)}", env)
    check = Check(project)
    steps = [
        check.build,
        check.up,
        check.chat,
        check.scale,
        check.flip,
        check.kill,
        check.drain,
        check.hang,
        check.database,
    ]
    whole = all(_step(step) for step in steps)
    if not whole:
        print(project.compose("logs", "--tail", "15")[-8000:], file=sys.stderr)
    if keep:
        print(f"left running: {' '.join(command)} -p {project.name} --profile cpu …")
        return whole
    return _step(check.down) and whole


def _step(step: Callable[[], str]) -> bool:
    began = time.monotonic()
    try:
        result = step()
    except (PolyphaseError, ValueError, KeyError, StopIteration, OSError) as error:
        print(f"✘ {step.__name__:9} {time.monotonic() - began:6.1f} s  {type(error).__name__}: {error}", flush=True)
        return False
    print(f"✔ {step.__name__:9} {time.monotonic() - began:6.1f} s  {result}", flush=True)
    return True


def postgres_image() -> str:
    """The official image; where it cannot be pulled, a stand-in with Debian's server."""
    if has_image(POSTGRES):
        return POSTGRES
    folder = os.path.join("benchmarks", "deploy", "postgres")
    run(["docker", "build", "-q", "-t", STAND_IN, folder], timeout_s=900)
    print(f"{POSTGRES} cannot be pulled here: {STAND_IN}, Debian's PostgreSQL, stands in for it")
    return STAND_IN


if __name__ == "__main__":
    main()
