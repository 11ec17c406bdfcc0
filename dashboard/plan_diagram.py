"""The diagram of a plan: prefill instances at the left, decode instances at the right, routes as bands between them.
Equal instances of a large plan are drawn as one group.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dashboard import markup, units
from dashboard.charts import drawing, natural_order
from shared.domain.instance import Role
from shared.wire.api.planner import FleetInstance, RouteShare

GROUPED_ABOVE = 40  # instances
LEGEND = (
    "Filled: load. Dashed with a label: not ready. ✕ and dotted: lost. ↻: computes prompts itself. "
    "Bands: share of the requests; pale where an end is lost."
)
CARD_WIDTH = 0.29  # of the diagram's width
TALL_PX = 52  # a card with two lines of text
_TOP_PX, _LOW_PX, _GAP_PX = 26, 28, 10
_TALL_CARDS = 10  # in a column; more cards are low
_EDGE_PX = 8  # of a card's height without bands
_MAX_BAND_PX, _MIN_BAND_PX = 24.0, 1.5
_LABEL_PX = 13  # height of a share's label
_GROUND = 1000  # width of the drawing of the bands
_NAME_CHARACTERS = 24  # of a longer id the middle is left out
_FULL_LOAD = 0.95


@dataclass(frozen=True, slots=True)
class Node:
    """Equal instances, mostly one. own: share of all requests whose prompts these decode instances compute."""

    members: tuple[FleetInstance, ...]
    own: float = 0.0

    @property
    def first(self) -> FleetInstance:
        return self.members[0]

    @property
    def name(self) -> str:
        if len(self.members) == 1:
            return self.first.instance_id
        return f"{len(self.members)} × {hardware(self.first) or self.first.role.value}"

    @property
    def load(self) -> float | None:
        """The mean, 0..1; None if no instance reports a load."""
        loads = [each.load for each in self.members if each.load is not None]
        return min(1.0, max(0.0, sum(loads) / len(loads))) if loads else None


@dataclass(frozen=True, slots=True)
class Link:
    """Routes between two nodes, by index. share: of all requests, 0..1."""

    prefill: int
    decode: int
    share: float


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes from top to bottom, and links between them."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    def column(self, role: Role) -> list[int]:
        """Indices of the nodes of one role."""
        return [at for at, node in enumerate(self.nodes) if node.first.role is role]


def graph(
    instances: Sequence[FleetInstance], routes: Sequence[RouteShare], grouped_above: int = GROUPED_ABOVE
) -> Graph:
    """A node for each instance, or for each group of equal ones if there are more than `grouped_above`. Shares are
    normalised to a sum of 1; ids that occur in routes alone count as lost instances.
    """
    routes = [route for route in routes if route.share > 0.0]
    total = sum(route.share for route in routes) or 1.0
    members = [*instances, *_missing(instances, routes)]
    own: dict[str, float] = defaultdict(float)
    for route in routes:
        if route.prefill is None:
            own[route.decode] += route.share / total
    groups = _groups(members, own, together=len(members) > grouped_above)
    nodes = tuple(Node(tuple(group), sum(own.get(each.instance_id, 0.0) for each in group)) for group in groups)
    index = {each.instance_id: at for at, node in enumerate(nodes) for each in node.members}
    links: dict[tuple[int, int], float] = defaultdict(float)
    for route in routes:
        if route.prefill is not None:
            links[index[route.prefill], index[route.decode]] += route.share / total
    return Graph(nodes, tuple(Link(*ends, share) for ends, share in sorted(links.items())))


def hardware(instance: FleetInstance) -> str:
    """Accelerator and degrees of parallelism, such as `A40 TP2 PP2`."""
    degrees = (("TP", instance.tensor_parallel), ("PP", instance.pipeline_parallel))
    parallel = (f"{name}{degree}" for name, degree in degrees if degree > 1)
    return " ".join([instance.accelerator, *parallel]).strip()


def _missing(instances: Iterable[FleetInstance], routes: Iterable[RouteShare]) -> list[FleetInstance]:
    known = {each.instance_id for each in instances}
    missing: dict[str, FleetInstance] = {}
    for route in routes:
        for name, role in ((route.prefill, Role.PREFILL), (route.decode, Role.DECODE)):
            if name is not None and name not in known:
                missing.setdefault(name, FleetInstance(name, role, "lost"))
    return list(missing.values())


def _groups(
    members: Sequence[FleetInstance], own: Mapping[str, float], *, together: bool
) -> Iterable[list[FleetInstance]]:
    groups: dict[tuple[object, ...], list[FleetInstance]] = defaultdict(list)
    for each in sorted(members, key=lambda each: natural_order(each.instance_id)):
        kind = (each.role, hardware(each), each.state, each.instance_id in own)
        groups[kind if together else (each.instance_id,)].append(each)
    return groups.values()


@dataclass(frozen=True, slots=True)
class Card:
    """The rectangle of a node. left: share of the width; top, height: pixels."""

    node: Node
    left: float
    top: float
    height: float

    @property
    def middle(self) -> float:
        return self.top + self.height / 2.0

    @property
    def inner_edge(self) -> float:
        """The side at which bands begin and end."""
        return self.left + CARD_WIDTH if self.node.first.role is Role.PREFILL else self.left


@dataclass(frozen=True, slots=True)
class Band:
    """The band of a link: the heights of its ends and its thickness, in pixels."""

    link: Link
    start: float
    end: float
    thickness: float


def cards(graph: Graph) -> tuple[list[Card], float]:
    """A card for each node, and the height of the diagram."""
    columns = {role: graph.column(role) for role in Role}
    most = max(1, *map(len, columns.values()))
    height, gap = (TALL_PX, _GAP_PX) if most <= _TALL_CARDS else (_LOW_PX, _GAP_PX // 2)
    placed: dict[int, Card] = {}
    for role, column in columns.items():
        top = _TOP_PX + (most - len(column)) * (height + gap) / 2.0
        left = 0.0 if role is Role.PREFILL else 1.0 - CARD_WIDTH
        for row, at in enumerate(column):
            placed[at] = Card(graph.nodes[at], left, top + row * (height + gap), height)
    return [placed[at] for at in range(len(graph.nodes))], _TOP_PX + most * (height + gap)


def bands(links: Sequence[Link], placed: Sequence[Card]) -> list[Band]:
    """Bands side by side along each card's edge, ordered by their other ends, so that few of them cross."""
    out: dict[int, list[Link]] = defaultdict(list)
    into: dict[int, list[Link]] = defaultdict(list)
    for link in links:
        out[link.prefill].append(link)
        into[link.decode].append(link)
    largest = max((sum(link.share for link in ends) for ends in (*out.values(), *into.values())), default=1.0)
    room = placed[0].height - _EDGE_PX if placed else 0.0
    thickness = {link: min(_MAX_BAND_PX, max(_MIN_BAND_PX, room * link.share / largest)) for link in links}
    start = _along_edges(out, thickness, placed, {link: placed[link.decode].top for link in links})
    end = _along_edges(into, thickness, placed, {link: placed[link.prefill].top for link in links})
    return [Band(link, start[link], end[link], thickness[link]) for link in links]


