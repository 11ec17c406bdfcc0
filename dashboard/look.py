"""How the page looks: `look.css` and small pieces of HTML. All text is escaped here and nowhere else."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from shared.domain.instance import InstanceState, Role
from shared.timeline import Span

PREFILL, DECODE, TRANSFER, IDLE = "#5b74ec", "#17a08c", "#d08a2a", "#8c94a3"
GOOD, CAUTION, BAD = "#2fa362", "#d08a2a", "#dc4f46"

ROLE_COLOUR = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}
STATE_COLOUR = {
    InstanceState.STARTING: IDLE,
    InstanceState.READY: GOOD,
    InstanceState.DRAINING: CAUTION,
    InstanceState.UNRESPONSIVE: BAD,
    InstanceState.DEAD: BAD,
}
SPAN_COLOUR = {
    Span.INTAKE: "#d3d7de",
    Span.PLACEMENT: "#b3b9c4",
    Span.HANDOVER: "#d3d7de",
    Span.QUEUE: IDLE,
    Span.PREFILL: PREFILL,
    Span.REPLY: "#d3d7de",
    Span.TRANSFER: TRANSFER,
    Span.DECODE_QUEUE: IDLE,
    Span.DECODE: DECODE,
    Span.LOST: BAD,
}

STYLE = Path(__file__).with_name("look.css")


def page(*parts: str, stale: bool = False) -> str:
    """Pieces made one element of ours; greyed when what they tell is old."""
    return f'<div class="pp{" pp-stale" if stale else ""}">{"".join(parts)}</div>'


def text(value: object) -> str:
    """Anything as harmless text."""
    return escape(str(value))


def soft(value: object) -> str:
    """Text of less weight."""
    return f'<span class="pp-soft">{text(value)}</span>'


def strong(value: object) -> str:
    """Text of more weight."""
    return f"<b>{text(value)}</b>"


def dot(value: object, colour: str, hint: str = "") -> str:
    """Text after a coloured dot."""
    return f'<span style="--c:{colour}" title="{text(hint)}"><i class="pp-dot"></i>{text(value)}</span>'


def badge(value: object, colour: str, *, loud: bool = False) -> str:
    """A short word on a tint of its colour; `loud` outlines it."""
    return f'<span class="pp-badge{" pp-loud" if loud else ""}" style="--c:{colour}">{text(value)}</span>'


def bar(label: str, share: float | None, said: str, colour: str) -> str:
    """A labelled bar, `share` of 0..1; None is an empty one."""
    width = min(100.0, max(0.0, 100 * (share or 0.0)))
    inner = f'<div class="pp-bar"><i style="--c:{colour};background:{colour};width:{width:.1f}%"></i></div>'
    return f'<div class="pp-barline">{soft(label)}{inner}<span>{text(said)}</span></div>'


def tile(label: str, value: str, note: str, colour: str = "") -> str:
    """One total; `colour` marks trouble, which the note says in words."""
    marked = f' class="pp-marked" style="--c:{colour}"' if colour else ""
    return f'<div class="pp-tile"><em>{text(label)}</em><strong{marked}>{text(value)}</strong>{soft(note)}</div>'


def tiles(*parts: str) -> str:
    """Totals side by side."""
    return f'<div class="pp-tiles">{"".join(parts)}</div>'


def grid(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and figures in two columns of pairs."""
    return f'<div class="pp-grid">{"".join(f"{soft(name)}{strong(value)}" for name, value in pairs)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the cells are HTML already."""
    top = "".join(f"<th>{text(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="pp-scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def narrow(*parts: str) -> str:
    """Pieces over no more width than a few columns of figures need: further apart they are hard to compare."""
    return f'<div class="pp-narrow">{"".join(parts)}</div>'


def below(*parts: str) -> str:
    """Pieces at some distance from what stands above them; nothing where there are none."""
    inside = "".join(parts)
    return f'<div class="pp-above">{inside}</div>' if inside else ""


def empty(said: str) -> str:
    """What stands where there is nothing to show."""
    return page(f'<div class="pp-empty">{text(said)}</div>')
