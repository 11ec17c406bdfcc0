"""Inventories: alike nodes, losses, links that are missing; and their files."""

from pathlib import Path

import pytest

from shared.errors import InvalidRequest, NotFound
from shared.plan.inventory import read_inventory, write_inventory
from tests.shared.plan.problems import inventory

TWINS = (("a", "A10", 4), ("b", "A10", 4), ("c", "A40", 2))


def test_nodes_that_can_change_places_are_alike() -> None:
    assert inventory(*TWINS).alike == (0, 0, 1)
    assert inventory(*TWINS, a_c=5.0).alike == (0, 1, 2)  # one of them is further away
    assert inventory(*TWINS, a_c=5.0, b_c=5.0).alike == (0, 0, 1)
    assert inventory(("a", "A10", 4), ("b", "A10", 2)).alike == (0, 1)


def test_what_is_lost_is_gone() -> None:
    left = inventory(*TWINS).without({("a", "A10"): 3, ("c", "A40"): 2})
    assert [str(pool) for pool in left.pools] == ["1 x A10 on a", "4 x A10 on b"]
    assert left.accelerators == 5
    with pytest.raises(NotFound, match="no 3 x A40 on c; known: 4 x A10 on a"):
        inventory(*TWINS).without({("c", "A40"): 3})


def test_a_cut_network_is_named_with_its_parts() -> None:
    cut = inventory(*TWINS, a_c=0.0, b_c=0.0)
    assert cut.islands() == (("a", "b"), ("c",))
    with pytest.raises(InvalidRequest, match=r"no link between the nodes 'a' and 'c'.* a, b \| c: plan each part"):
        cut.require_joined()
    with pytest.raises(InvalidRequest, match="add a link"):
        inventory(*TWINS, a_c=0.0).require_joined()


FILE = """
name: mine
nodes:
  - {name: old, replicas: 2, accelerator: A10, count: 4, price_usd_hour: 0.5}
  - {name: mixed, devices: [{accelerator: A40, count: 2, host_kv_bytes: 64000000000}, {accelerator: L4, count: 1}]}
network: {between: {gbps: 25}, pairs: [{nodes: [old-0, mixed], gbps: 5}]}
"""


def test_a_file_and_back(tmp_path: Path) -> None:
    file = tmp_path / "stock.yaml"
    file.write_text(FILE)
    read, _, name = read_inventory(file)
    assert name == "mine"
    listed = ["4 x A10 on old-0", "4 x A10 on old-1", "2 x A40 on mixed", "1 x L4 on mixed"]
    assert list(map(str, read.pools)) == listed
    assert read.pools[0].price_usd_hour == 0.5
    assert [pool.host_kv_bytes for pool in read.pools] == [0, 0, 64 * 10**9, 0]
    assert read.pools[2].price_usd_hour == read.pools[2].accelerator.price_usd_hour
    assert read.network.path("old-0", "mixed").bandwidth_bytes_s == 5e9 / 8
    again = tmp_path / "again.yaml"
    again.write_text(write_inventory(read, name))
    assert read_inventory(again)[0] == read


def test_an_inventory_without_links_is_planned_under_an_assumption(tmp_path: Path) -> None:
    file = tmp_path / "stock.yaml"
    file.write_text(
        "nodes: [{name: a, accelerator: L40S, count: 2}, {name: b, accelerator: A10}, {name: c, accelerator: A10}]"
    )
    read = read_inventory(file)[0]
    rate = read.pools[1].accelerator.links.network
    assert [link.bandwidth_bytes_s for link in read.network.between.values()] == [rate] * 3
    assert f"({rate * 8 / 1e9:g} Gbit/s, of which 58% is reached, 1 ms)" in read.assumed
    assert "network: {between: {gbps: …}}" in read.assumed
    assert read.without({("c", "A10"): 1}).assumed == read.assumed
    file.write_text(write_inventory(read, "mine"))
    assert read_inventory(file)[0] == read
    assert read_inventory(file)[0].assumed == ""
    file.write_text("nodes: [{name: a, accelerator: L40S, count: 2}]")
    assert read_inventory(file)[0].assumed == ""


NODES = "nodes: [{name: a, accelerator: A10}, {name: b, accelerator: A10}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []", r"stock\.yaml:1: nodes: at least one is needed"),
        ("nodes: [{name: a}]", "a node needs either `accelerator` or `devices`"),
        (
            "nodes: [{name: a, devices: [{accelerator: A10}], host_kv_bytes: 1}]",
            "host_kv_bytes: give it to each of `devices`",
        ),
        ("nodes: [{name: a, accelerator: A10, count: 0}]", r"nodes\.0\.count: must be greater than 0, not 0"),
        ("nodes: [{name: a, accelerator: A1O}]", r"yaml:1: nodes\.0\.accelerator: unknown .*did you mean A10"),
        ("nodes: [{name: a, accelerator: A10}, {name: a, accelerator: A10}]", r":1: nodes\.1\.name: 'a' is used twice"),
        (
            "nodes: [{name: a, accelerator: A10, replicas: 3}]\nnetwork: {pairs: [{nodes: [a-0, a-1], gbps: 1}]}",
            "yaml:2: network: no link between the nodes 'a-0' and 'a-2'",
        ),
        ("nodes: [{name: a, accelerator: A10}]\nnetwork: {nodes: {x: {gbps: 1}}}", "no node 'x'"),
        ("nodes: [{name: a, accelerator: A10, gpus: 2}]", r"nodes\.0\.gpus: unknown key 'gpus'"),
        ("nodes: [{name: a, accelerator: A10, name: b}]", r"yaml:1: nodes\.0\.name: it is here twice"),
        ("name: a\nnodes: [{name: a, accelerator: A10}]\nname: b", "yaml:3: name: it is here twice, first in line 1"),
        (
            f"{NODES}\nnetwork:\n  pairs:\n  - {{nodes: [a, a], gbps: 1}}",
            r"yaml:4: network\.pairs\.0: a pair needs two nodes, not 'a'",
        ),
        (
            f"{NODES}\nnetwork: {{pairs: [{{nodes: [a, b], gbps: 1}}, {{nodes: [b, a], gbps: 2}}]}}",
            r"yaml:2: network\.pairs\.1: the link of 'a' and 'b' is given twice",
        ),
        ("nodes: [{name: a, accelerator: A10, count: !x 2}]", r"yaml:1: nodes\.0\.count: a tag"),
        ("? [a]\n: 1", "yaml:1: a key must be text"),
        (f"nodes: [{{name: a, accelerator: A10, price_usd_hour: {'9' * 400}}}]", r"yaml:1: .*price_usd_hour: a whole"),
    ],
)
def test_faults_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "stock.yaml"
    file.write_text(text)
    with pytest.raises((InvalidRequest, NotFound), match=message) as caught:
        read_inventory(file)
    assert "stock.yaml" in caught.value.message
