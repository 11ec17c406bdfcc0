"""Links between nodes as a file says them: classes, exceptions, a matrix; and back."""

from typing import Any

import pytest
from pydantic import ValidationError

from shared.cost.network import Link, NetworkEntry, entry_of
from shared.errors import InvalidRequest

NODES = ("a", "b", "c")
INSIDE = dict.fromkeys(NODES, Link(1e9))


def network(**said: Any) -> NetworkEntry:
    return NetworkEntry.model_validate(said)


def test_classes_and_exceptions() -> None:
    made = network(
        inside={"gbps": 80}, between={"gbps": 8}, nodes={"b": {"gbps": 160}}, pairs=[{"nodes": ["c", "a"], "gbps": 1}]
    ).network(NODES, INSIDE)
    assert [made.path(node, node).bandwidth_bytes_s for node in NODES] == [10e9, 20e9, 10e9]
    assert made.path("a", "b").bandwidth_bytes_s == made.path("c", "b").bandwidth_bytes_s == 1e9
    assert made.path("a", "c").bandwidth_bytes_s == 0.125e9


def test_what_is_not_said() -> None:
    made = network(pairs=[{"nodes": ["a", "b"], "gbps": 8}]).network(NODES, INSIDE)
    assert made.inside == INSIDE
    assert list(made.between) == [("a", "b")]


def test_a_matrix_says_all() -> None:
    said = {"nodes": ["c", "a", "b"], "gbps": [[80, 8, 0], [8, 0, 16], [0, 16, 80]], "latency_s": 0.5}
    made = network(matrix=said).network(NODES, INSIDE)
    assert made.path("a", "c") == Link(1e9, 0.5)
    assert made.path("a", "b") == Link(2e9, 0.5)
    assert made.inside["a"] == Link(1e9)  # 0 on the diagonal: not said
    assert ("b", "c") not in made.between


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"matrix": {"nodes": ["a"], "gbps": [[1, 2]]}}, "1 rows of 1 numbers"),
        ({"matrix": {"nodes": ["a", "b"], "gbps": [[1, 2], [3, 1]]}}, "a to b is not as fast as back"),
        ({"matrix": {"nodes": ["a"], "gbps": [[1]]}, "between": {"gbps": 1}}, "a matrix says it all"),
        ({"between": {"gbps": 0}}, "greater than 0"),
    ],
)
def test_what_makes_no_sense(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        network(**said)


def test_unknown_nodes_are_named() -> None:
    with pytest.raises(InvalidRequest, match="no node 'x'; there are a, b, c"):
        network(nodes={"x": {"gbps": 1}}).network(NODES, INSIDE)
    with pytest.raises(InvalidRequest, match="matrix: node 'b' is not in it"):
        network(matrix={"nodes": ["a", "c"], "gbps": [[1, 1], [1, 1]]}).network(NODES, INSIDE)


def test_there_and_back() -> None:
    made = network(
        inside={"gbps": 80, "efficiency": 0.8}, between={"gbps": 8}, pairs=[{"nodes": ["a", "c"], "gbps": 1}]
    ).network(NODES, INSIDE)
    assert entry_of(made).network(NODES, {}) == made
