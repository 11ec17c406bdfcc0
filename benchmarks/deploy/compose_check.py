"""`make compose-check`: tries compose.yaml with Docker, from the build to `down`, and reports each step.

Run as `python -m benchmarks.deploy.compose_check [--keep]`. Exit code 1: a step failed; 2: there is no Docker.
"""

import argparse
import asyncio
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console

from benchmarks.demo.checked_suite import lose_in_stream, under_load
from benchmarks.demo.report import Check, Report, Section
from benchmarks.deploy.containers import MONITOR, TOKEN, Project, compose_command, docker, postgres_image
from benchmarks.suite import until_found
from services.launcher.ports import free_range
from services.launcher.suite import until
from tools.client import ApiClient, Ask, Response

IMAGE = "polyphase:check"
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")  # this machine's, for the build only
PROMPT = "Tell me about the sea, and about all that lives in it."
LONG = 1000  # tokens of an answer that is disturbed: it takes a second to find the instance that decodes it
CHOICES = ["blue", "green"]
_FREEZE_WORKER = """
import os, psutil, signal
service, entry = "services.worker", "services.launcher.container"
lines = {p.pid: p.info["cmdline"] for p in psutil.process_iter(["cmdline"])}
(pid,) = (pid for pid, line in lines.items() if line[-1:] == [service] and entry not in line)
os.kill(pid, signal.SIGSTOP)
"""


@dataclass(slots=True)
class ComposeSuite:
    """The compose project, and its API once it is up. reference: an undisturbed answer of LONG tokens."""

    project: Project
    stack: AsyncExitStack
    url: str = ""
    key: str = ""
    api: ApiClient = field(init=False)
    reference: Response = field(init=False)


def _ask(tokens: int) -> Ask:
    return Ask(PROMPT, tokens, f"check-{uuid.uuid4().hex[:12]}")


async def build(checked: ComposeSuite, section: Section) -> None:
    given = [word for name in PIP if os.environ.get(name) for word in ("--build-arg", f"{name}={os.environ[name]}")]
    checked.project.compose("build", *given, "gateway", timeout_s=3600)
    for name in (IMAGE, checked.project.env["POSTGRES_IMAGE"]):
        size = int(docker("image", "inspect", "-f", "{{.Size}}", name))
        section.lines.append(f"{name} {size / 1e9:.2f} GB")


async def up(checked: ComposeSuite, section: Section) -> None:
    """All containers healthy after the schema upgrade, and an instance of each role."""
    project, port = checked.project, free_range(start=33_000, stop=60_000, size=2)
    project.env |= {"POLYPHASE_PORT": str(port), "POLYPHASE_DASHBOARD_PORT": str(port + 1)}
    project.compose("up", "-d", timeout_s=1200)
    await until(project.all_healthy, 600, "all containers to be healthy", poll_s=0.5)
    await project.until_ready(prefill=1, decode=1)
    section.equal("exit codes of keys and migrate", {"keys": 0, "migrate": 0}, project.one_shots())
    checked.url = f"http://127.0.0.1:{port}"
    checked.key = project.compose("exec", "-T", "gateway", "cat", "/api-keys/api-key").strip()
    checked.api = await checked.stack.enter_async_context(ApiClient(checked.url, "demo", checked.key))
    section.lines.append(f"{len(project.containers(stopped=False))} containers healthy")


async def answers(checked: ComposeSuite, section: Section) -> None:
    text = (await checked.api.complete(_ask(24))).text
    checked.reference = await checked.api.stream(_ask(LONG))
    same = bool(text) and checked.reference.text.startswith(text)
    section.check("two answers to one prompt agree", same, text, checked.reference.text[:80])
    choice = await checked.api.chat(PROMPT, 8, structured_outputs={"choice": CHOICES}, temperature=0)
    content = choice["choices"][0]["message"]["content"]
    section.check("a grammar is followed", content in CHOICES, CHOICES, content)


async def scale(checked: ComposeSuite, section: Section) -> None:
    checked.project.compose("up", "-d", "--no-recreate", "--scale", "decode=3", timeout_s=1200)
    section.lines.append(", ".join(await checked.project.until_ready(prefill=1, decode=3)))


async def flip(checked: ComposeSuite, section: Section) -> None:
    project = checked.project
    name, *_ = (name for name, each in (await project.instances()).items() if each["role"] == "decode")
    command = ("exec", "-T", *TOKEN, "monitor", "polyphase", "flip", name, "--monitor", MONITOR)
    async with under_load(section, checked.url, "demo", 2, checked.key):
        for prefill, decode in ((2, 2), (1, 3)):
            await asyncio.to_thread(project.compose, *command)
            await project.until_ready(prefill=prefill, decode=decode)
    section.lines.append(f"{name} twice")


async def kill(checked: ComposeSuite, section: Section) -> None:
    await _in_mid_stream(checked, section, partial(docker, "kill"))


