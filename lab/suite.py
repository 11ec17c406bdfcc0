"""Suites of services that the lab starts on this machine: cluster files, free ports, start and stop."""

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from services.launcher import ports
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite, running_suite

DEMO_MODEL = PROJECT / "models" / "demo"
_GATEWAY, _DASHBOARD = 240, 241  # offsets in a range of free ports
_MIB = 1 << 20

# Services that are not measured would take cores from those that are.
BARE: dict[str, Any] = {
    "model": str(DEMO_MODEL),
    "served_model_name": "demo",
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
    with tempfile.TemporaryDirectory(prefix="polyphase-lab-") as temporary:
        async with running_suite(
            on_free_ports(cluster), folder or Path(temporary), console or Console(stderr=True)
        ) as running:
            yield running
