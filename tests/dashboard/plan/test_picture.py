"""Where things stand in the picture, and what it says."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from dashboard.plan.picture import Graph, bands, cards, graph, label, picture
from dashboard.plan.records import Fleet, FleetInstance
from shared.domain.instance import Role
from tests.dashboard.planner import large_fleet, member, small_fleet


def drawn(fleet: dict[str, Any]) -> Graph:
    known = msgspec.convert(fleet, Fleet)
    return graph(known.instances, known.routes)


@pytest.mark.parametrize("fleet", [small_fleet(), large_fleet(28), large_fleet(64), {**small_fleet(), "routes": []}])
def test_cards_do_not_overlap_and_bands_touch_their_cards(fleet: dict[str, Any]) -> None:
    placed, height = cards(drawn(fleet))
    for role in Role:
        column = sorted((card for card in placed if card.node.first.role is role), key=lambda card: card.top)
        assert all(above.top + above.height < below.top for above, below in pairwise(column))
        assert all(card.top >= 0 and card.top + card.height <= height for card in column)
    for band in bands(drawn(fleet).links, placed):
        for place, at in ((band.link.prefill, band.leaves), (band.link.decode, band.arrives)):
            assert placed[place].top <= at <= placed[place].top + placed[place].height


def test_a_wider_share_is_a_thicker_band() -> None:
    graphed = drawn(small_fleet())
    thick = {round(band.link.share, 2): band.thick for band in bands(graphed.links, cards(graphed)[0])}
    assert thick[0.15] < thick[0.35] <= thick[0.38]


def test_state_and_own_prompts_are_in_words_not_in_colours_alone() -> None:
    lost = {**small_fleet(), "instances": [*small_fleet()["instances"][1:], member("p0", state="lost")]}
    said = {node.name: label(node) for node in drawn(lost).nodes}
    assert "✕ LOST" in said["p0"][0]
    assert "load" not in said["p0"][1]
    assert said["d1"] == ("<b>d1</b> · ↻ own prompts 12 %", "RTX-3090Ti TP2 PP2 · load 35 %")
    assert said["d0"][1].endswith("load 97 % · full")
    dashes = [shape["line"].dash for shape in picture(drawn(lost)).layout.shapes if shape["line"].dash]
    assert dashes.count("dot") == 1


def test_what_is_written_is_harmless_and_short() -> None:
    node = graph([FleetInstance("<i>" + "x" * 60 + "-17", Role.DECODE)], []).nodes[0]
    head, _ = label(node)
    assert "<i>" not in head
    assert head.endswith("-17</b>")
    assert len(head) < 50


def test_an_instance_alone_is_a_picture() -> None:
    assert picture(graph([FleetInstance("d0", Role.DECODE)], [])).layout.height > 0
