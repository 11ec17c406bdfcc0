"""How the page looks: `look.css` and small pieces of HTML. All text is escaped here and nowhere else."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from shared.domain.verdict import Level
from shared.palette import BAD, CAUTION, DECODE, GOOD, IDLE, PREFILL, ROLE, STAGE, STATE, TRANSFER

__all__ = ["BAD", "CAUTION", "DECODE", "GOOD", "IDLE", "PREFILL", "TRANSFER"]

ROLE_COLOUR, STATE_COLOUR, SPAN_COLOUR = ROLE, STATE, STAGE
LEVEL_COLOUR = {Level.GOOD: GOOD, Level.IDLE: IDLE, Level.DEGRADED: CAUTION, Level.DOWN: BAD}
LEVEL_SIGN = {Level.GOOD: "✓", Level.IDLE: "○", Level.DEGRADED: "▲", Level.DOWN: "✕"}  # for those who see no colours

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


def sign(level: Level) -> str:
    """How bad it is, as a sign on its colour."""
    return f'<i class="pp-sign" style="--c:{LEVEL_COLOUR[level]}">{LEVEL_SIGN[level]}</i>'


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


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Names and values in a line."""
    line = "".join(f"<span>{soft(name)} {strong(value)}</span>" for name, value in pairs)
    return f'<div class="pp-facts">{line}</div>'


def narrow(*parts: str) -> str:
    """Pieces over no more width than a few columns of figures need: further apart they are hard to compare."""
    return f'<div class="pp-narrow">{"".join(parts)}</div>'


def below(*parts: str) -> str:
    """Pieces at some distance from what stands above them; nothing where there are none."""
    inside = "".join(parts)
    return f'<div class="pp-above">{inside}</div>' if inside else ""


def said(words: str) -> str:
    """What somebody wrote, line by line as it is."""
    return page(f'<div class="pp-said">{text(words)}</div>')


def empty(said: str) -> str:
    """What stands where there is nothing to show."""
    return page(f'<div class="pp-empty">{text(said)}</div>')