async def drain(checked: ComposeSuite, section: Section) -> None:
    """`docker stop` of the instance that decodes an answer: it finishes the answer and ends with code 0."""

    def stop(container: str) -> None:
        docker("stop", "-t", "80", container)
        code = docker("inspect", "-f", "{{.State.ExitCode}}", container).strip()
        section.equal("exit code after `docker stop`", "0", code)

    await _in_mid_stream(checked, section, stop)


async def _in_mid_stream(checked: ComposeSuite, section: Section, act: Callable[[str], object]) -> None:
    """Act on the container that decodes a streamed answer, compare the answer, and start the container again."""

    async def decoding() -> str | None:
        found = await checked.project.instances()
        return next((name for name, each in found.items() if each["load"]["decoding"]), None)

    async def decode_instance(_: Ask) -> str:
        return await until_found(decoding, 30, "an instance to decode the answer")

    def lose(name: str) -> None:
        began = time.monotonic()
        act(name.removeprefix("decode-"))
        section.lines.append(f"{name}: gone after {time.monotonic() - began:.1f} s")

    victim = await lose_in_stream(
        checked.api, section, [_ask(LONG)], [checked.reference], decode_instance, lose, after=5
    )
    docker("start", victim.removeprefix("decode-"))
    await checked.project.until_ready(prefill=1, decode=3)


async def hang(checked: ComposeSuite, section: Section) -> None:
    """A container whose service is frozen ends and is restarted, under the same id."""
    (container, *_) = checked.project.containers("prefill")
    docker("exec", container["Id"], "python3", "-c", _FREEZE_WORKER)
    began = time.monotonic()

    def again() -> bool:
        return bool(checked.project.containers("prefill")[0]["RestartCount"] > container["RestartCount"])

    await until(again, 60, "the frozen container to be restarted", poll_s=0.5)
    section.lines.append(f"restarted after {time.monotonic() - began:.1f} s")
    await checked.project.until_ready(prefill=1, decode=3)
    await checked.api.complete(_ask(4))


async def database(checked: ComposeSuite, section: Section) -> None:
    """PostgreSQL restarts under load: no request fails, and no row is lost."""
    before = checked.project.rows()
    async with under_load(section, checked.url, "demo", 2, checked.key) as load:
        await asyncio.sleep(2.0)  # requests on both sides of the restart
        await asyncio.to_thread(checked.project.compose, "restart", "postgres")
        await asyncio.sleep(4.0)
    wanted = before + len(load.requests) + load.served  # one of each kind was sent before, to learn the right answer
    await until(lambda: checked.project.rows() >= wanted, 60, f"{wanted} rows of requests", poll_s=0.5)
    section.lines.append(f"{checked.project.rows() - before} rows written")


async def down(checked: ComposeSuite, section: Section) -> None:
    """No container or volume is left."""
    name = checked.project.name
    checked.project.compose("down", "-v", "--remove-orphans", timeout_s=300)
    containers = docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={name}")
    section.equal("containers left", [], containers.split())
    volumes = docker("volume", "ls", "-q", "--filter", f"name={name}_")
    section.equal("volumes left", [], volumes.split())


CHECKS: dict[str, Check[ComposeSuite]] = {
    "The image of all services is built": build,
    "compose brings the suite up": up,
    "It answers": answers,
    "It scales to three decode instances": scale,
    "An instance flips its role, and back, under load": flip,
    "docker kill of the instance that decodes an answer": kill,
    "docker stop of the instance that decodes an answer": drain,
    "A container whose service is frozen is restarted": hang,
    "PostgreSQL restarts under load": database,
}


async def check(project: Project, report: Report, *, keep: bool) -> None:
    """Run the checks until one fails, and remove what was started, unless with `keep`."""
    async with AsyncExitStack() as stack:
        checked = ComposeSuite(project, stack)
        await report.run(CHECKS, checked, stop=True)
        if not report.ok:
            print(project.compose("logs", "--tail", "15")[-8000:], file=sys.stderr)
        if keep:
            print(f"left running: compose project {project.name}, --profile cpu")
        else:
            await report.run({"compose takes the suite down": down}, checked)
    report.summarise()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--keep", action="store_true", help="leave it running at the end, or where it failed")
    keep = options.parse_args().keep
    command = compose_command("compose-check")
    print(f"with {' '.join(command)}, Docker {docker('version', '-f', '{{.Server.Version}}').strip()}")
    # float32, because answers are compared letter by letter.
    env = {"POLYPHASE_IMAGE": IMAGE, "POLYPHASE_DTYPE": "float32", "POSTGRES_IMAGE": postgres_image()}
    report = Report(Console())
    asyncio.run(check(Project(command, f"polyphase-check-{secrets.token_hex(3)}", env), report, keep=keep))
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
