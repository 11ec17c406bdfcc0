"""Suites and processes that benchmarks start on this machine: cluster files, free ports, start and stop."""

import multiprocessing
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from services.launcher import ports
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite, running_suite
from shared.errors import Unavailable

DEMO_MODEL = PROJECT / "models" / "demo"
_GATEWAY, _DASHBOARD = 240, 241  # offsets in a range of free ports
_MIB = 1 << 20
Found = TypeVar("Found")

# Services that are not measured would take cores from those that are.
BARE: dict[str, Any] = {
    "model": str(DEMO_MODEL),
    "served_model_name": "demo",
    "max_model_len": 2048,
    "predictor": {"enabled": False},
    "planner": {"enabled": False},
    "dashboard": {"enabled": False},
}
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
