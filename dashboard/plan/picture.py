"""The plan in force as a picture: prefill instances left, decode instances right, routes as bands between them."""

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboard import look, units
from dashboard.plan.nodes import Graph, Node, hardware
from dashboard.plan.places import CARD_WIDTH, TALL_PX, Band, Card, bands, cards
from shared.domain.instance import Role

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
