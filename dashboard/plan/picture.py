"""The picture of a plan: instances or groups of like instances as nodes, routes as links, their layout, and the
Plotly figure.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboard import look, units
from dashboard.plan.records import FleetInstance, Route
from shared.domain.instance import Role

GROUPED_ABOVE = 40  # instances


@dataclass(frozen=True, slots=True)
class Node:
    """Alike instances, mostly one. own: the share of all requests whose prompts they compute and then decode."""

    members: tuple[FleetInstance, ...]
    own: float = 0.0

    @property
    def first(self) -> FleetInstance:
        """What the others are like."""
        return self.members[0]

    @property
    def name(self) -> str:
        """Its id, or how many they are and of what."""
        if len(self.members) == 1:
            return self.first.instance_id
        return f"{len(self.members)} × {hardware(self.first) or self.first.role.value}"

    @property
    def load(self) -> float | None:
        """Mean, 0..1; None if no instance reports it."""
        told = [one.load for one in self.members if one.load is not None]
        return min(1.0, max(0.0, sum(told) / len(told))) if told else None


@dataclass(frozen=True, slots=True)
class Link:
    """A route between two nodes, by their places; share: of all requests, 0..1."""

    prefill: int
    decode: int
    share: float


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they are drawn from above, and links among them."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    def column(self, role: Role) -> list[int]:
        """Places of the nodes of one role."""
        return [place for place, node in enumerate(self.nodes) if node.first.role is role]


def graph(instances: Sequence[FleetInstance], routes: Sequence[Route], grouped_above: int = GROUPED_ABOVE) -> Graph:
    """One node an instance; of more than `grouped_above`, one for all that are alike.

    Ids in routes without an instance are drawn as lost. Shares are made to sum to one.
    """
    routes = [route for route in routes if route.share > 0.0]
    total = sum(route.share for route in routes) or 1.0
    everybody = [*instances, *_missing(instances, routes)]
    own: dict[str, float] = defaultdict(float)
    for route in routes:
        if route.prefill is None:
            own[route.decode] += route.share / total
    groups = _groups(everybody, own, together=len(everybody) > grouped_above)
    nodes = tuple(Node(tuple(group), sum(own.get(one.instance_id, 0.0) for one in group)) for group in groups)
    place = {one.instance_id: at for at, node in enumerate(nodes) for one in node.members}
    links: dict[tuple[int, int], float] = defaultdict(float)
    for route in routes:
        if route.prefill is not None:
            links[place[route.prefill], place[route.decode]] += route.share / total
    return Graph(nodes, tuple(Link(*ends, share) for ends, share in sorted(links.items())))


def hardware(one: FleetInstance) -> str:
    """Accelerator and degrees of parallelism: `A40 TP2 PP2`."""
    degrees = (("TP", one.tensor_parallel), ("PP", one.pipeline_parallel))
    return " ".join([one.accelerator, *(f"{name}{degree}" for name, degree in degrees if degree > 1)]).strip()


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts p2 before p10."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _missing(instances: Iterable[FleetInstance], routes: Iterable[Route]) -> list[FleetInstance]:
    known = {one.instance_id for one in instances}
    missing: dict[str, FleetInstance] = {}
    for route in routes:
        for name, role in ((route.prefill, Role.PREFILL), (route.decode, Role.DECODE)):
            if name is not None and name not in known:
                missing.setdefault(name, FleetInstance(name, role, "lost"))
    return list(missing.values())


def _groups(
    everybody: Sequence[FleetInstance], own: dict[str, float], *, together: bool
) -> Iterable[list[FleetInstance]]:
    groups: dict[tuple[object, ...], list[FleetInstance]] = defaultdict(list)
    for one in sorted(everybody, key=lambda one: natural(one.instance_id)):
        alike = (one.role, hardware(one), one.state, one.instance_id in own)
        groups[alike if together else (one.instance_id,)].append(one)
    return groups.values()


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


LEGEND = (
    "Filled: load. Dashed and named: not ready. ✕ and dotted: lost. ↻: computes prompts itself. "
    "Bands: share of the requests; pale where an end is lost."
)
_POINTS = 24  # of a band
_LABEL_PX = 13  # that a share's label needs
_LOOP = 0.02  # how far out of a card the arc of own prompts goes, of the width
_NAME = 24  # characters of an id; hovering tells all of it
_FULL = 0.95  # load from which a card is marked


def picture(graph: Graph) -> go.Figure:
    """The y axis counts pixels from above, so that texts keep their distances at each size of the window."""
    placed, height = cards(graph)
    routes = bands(graph.links, placed)
    figure = go.Figure(go.Scatter(**_hover(placed)))
    figure.add_traces([go.Scatter(**_band(band, placed)) for band in routes])
    figure.add_traces([go.Scatter(**_loop(card)) for card in placed if card.node.own > 0.0])
    texts = [text for card in placed for text in _texts(card)]
    figure.update_layout(
        height=height,
        margin={"l": 0, "r": 0, "t": 0, "b": 0},
        shapes=[shape for card in placed for shape in _shapes(card)],
        annotations=[*_heads(graph), *texts, *_shares(routes, placed)],
        showlegend=False,
        hovermode="closest",
        dragmode=False,
        font_size=12,
    )
    room = 0.002 + (_LOOP if any(card.node.own > 0.0 for card in placed) else 0.0)
    figure.update_xaxes(visible=False, range=[-0.002, 1.0 + room], fixedrange=True)
    figure.update_yaxes(visible=False, range=[height, 0], fixedrange=True)
    return figure


def label(node: Node) -> tuple[str, str]:
    """Two lines for people: which it is and how it stands; what it is made of and does."""
    first = node.first
    stands = "✕ LOST" if first.lost else "" if first.state == "ready" else first.state.upper()
    ends = (_short(one.instance_id) for one in (first, node.members[-1]))
    made = hardware(first) if len(node.members) == 1 else " … ".join(ends)
    load = "" if node.load is None or first.lost else f"load {units.share(round(node.load, 2))}"
    full = "full" if load and (node.load or 0.0) >= _FULL else ""
    own = f"↻ own prompts {_percent(node.own)}" if node.own > 0.0 else ""
    head = f"<b>{look.text(_short(node.name))}</b>" + (f" · <b>{look.text(stands)}</b>" if stands else "")
    return " · ".join(filter(None, (head, own))), look.text(" · ".join(filter(None, (made, load, full))))


def _colour(node: Node) -> str:
    return look.BAD if node.first.lost else look.CAUTION if node.first.state != "ready" else _role_colour(node)


def _role_colour(node: Node) -> str:
    return look.ROLE_COLOUR[node.first.role]


def _shapes(card: Card) -> list[dict[str, object]]:
    """The card, and as much of it filled as the node is loaded."""
    node, colour = card.node, _colour(card.node)
    box = {"type": "rect", "x0": card.left, "y0": card.top, "y1": card.top + card.height, "layer": "below"}
    dash = "dot" if node.first.lost else "dash" if node.first.state != "ready" else "solid"
    line = {"color": colour, "width": 1 if dash == "solid" else 2, "dash": dash}
    frame = {**box, "x1": card.left + CARD_WIDTH, "line": line, "fillcolor": _tint(colour, 0.07)}
    if node.first.lost or not node.load:
        return [frame]
    fill = look.CAUTION if node.load >= _FULL else _role_colour(node)
    loaded = {**box, "x1": card.left + CARD_WIDTH * node.load, "line": {"width": 0}, "fillcolor": _tint(fill, 0.28)}
    return [loaded, frame]


def _texts(card: Card) -> list[dict[str, object]]:
    head, made = label(card.node)
    if card.height < TALL_PX:
        return [_text(f"{head} · {made}" if made else head, card.left, card.middle, shift=8, size=11)]
    return [
        _text(head, card.left, card.middle - 10, shift=10, size=13),
        _text(made, card.left, card.middle + 10, shift=10, size=12, opacity=0.8),
    ]


def _heads(graph: Graph) -> list[dict[str, object]]:
    counts = {role: sum(len(graph.nodes[place].members) for place in graph.column(role)) for role in Role}
    return [
        _text(f"{role.value.capitalize()}, {counts[role]}", x, 9, shift=0, size=12, opacity=0.7)
        for role, x in ((Role.PREFILL, 0.0), (Role.DECODE, 1.0 - CARD_WIDTH))
    ]


def _shares(routes: Sequence[Band], placed: Sequence[Card]) -> list[dict[str, object]]:
    """A label where each band arrives, as far as they do not lie upon each other; hovering tells the others."""
    found, last = [], -1.0
    for band in sorted(routes, key=lambda band: band.arrives):
        if band.arrives - last >= _LABEL_PX:
            x, last = placed[band.link.decode].inner_edge, band.arrives
            found.append(_text(_percent(band.link.share), x, band.arrives, shift=-6, size=11, anchor="right"))
    return found


def _text(
    said: str, x: float, y: float, *, shift: int, size: int, opacity: float = 1.0, anchor: str = "left"
) -> dict[str, object]:
    place: dict[str, object] = {"x": x, "y": y, "xshift": shift, "xanchor": anchor, "yanchor": "middle"}
    return {**place, "text": said, "showarrow": False, "opacity": opacity, "font": {"size": size}, "align": "left"}


def _band(band: Band, placed: Sequence[Card]) -> dict[str, object]:
    """A line that leaves and arrives level."""
    source, target = placed[band.link.prefill], placed[band.link.decode]
    steps = [step / _POINTS for step in range(_POINTS + 1)]
    slopes = [3 * t * t - 2 * t * t * t for t in steps]
    lost = source.node.first.lost or target.node.first.lost
    ends = f"{look.text(source.node.name)} → {look.text(target.node.name)}"
    return {
        "x": [source.inner_edge + t * (target.inner_edge - source.inner_edge) for t in steps],
        "y": [band.leaves + s * (band.arrives - band.leaves) for s in slopes],
        "mode": "lines",
        "line": {"color": _tint(look.IDLE, 0.2 if lost else 0.5), "width": band.thick},
        "hovertemplate": f"{ends}<br>{_percent(band.link.share)} of the requests<extra></extra>",
    }


def _loop(card: Card) -> dict[str, object]:
    """An arc out of a card's right side and back into it: the prompts that it computes itself."""
    half, edge, bow = card.height / 4.0, card.left + CARD_WIDTH, _LOOP
    return {
        "x": [edge, edge + 0.75 * bow, edge + bow, edge + 0.75 * bow, edge],
        "y": [card.middle + half * part for part in (-1.0, -0.9, 0.0, 0.9, 1.0)],
        "mode": "lines",
        "line": {"color": look.PREFILL, "width": 2, "dash": "dash", "shape": "spline"},
        "hovertemplate": f"{look.text(card.node.name)} computes {_percent(card.node.own)} itself<extra></extra>",
    }


def _hover(placed: Sequence[Card]) -> dict[str, object]:
    """Invisible markers that tell all of a card."""
    ids = [", ".join(look.text(one.instance_id) for one in card.node.members) for card in placed]
    return {
        "x": [card.left + CARD_WIDTH / 2.0 for card in placed],
        "y": [card.middle for card in placed],
        "mode": "markers",
        "marker": {"opacity": 0.0, "size": 26, "color": look.IDLE},
        "text": [
            f"{'<br>'.join(label(card.node))}<br>{_lines(names)}" for card, names in zip(placed, ids, strict=True)
        ],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _lines(names: str, each: int = 60) -> str:
    """Long lists of ids in several lines."""
    lines = [""]
    for name in names.split(" "):
        if len(lines[-1]) + len(name) > each:
            lines.append("")
        lines[-1] += f"{name} "
    return "<br>".join(line.strip() for line in lines)


def _short(name: str) -> str:
    """An id of which only the middle is left out: its end tells it from the others."""
    return name if len(name) <= _NAME else f"{name[: _NAME // 2 - 1]}…{name[-_NAME // 2 :]}"


def _percent(share: float) -> str:
    return units.share(round(share, 3) if share < 0.1 else round(share, 2))


def _tint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
