"""Links between nodes as a file describes them, and how long KV takes over them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.worker.kv.codec import payload_bytes
from shared.cost.library import bundled_geometry
from shared.cost.network import Link, NetworkEntry, entry_of, transfer_time_s, wire_bytes
from shared.domain.kv import Codec, wire_share
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
        ({"matrix": {"nodes": ["a", "b"], "gbps": [[1, 2], [3, 1]]}}, "a to b must be as fast as back"),
        ({"matrix": {"nodes": ["a"], "gbps": [[1]]}, "between": {"gbps": 1}}, "a matrix excludes inside"),
        ({"between": {"gbps": 0}}, "greater than 0"),
    ],
)
def test_what_makes_no_sense(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        network(**said)


def test_unknown_nodes_are_named() -> None:
    with pytest.raises(InvalidRequest, match="no node 'x'; known: a, b, c"):
        network(nodes={"x": {"gbps": 1}}).network(NODES, INSIDE)
    with pytest.raises(InvalidRequest, match="matrix: node 'b' is missing"):
        network(matrix={"nodes": ["a", "c"], "gbps": [[1, 1], [1, 1]]}).network(NODES, INSIDE)


def test_there_and_back() -> None:
    made = network(
        inside={"gbps": 80, "efficiency": 0.8}, between={"gbps": 8}, pairs=[{"nodes": ["a", "c"], "gbps": 1}]
    ).network(NODES, INSIDE)
    assert entry_of(made).network(NODES, {}) == made


LLAMA_30B = bundled_geometry("LLaMA-30B")


def test_thunderserve_eq_1() -> None:
    # LLaMA-30B, 1024 tokens, 40 Gb/s: 327 ms at 16 bits and 82 ms at 4; measured 584 and 133.
    ideal = Link(5e9, latency_s=0.0, efficiency=1.0)
    assert transfer_time_s(LLAMA_30B, 1024, ideal) == pytest.approx(0.327, abs=0.001)
    # The paper counts 4 bits; ours are 4.75 with the scales and zeros of the groups.
    assert transfer_time_s(LLAMA_30B, 1024, ideal, Codec.INT4) == pytest.approx(0.082 * 4.75 / 4.0, rel=0.01)
    real = Link(5e9)
    assert transfer_time_s(LLAMA_30B, 1024, real) == pytest.approx(0.584, rel=0.05)
    assert transfer_time_s(LLAMA_30B, 1024, real, Codec.INT4) == pytest.approx(0.133 * 4.75 / 4.0, rel=0.12)


def test_nothing_to_move_takes_no_time() -> None:
    assert transfer_time_s(LLAMA_30B, 0, Link(1e9)) == 0.0


@given(
    st.sampled_from(["LLaMA-30B", "Llama-3-8B", "OPT-125M", "DeepSeek-V3", "Gemma-2-9B"]),
    st.integers(1, 3000),
    st.sampled_from(list(Codec)),
)
def test_wire_bytes_are_those_of_the_connector(model: str, tokens: int, codec: Codec) -> None:
    geometry = bundled_geometry(model)
    kv = geometry.kv_geometry()
    sent = payload_bytes((kv.layers, 2, tokens, kv.kv_heads, kv.head_dim), torch.bfloat16, codec)
    assert wire_bytes(geometry, tokens, codec) == min(sent, wire_bytes(geometry, tokens))


@pytest.mark.parametrize(
    ("codec", "bits"), [(Codec.RAW, 16.0), (Codec.INT8, 8.75), (Codec.FP8, 8.0), (Codec.INT4, 4.75)]
)
def test_bits_of_an_element(codec: Codec, bits: float) -> None:
    assert 16.0 * wire_share(codec) == bits
    sent, raw = (wire_bytes(LLAMA_30B, 1 << 20, one) for one in (codec, Codec.RAW))
    assert sent / raw == pytest.approx(wire_share(codec), rel=1e-4)


@given(st.integers(1, 100_000), st.integers(1, 100_000), st.sampled_from(list(Codec)))
def test_more_tokens_take_longer_and_codecs_never_cost_bytes(tokens: int, more: int, codec: Codec) -> None:
    link = Link(1e9)
    assert transfer_time_s(LLAMA_30B, tokens + more, link, codec) > transfer_time_s(LLAMA_30B, tokens, link, codec)
    assert wire_bytes(LLAMA_30B, tokens, codec) <= wire_bytes(LLAMA_30B, tokens)


def test_a_codec_never_widens_narrow_kv() -> None:
    assert wire_bytes(LLAMA_30B, 10, Codec.INT8, dtype_bytes=1.0) == wire_bytes(LLAMA_30B, 10, dtype_bytes=1.0)


@pytest.mark.parametrize("bad", [(0.0, 0.0, 0.5), (1e9, -1.0, 0.5), (1e9, 0.0, 0.0), (1e9, 0.0, 1.5)])
def test_impossible_links(bad: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidRequest, match="a link needs"):
        Link(*bad)
