"""Instances as Ray actors: Ray finds their nodes and accelerators, and starts them again. Nobody else imports it."""

import os

_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # heeded everywhere, whatever its name says


def stay_local() -> None:
    """A Ray that is started from here on listens on loopback only. Has to be said before Ray is imported."""
    os.environ.setdefault(_CLUSTERS, "0")