def _along_edges(
    ends: Mapping[int, Sequence[Link]],
    thickness: Mapping[Link, float],
    placed: Sequence[Card],
    order: Mapping[Link, float],
) -> dict[Link, float]:
    """The middle of each band at the cards of one side, with equal gaps."""
    middles: dict[Link, float] = {}
    for at, links in ends.items():
        card = placed[at]
        room = card.height - _EDGE_PX - sum(thickness[link] for link in links)
        gap, y = max(0.0, room) / len(links), card.top + _EDGE_PX / 2.0 + min(0.0, room) / 2.0
        for link in sorted(links, key=lambda link: order[link]):
            middles[link] = y + (gap + thickness[link]) / 2.0
            y += gap + thickness[link]
    return middles


def diagram(graph: Graph) -> str:
    """Cards are text over a drawing of the bands; heights are pixels, so that texts keep their distances at each window
    size.
    """
    placed, height = cards(graph)
    routes = bands(graph.links, placed)
    drawn = drawing([_band(band, placed) for band in routes], height)
    parts = [*_heads(graph), *map(_card, placed), *_shares(routes, placed)]
    return markup.page(f'<div class="pp-plan" style="height:{height:g}px">{drawn}{"".join(parts)}</div>')


def label(node: Node) -> tuple[str, str]:
    """Two lines: name and state; hardware and load."""
    first = node.first
    state = "✕ LOST" if first.lost else "" if first.state == "ready" else first.state.upper()
    ends = (_short(each.instance_id) for each in (first, node.members[-1]))
    detail = hardware(first) if len(node.members) == 1 else " … ".join(ends)
    load = "" if node.load is None or first.lost else f"load {units.share(round(node.load, 2))}"
    full = "full" if load and (node.load or 0.0) >= _FULL_LOAD else ""
    own = f"↻ own prompts {_percent(node.own)}" if node.own > 0.0 else ""
    head = f"<b>{markup.text(_short(node.name))}</b>" + (f" · <b>{markup.text(state)}</b>" if state else "")
    return " · ".join(filter(None, (head, own))), markup.text(" · ".join(filter(None, (detail, load, full))))


