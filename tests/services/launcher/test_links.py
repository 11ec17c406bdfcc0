"""Paths between emulated instances on nodes, as the launcher hands them to workers."""

from typing import Any

import pytest

from services.launcher.cluster_file import Cluster
from services.launcher.plan import links_between
from shared.errors import InvalidRequest


def cluster(network: dict[str, Any] | None, *nodes: str, **more: Any) -> Cluster:
    entry = {"role": "decode", "engine": "emulated", "accelerator": "A10", **more}
    rows = [{"id": f"i{at}", "node": node, **entry} for at, node in enumerate(nodes)]
    return Cluster.model_validate({"name": "c", "model": "m", "network": network, "instances": rows})


def test_each_hears_of_the_others_paths_alone() -> None:
    links = links_between(cluster({"inside": {"gbps": 100}, "between": {"gbps": 10}}, "a", "a", "b"), "c.yaml")
    assert {peer: entry.gbps for peer, entry in links["i0"].items()} == {"i1": 100.0, "i2": 10.0}
    assert {peer: entry.gbps for peer, entry in links["i2"].items()} == {"i0": 10.0, "i1": 10.0}


def test_without_nodes_there_are_no_paths() -> None:
    assert links_between(cluster(None, "", ""), "c.yaml") == {}


def test_real_engines_have_real_links() -> None:
    assert links_between(cluster({"between": {"gbps": 10}}, "a", "b", engine="vllm"), "c.yaml") == {}


def test_nodes_without_a_path_or_a_network_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"c\.yaml: network: no link between the nodes"):
        links_between(cluster({"inside": {"gbps": 1}}, "a", "b"), "c.yaml")
    with pytest.raises(ValueError, match=r"instances\.0\.node: the file has no `network`"):
        cluster(None, "a")


def test_exceptions_may_name_nodes_of_real_engines() -> None:
    network = {"inside": {"gbps": 100}, "between": {"gbps": 10}, "pairs": [{"nodes": ["a", "b"], "gbps": 1}]}
    assert links_between(cluster(network, "a", "b", engine="vllm"), "c.yaml") == {}
