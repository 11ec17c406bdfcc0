"""Ray nodes on the loopback address of this machine, which can be added and lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.launcher.on_ray import stay_local

stay_local()
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray.cluster_utils import Cluster  # noqa: E402

_EACH: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20, "num_cpus": 4}


class RayNodes:
    """A head without room for instances, and nodes with the accelerators that they claim to have."""

    def __init__(self) -> None:
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**_EACH, "num_cpus": 0, "include_dashboard": False}
        )
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, **resources: float) -> str:
        """Start a node; returns its id."""
        node = self._cluster.add_node(resources=resources, **_EACH)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def lose(self, node_id: str) -> None:
        """Kill the processes of a node."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes()
    try:
        yield nodes
    finally:
        nodes._cluster.shutdown()