def _card(card: Card) -> str:
    """The frame of a card, filled up to the node's load, and its texts; its instances when the mouse rests on it."""
    node, first = card.node, card.node.first
    head, detail = label(node)
    state = "lost" if first.lost else "ready" if first.state == "ready" else "other"
    colour = {"lost": markup.BAD, "ready": markup.ROLE[first.role], "other": markup.CAUTION}[state]
    fill = ""
    if node.load and not first.lost:
        full = markup.CAUTION if node.load >= _FULL_LOAD else markup.ROLE[first.role]
        fill = f'<i style="width:{100 * node.load:.1f}%;background:{full}"></i>'
    words = f"<span>{head}</span>" + (f"<span>{detail}</span>" if detail else "")
    low = "" if card.height >= TALL_PX else " pp-low"
    own = " pp-own" if node.own > 0.0 else ""
    place = f"left:{100 * card.left:g}%;top:{card.top:g}px;width:{100 * CARD_WIDTH:g}%;height:{card.height:g}px"
    ids = markup.text(", ".join(each.instance_id for each in node.members))
    return f'<div class="pp-node pp-{state}{low}{own}" style="--c:{colour};{place}" title="{ids}">{fill}{words}</div>'


def _heads(graph: Graph) -> list[str]:
    counts = {role: sum(len(graph.nodes[at].members) for at in graph.column(role)) for role in Role}
    return [
        f'<em style="left:{100 * x:g}%">{role.value.capitalize()}, {counts[role]}</em>'
        for role, x in ((Role.PREFILL, 0.0), (Role.DECODE, 1.0 - CARD_WIDTH))
    ]


def _shares(routes: Sequence[Band], placed: Sequence[Card]) -> list[str]:
    """A label at the end of each band, except where it would cover another; the table of routes has all shares."""
    labels, last = [], -1.0
    for band in sorted(routes, key=lambda band: band.end):
        if band.end - last >= _LABEL_PX:
            x, last = placed[band.link.decode].inner_edge, band.end
            source, target = (placed[at].node.name for at in (band.link.prefill, band.link.decode))
            hint = markup.text(f"{source} → {target}: {_percent(band.link.share)} of the requests")
            place = f"right:{100 * (1.0 - x):g}%;top:{band.end:.1f}px"
            labels.append(f'<b style="{place}" title="{hint}">{_percent(band.link.share)}</b>')
    return labels


def _band(band: Band, placed: Sequence[Card]) -> str:
    """A curve with level ends."""
    source, target = placed[band.link.prefill], placed[band.link.decode]
    left, right = (_GROUND * card.inner_edge for card in (source, target))
    middle = (left + right) / 2.0
    opacity = 0.2 if source.node.first.lost or target.node.first.lost else 0.5
    curve = f"M{left:.1f} {band.start:.1f}C{middle:.1f} {band.start:.1f} {middle:.1f} {band.end:.1f} {right:.1f}"
    style = f'stroke="{markup.IDLE}" stroke-width="{band.thickness:.1f}" stroke-opacity="{opacity}"'
    return f'<path d="{curve} {band.end:.1f}" {style} style="stroke-linecap:butt"/>'


def _short(name: str) -> str:
    """A long id without its middle, since ids differ at the end."""
    half = _NAME_CHARACTERS // 2
    return name if len(name) <= _NAME_CHARACTERS else f"{name[: half - 1]}…{name[-half:]}"


def _percent(share: float) -> str:
    return units.share(round(share, 3) if share < 0.1 else round(share, 2))
