"""The Ray cluster that the instances run on: one that is there, or one on this machine."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from services.launcher.cluster_file import Cluster
from services.launcher.keys import curve_pair
from shared.errors import InvalidRequest, Unavailable

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
_HEAD = "ray"  # the name of the control plane's host


@contextmanager
def connected(address: str) -> Iterator[str]:
    """The address of this host in that Ray cluster, for the block's length. Raises Unavailable.

    address: of its head, HOST:PORT; `auto`: one that runs on this machine; empty: a new one, of this machine alone.
    """
    if address not in ("", "auto"):
        _answers(address)
    here = {} if address else {"include_dashboard": False}
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",
            namespace=f"polyphase-{os.getpid()}",
            log_to_driver=False,
            configure_logging=False,
            **here,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unavailable(f"no Ray cluster at {address or 'this machine'}: {error}") from error
    signal.signal(signal.SIGTERM, ours)  # Ray's own would end this process at once
    try:
        yield _address_here()
    finally:
        ray.shutdown()


def _answers(address: str) -> None:
    """Raises Unavailable: Ray itself goes on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise Unavailable(f"no Ray cluster answers at {address!r}: {error}; HOST:PORT of its head is wanted") from error


def placed_at(cluster: Cluster, address: str) -> Cluster:
    """The file, with the control plane at that address: encrypted where others reach it.

    Raises InvalidRequest for a file that places instances on hosts itself.
    """
    if cluster.hosts:
        raise InvalidRequest("hosts: with --on ray Ray places the instances: leave `hosts` and `control` out")
    if cluster.predictor.beside:
        raise InvalidRequest("predictor.beside: with --on ray nothing runs beside instances: leave it out")
    if address == LOOPBACK:
        return cluster
    keys = {} if cluster.curve_public else curve_pair()
    return cluster.model_copy(update={"hosts": {_HEAD: address}, "control": _HEAD, **keys})


def _address_here() -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
