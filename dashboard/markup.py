"""Small pieces of HTML, styled by `style.css`. Every text is escaped here and nowhere else."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from shared.domain.verdict import Level
from shared.palette import BAD, CAUTION, DECODE, GOOD, IDLE, PREFILL, ROLE, STAGE, STATE, TRANSFER

__all__ = ["BAD", "CAUTION", "DECODE", "GOOD", "IDLE", "PREFILL", "ROLE", "STAGE", "STATE", "TRANSFER"]

LEVEL_COLOUR = {Level.GOOD: GOOD, Level.IDLE: IDLE, Level.DEGRADED: CAUTION, Level.DOWN: BAD}
LEVEL_SIGN = {Level.GOOD: "✓", Level.IDLE: "○", Level.DEGRADED: "▲", Level.DOWN: "✕"}  # readable without colours
STYLE = Path(__file__).with_name("style.css")


def page(*parts: str, stale: bool = False) -> str:
    """Pieces as one styled element; grey when they are stale."""
    return f'<div class="pp{" pp-stale" if stale else ""}">{"".join(parts)}</div>'


def text(value: object) -> str:
    return escape(str(value))


def soft(value: object) -> str:
    return f'<span class="pp-soft">{text(value)}</span>'


def strong(value: object) -> str:
    return f"<b>{text(value)}</b>"


def dot(value: object, colour: str, hint: str = "") -> str:
    """Text after a coloured dot; `hint` appears when the mouse points at it."""
    return f'<span style="--c:{colour}" title="{text(hint)}"><i class="pp-dot"></i>{text(value)}</span>'


def badge(value: object, colour: str, *, outlined: bool = False) -> str:
    """A short word on a tint of its colour."""
    return f'<span class="pp-badge{" pp-outlined" if outlined else ""}" style="--c:{colour}">{text(value)}</span>'


def role_badge(role: str) -> str:
    return badge(role, {"prefill": PREFILL, "decode": DECODE}.get(role, IDLE))


def bar(label: str, share: float | None, value: str, colour: str) -> str:
    """A labelled bar of a share of 0..1; None is an empty bar."""
    width = min(100.0, max(0.0, 100 * (share or 0.0)))
    inner = f'<div class="pp-bar"><i style="--c:{colour};background:{colour};width:{width:.1f}%"></i></div>'
    return f'<div class="pp-barline">{soft(label)}{inner}<span>{text(value)}</span></div>'


def tile(label: str, value: str, note: str, colour: str = "") -> str:
    """One figure with its label and a note; `colour` marks a problem, which the note names."""
    marked = f' class="pp-marked" style="--c:{colour}"' if colour else ""
    return f'<div class="pp-tile"><em>{text(label)}</em><strong{marked}>{text(value)}</strong>{soft(note)}</div>'


def sign(level: Level) -> str:
    return f'<i class="pp-sign" style="--c:{LEVEL_COLOUR[level]}">{LEVEL_SIGN[level]}</i>'


def tiles(*parts: str) -> str:
    return f'<div class="pp-tiles">{"".join(parts)}</div>'


def grid(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns of pairs."""
    return f'<div class="pp-grid">{"".join(f"{soft(name)}{strong(value)}" for name, value in pairs)}</div>'


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Names and values in one line."""
    line = "".join(f"<span>{soft(name)} {strong(value)}</span>" for name, value in pairs)
    return f'<div class="pp-facts">{line}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, narrow: bool = False) -> str:
    """A table of cells that are HTML already; `narrow` keeps columns of figures close enough to compare."""
    top = "".join(f"<th>{text(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    whole = f'<div class="pp-scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    return f'<div class="pp-narrow">{whole}</div>' if narrow else whole


def below(*parts: str) -> str:
    """Pieces at some distance from what stands above them; nothing for no pieces."""
    inside = "".join(parts)
    return f'<div class="pp-above">{inside}</div>' if inside else ""


def verbatim(words: str) -> str:
    """A user's or a model's text with its line breaks."""
    return page(f'<div class="pp-verbatim">{text(words)}</div>')


def empty(reason: str) -> str:
    """A placeholder that says why there is nothing to show."""
    return page(f'<div class="pp-empty">{text(reason)}</div>')


def markdown_text(value: str) -> str:
    """Text that a Markdown element shows unchanged."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>$:#~" else letter for letter in value)
