"""Where the parts of a plan's picture stand, in pixels from above and in shares of its width."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboard.plan.nodes import Graph, Link, Node
from shared.domain.instance import Role

CARD_WIDTH = 0.29  # of the picture's
TALL_PX = 52  # of a card with two lines of text
_TOP_PX, _LOW_PX, _GAP_PX = 26, 28, 10
_TALL_UP_TO = 10  # cards in a column; more are low
_EDGE_PX = 8  # of a card's height that no band touches
_THICKEST_PX, _THINNEST_PX = 24.0, 1.5


@dataclass(frozen=True, slots=True)
class Card:
    """One node's rectangle."""

    node: Node
    left: float
    top: float
    height: float

    @property
    def middle(self) -> float:
        """Of its height."""
        return self.top + self.height / 2.0

    @property
    def inner_edge(self) -> float:
        """The side at which bands begin and end."""
        return self.left + CARD_WIDTH if self.node.first.role is Role.PREFILL else self.left


@dataclass(frozen=True, slots=True)
class Band:
    """One link: where it leaves and arrives, and how thick it is."""

    link: Link
    leaves: float
    arrives: float
    thick: float


def cards(graph: Graph) -> tuple[list[Card], float]:
    """A card for each node, in their order; and how high the picture is."""
    columns = {role: graph.column(role) for role in Role}
    most = max(1, *map(len, columns.values()))
    height, gap = (TALL_PX, _GAP_PX) if most <= _TALL_UP_TO else (_LOW_PX, _GAP_PX // 2)
    placed: dict[int, Card] = {}
    for role, places in columns.items():
        top = _TOP_PX + (most - len(places)) * (height + gap) / 2.0
        left = 0.0 if role is Role.PREFILL else 1.0 - CARD_WIDTH
        for row, place in enumerate(places):
            placed[place] = Card(graph.nodes[place], left, top + row * (height + gap), height)
    return [placed[place] for place in range(len(graph.nodes))], _TOP_PX + most * (height + gap)


def bands(links: Sequence[Link], placed: Sequence[Card]) -> list[Band]:
    """Side by side along a card's edge, in the order of the cards at their other ends, so that few of them cross."""
    out: dict[int, list[Link]] = defaultdict(list)
    into: dict[int, list[Link]] = defaultdict(list)
    for link in links:
        out[link.prefill].append(link)
        into[link.decode].append(link)
    fullest = max((sum(link.share for link in ends) for ends in (*out.values(), *into.values())), default=1.0)
    room = placed[0].height - _EDGE_PX if placed else 0.0
    thick = {link: min(_THICKEST_PX, max(_THINNEST_PX, room * link.share / fullest)) for link in links}
    leaves = _along(out, thick, placed, {link: placed[link.decode].top for link in links})
    arrives = _along(into, thick, placed, {link: placed[link.prefill].top for link in links})
    return [Band(link, leaves[link], arrives[link], thick[link]) for link in links]


def _along(
    ends: Mapping[int, Sequence[Link]], thick: Mapping[Link, float], placed: Sequence[Card], order: Mapping[Link, float]
) -> dict[Link, float]:
    """The middle of each band at one side's cards, spread over the room that is left."""
    found: dict[Link, float] = {}
    for place, links in ends.items():
        card = placed[place]
        room = card.height - _EDGE_PX - sum(thick[link] for link in links)
        gap = max(0.0, room) / len(links)
        at = card.top + _EDGE_PX / 2.0 + min(0.0, room) / 2.0
        for link in sorted(links, key=lambda link: order[link]):
            found[link] = at + (gap + thick[link]) / 2.0
            at += gap + thick[link]
    return found
