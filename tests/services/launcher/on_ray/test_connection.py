"""Which Ray cluster, and where the control plane is then."""

import socket
import time
from pathlib import Path

import pytest

from services.launcher.cluster_file import load_cluster
from services.launcher.on_ray.suite import connected, placed_at
from shared.errors import InvalidRequest, Unavailable


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with (
            pytest.raises(Unavailable, match=r"no Ray cluster answers at"),
            connected(f"127.0.0.1:{held.getsockname()[1]}"),
        ):
            pass
    assert time.monotonic() - began < 30  # Ray itself tries for minutes


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(Unavailable, match=r"'somewhere': .*give HOST:PORT of its head"), connected("somewhere"):
        pass


def test_on_this_machine_the_file_stays_as_it_is() -> None:
    cluster = load_cluster(Path("laptop"))
    assert placed_at(cluster, "127.0.0.1") is cluster


def test_elsewhere_the_control_plane_is_at_that_address_and_encrypted() -> None:
    placed = placed_at(load_cluster(Path("laptop")), "10.0.0.7")
    assert placed.hosts == {placed.control: "10.0.0.7"}
    assert placed.curve_public
    assert placed.curve_secret
    own = placed.model_copy(update={"hosts": {}, "control": ""})
    assert placed_at(own, "10.0.0.8").curve_secret == own.curve_secret


def test_a_file_that_places_instances_itself_is_refused() -> None:
    cluster = load_cluster(Path("laptop")).model_copy(update={"hosts": {"a": "10.0.0.1"}, "control": "a"})
    with pytest.raises(InvalidRequest, match="Ray places the instances"):
        placed_at(cluster, "10.0.0.1")


def test_predictors_beside_instances_are_refused() -> None:
    cluster = load_cluster(Path("laptop"))
    beside = cluster.model_copy(update={"predictor": cluster.predictor.model_copy(update={"beside": "prefill"})})
    with pytest.raises(InvalidRequest, match=r"predictor\.beside: with --on ray"):
        placed_at(beside, "127.0.0.1")


def test_data_parallel_ranks_are_refused() -> None:
    cluster = load_cluster(Path("laptop"))
    ranks = cluster.model_copy(update={"instances": (cluster.instances[0].model_copy(update={"data_parallel": 2}),)})
    with pytest.raises(InvalidRequest, match=r"instances\.prefill-0\.data_parallel: ranks meet on one host"):
        placed_at(ranks, "127.0.0.1")
