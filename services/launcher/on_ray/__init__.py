"""Instances as Ray actors: Ray chooses nodes and accelerators, and restarts them. No other package imports Ray."""

import os

_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # applies to all systems, despite its name


def stay_local() -> None:
    """Make a Ray cluster that this process starts listen on loopback only. Call before Ray is imported."""
    os.environ.setdefault(_CLUSTERS, "0")
