"""Suites, processes and commands that benchmarks start on this machine, and how they wait for them."""

import asyncio
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rich.console import Console

from services.launcher import ports
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.model_source import PROJECT
from services.launcher.suite import POLL_S, until
from services.launcher.up import RunningSuite, running_suite
from shared.errors import PolyphaseError, Unavailable

DEMO_MODEL = PROJECT / "models" / "demo"
_GATEWAY, _DASHBOARD = 240, 241  # offsets in a range of free ports
_MIB = 1 << 20
Found = TypeVar("Found")

DEMO: dict[str, Any] = {
    "model": str(DEMO_MODEL),
    "served_model_name": "demo",
    "max_model_len": 2048,
    "dashboard": {"enabled": False},
}
# Services that are not measured would take cores from those that are.
BARE: dict[str, Any] = {**DEMO, "predictor": {"enabled": False}, "planner": {"enabled": False}}
# A prefill instance computes each prompt, and a decode instance the tokens: KV is handed over.
SPLIT = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}
CPU_ENGINE: dict[str, Any] = {
    "engine": "vllm",
    "accelerator": "cpu",
    "dtype": "float32",
    "kv_cache_bytes": 192 * _MIB,
    "staging_bytes": 128 * _MIB,
    "inbox_bytes": 128 * _MIB,
    "threads": 1,
}


def on_free_ports(cluster: Cluster) -> Cluster:
    """The same cluster on ports that no process uses."""
    base = ports.free_range()
    gateway = cluster.gateway.model_copy(update={"port": base + _GATEWAY})
    dashboard = cluster.dashboard.model_copy(update={"port": base + _DASHBOARD})
    return cluster.model_copy(update={"ports": base, "gateway": gateway, "dashboard": dashboard})


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


@asynccontextmanager
async def started(
    cluster: Cluster | Mapping[str, Any] | Path, folder: Path | None = None, console: Console | None = None
) -> AsyncIterator[RunningSuite]:
    """A cluster (also the content or the path of a cluster file) on free ports, ready to serve, for the block's length.

    folder: keeps the suite's data; without one the data goes with the suite. Raises what `running_suite` raises.
    """
    if isinstance(cluster, Path):
        cluster = load_cluster(cluster)
    elif not isinstance(cluster, Cluster):
        cluster = Cluster.model_validate(cluster)
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as temporary:
        async with running_suite(
            on_free_ports(cluster), folder or Path(temporary), console or Console(stderr=True)
        ) as running:
            yield running


async def measured(
    cluster: Cluster | Mapping[str, Any] | Path,
    work: Callable[[RunningSuite], Coroutine[Any, Any, Found]],
    folder: Path | None = None,
) -> Found:
    """The result of `work` on a suite of that cluster; ends early if a process of the suite fails for good."""
    async with started(cluster, folder) as running:
        return await running.supervisor.during(work(running))


class CommandFailed(PolyphaseError):
    """A command ended with an error."""


def run_command(
    words: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 600.0, folder: Path = PROJECT
) -> str:
    """The output of a command. Raises CommandFailed with the end of it, also when it takes too long."""
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **(env or {})},
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(words)} did not end within {timeout_s:.0f} s") from error
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[-2000:]
        raise CommandFailed(f"{' '.join(words)} ended with code {done.returncode}:\n{output}")
    return done.stdout


def metric(exposition: str, name: str) -> float:
    """The sum of a metric's series in the text of a `/metrics`. Raises Unavailable where there is none."""
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", exposition, re.MULTILINE)
    if not found:
        raise Unavailable(f"the metrics lack {name}")
    return sum(map(float, found))


def counts(exposition: str, name: str, label: str) -> Counter[str]:
    """By the value of a label, what a metric has counted, in the text of a `/metrics`; without zeros."""
    found: Counter[str] = Counter()
    for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", exposition, re.MULTILINE):
        if (named := re.search(rf'{label}="([^"]*)"', labels)) and float(value):
            found[named[1]] += int(float(value))
    return found


@contextmanager
def spawned(target: Callable[..., None], *arguments: object, end_s: float = 10.0) -> Iterator[Connection]:
    """A pipe to a child process that runs `target(pipe, *arguments)`; None on the pipe ends it."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target, args=(there, *arguments), daemon=True)
    child.start()
    there.close()
    try:
        yield here
    finally:
        with suppress(OSError):
            here.send(None)
        child.join(end_s)
        if child.is_alive():
            child.kill()
            child.join()


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run this work until the block ends; then it is cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_found(
    find: Callable[[], Awaitable[Found | None]], timeout_s: float, what: str, poll_s: float = POLL_S
) -> Found:
    """The first result of `find` that is not None. Raises DeadlineExceeded that names `what`."""
    found: Found | None = None

    async def is_there() -> bool:
        nonlocal found
        found = await find()
        return found is not None

    await until(is_there, timeout_s, what, poll_s)
    assert found is not None
    return found
