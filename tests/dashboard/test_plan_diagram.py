"""The diagram of a plan: its nodes and links, their places, and the labels."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from dashboard.charts import natural_order
from dashboard.plan_diagram import Graph, bands, cards, diagram, graph, hardware, label
from shared.domain.instance import Role
from shared.wire.api.planner import Fleet, FleetInstance, RouteShare
from tests.dashboard.sample_data import large_fleet, member, small_fleet


def graph_of(fleet: dict[str, Any]) -> Graph:
    known = msgspec.convert(fleet, Fleet)
    return graph(known.instances, known.routes)


def test_a_node_for_each_instance_and_a_link_for_each_pair() -> None:
    drawn = graph_of(small_fleet())
    assert [node.name for node in drawn.nodes] == ["d0", "d1", "p0", "p1"]
    names = [(drawn.nodes[each.prefill].name, drawn.nodes[each.decode].name, each.share) for each in drawn.links]
    assert sorted(names) == [("p0", "d0", 0.35), ("p1", "d0", 0.15), ("p1", "d1", 0.38)]
    assert [node.own for node in drawn.nodes] == pytest.approx([0.0, 0.12, 0.0, 0.0])
    assert [drawn.nodes[at].name for at in drawn.column(Role.DECODE)] == ["d0", "d1"]


@pytest.mark.parametrize("count", [40, 64, 200])
def test_many_instances_are_grouped_and_no_share_is_lost(count: int) -> None:
    drawn = graph_of(large_fleet(count))
    assert sum(len(node.members) for node in drawn.nodes) == count
    assert sum(link.share for link in drawn.links) == pytest.approx(1.0)
    assert len(drawn.nodes) == count if count <= 40 else len(drawn.nodes) <= 11
    for node in drawn.nodes:
        assert len({(each.role, hardware(each), each.state) for each in node.members}) == 1


def test_lost_instances_are_not_grouped_with_living_ones() -> None:
    lost = [node.name for node in graph_of(large_fleet()).nodes if node.first.lost]
    assert lost == ["decode-a100-41", "prefill-a100-9"]


def test_routes_to_an_unknown_instance_and_routes_without_a_share() -> None:
    routes = [RouteShare("p0", "gone", 2.0), RouteShare(None, "gone", 2.0), RouteShare("d0", "p0", 0.0)]
    drawn = graph([FleetInstance("p0", Role.PREFILL)], routes)
    gone = next(node for node in drawn.nodes if node.name == "gone")
    assert gone.first.lost
    assert gone.own == 0.5
    assert [link.share for link in drawn.links] == [0.5]
    assert gone.load is None


def test_names() -> None:
    parallel = FleetInstance("a", Role.DECODE, accelerator="A40", tensor_parallel=2, pipeline_parallel=3)
    assert hardware(parallel) == "A40 TP2 PP3"
    assert sorted(["p10", "p2", "d1", "2x"], key=natural_order) == ["2x", "d1", "p2", "p10"]


@pytest.mark.parametrize("fleet", [small_fleet(), large_fleet(28), large_fleet(64), {**small_fleet(), "routes": []}])
def test_cards_do_not_overlap_and_bands_touch_their_cards(fleet: dict[str, Any]) -> None:
    drawn = graph_of(fleet)
    placed, height = cards(drawn)
    for role in Role:
        column = sorted((card for card in placed if card.node.first.role is role), key=lambda card: card.top)
        assert all(above.top + above.height < below.top for above, below in pairwise(column))
        assert all(card.top >= 0 and card.top + card.height <= height for card in column)
    for band in bands(drawn.links, placed):
        for at, y in ((band.link.prefill, band.start), (band.link.decode, band.end)):
            assert placed[at].top <= y <= placed[at].top + placed[at].height


def test_a_larger_share_is_a_thicker_band() -> None:
    drawn = graph_of(small_fleet())
    thickness = {band.link.share: band.thickness for band in bands(drawn.links, cards(drawn)[0])}
    assert thickness[0.15] < thickness[0.35] <= thickness[0.38]


def test_states_are_in_words_and_not_in_colours_alone() -> None:
    lost = graph_of({**small_fleet(), "instances": [*small_fleet()["instances"][1:], member("p0", state="lost")]})
    labels = {node.name: label(node) for node in lost.nodes}
    assert "✕ LOST" in labels["p0"][0]
    assert "load" not in labels["p0"][1]
    assert labels["d1"] == ("<b>d1</b> · ↻ own prompts 12 %", "RTX-3090Ti TP2 PP2 · load 35 %")
    assert labels["d0"][1].endswith("load 97 % · full")
    assert diagram(lost).count("pp-node pp-lost") == 1


def test_labels_are_escaped_and_short() -> None:
    node = graph([FleetInstance("<i>" + "x" * 60 + "-17", Role.DECODE)], []).nodes[0]
    head, _ = label(node)
    assert "<i>" not in head
    assert head.endswith("-17</b>")
    assert len(head) < 50
    assert "<i>" not in diagram(Graph((node,), ()))
