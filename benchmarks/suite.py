"""Suites and processes that benchmarks start on this machine: cluster files, free ports, start and stop, commands;
and the records that a suite keeps of requests, found by the client's request id.
"""

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from services.launcher import ports
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.model_source import PROJECT
from services.launcher.suite import Suite, until
from services.launcher.up import RunningSuite, running_suite
from shared.domain.kv import TransferOutcome
from shared.errors import DeadlineExceeded, NotFound, PolyphaseError, Unavailable
from shared.timeline import RequestTimeline
from shared.wire.api.scheduler import RequestRow

DEMO_MODEL = PROJECT / "models" / "demo"
_GATEWAY, _DASHBOARD = 240, 241  # offsets in a range of free ports
_MIB = 1 << 20
_RECORDED_S = 10.0  # the longest time until a job that has ended is recorded
Found = TypeVar("Found")

# Services that are not measured would take cores from those that are.
BARE: dict[str, object] = {
    "model": str(DEMO_MODEL),
    "served_model_name": "demo",
    "max_model_len": 2048,
    "predictor": {"enabled": False},
    "planner": {"enabled": False},
    "dashboard": {"enabled": False},
}
CPU_ENGINE: dict[str, object] = {
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


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, as its scheduler knows it."""

    row: RequestRow
    timeline: RequestTimeline

    @property
    def split(self) -> int:
        """Prompt tokens that the prefill instance computed."""
        return self.row.split

    @property
    def outcomes(self) -> list[str]:
        """How each of its KV imports ended."""
        return [transfer.outcome.value for transfer in self.timeline.transfers]

    @property
    def pulled(self) -> bool:
        """Whether it had a single import, which was pulled whole."""
        return self.outcomes == [TransferOutcome.PULLED.value]

    @property
    def attempts(self) -> int:
        return max((span.attempt for span in self.timeline.spans), default=0)


async def find_row(suite: Suite, request_id: str, phase: str = "") -> RequestRow:
    """The newest row of a request, if it is in that phase. Raises NotFound."""
    for scheduler in suite.schedulers():
        async with scheduler:
            for row in await scheduler.requests(limit=2_000, phase=phase):
                if request_id in row.job_id:
                    return row
    raise NotFound(f"no scheduler knows of {request_id}")


async def records(suite: Suite, request_ids: Sequence[str], at_least: int | None = None) -> list[JobRecord]:
    """The ended jobs of these requests, in their order. Raises DeadlineExceeded when some do not show up.

    at_least: return once there are so many, and those that there are when they stay fewer: a client may leave before
    its job has begun.
    """
    found: dict[str, JobRecord] = {}

    async def recorded() -> bool:
        for scheduler in suite.schedulers():
            async with scheduler:
                for row in await scheduler.requests(limit=5_000):
                    name = next((one for one in request_ids if one not in found and one in row.job_id), None)
                    if name is not None and row.phase.final:
                        found[name] = JobRecord(row, await scheduler.timeline(row.job_id))
        return len(found) >= (len(request_ids) if at_least is None else at_least)

    with suppress(*(() if at_least is None else (DeadlineExceeded,))):
        await until(recorded, _RECORDED_S, f"the records of {len(request_ids)} jobs")
    return [found[request_id] for request_id in request_ids if request_id in found]
