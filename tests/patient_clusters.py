"""Clusters for a busy machine, on which any process may stand still for seconds.

Tests that count what happened to requests (imports of KV, the instances that served them) need a cluster on which
nothing else happens because a process was late: no instance counts as silent or lost, no decode leaves an instance
whose steps are slow, no request misses a target, and the steps of an operation may take long.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

PEERS = {"peer_silence_s": 20.0}
MONITOR = {"silence_s": 10.0, "rpc_timeout_s": 20.0, "verify_timeout_s": 20.0}
SECTIONS: dict[str, Any] = {
    **dict.fromkeys(("predictor", "planner", "instance_defaults"), PEERS),
    "scheduler": PEERS | {"lost_after_s": 60.0},
    "launcher": {"hang_s": 30.0},
    "monitor": PEERS | MONITOR,
    "gateway": PEERS | {"patience_s": 60.0, "slo": {"default": {"ttft_s": 600.0, "tpot_s": 600.0}}},
}


def patient(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a cluster file with these settings, where it has none of its own."""
    return deepcopy(_merged(SECTIONS, cluster))


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(under[key], over[key]) for key in under.keys() & over.keys() if isinstance(under[key], dict)}
    return {**under, **over, **both}
