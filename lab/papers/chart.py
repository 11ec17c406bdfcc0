"""Grouped bar charts as SVG text, without a drawing library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 46, 58
_COLOURS = ("#8b97a8", "#1f77b4", "#e28743", "#4c9f70", "#a05195", "#c0504d")


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars in groups: `series` maps a name to one value for each of `groups`. `name` is the file's stem."""

    name: str
    title: str
    unit: str
    groups: tuple[str, ...]
    series: Mapping[str, Sequence[float]]

    def svg(self) -> str:
        """The drawing; the same input gives the same text."""
        values = [v for bars in self.series.values() for v in bars]
        low, high, step = _axis(min(0.0, *values), max(0.0, *values))
        parts = [_OPEN, _text(_LEFT, 20, f"{self.title} [{self.unit}]", "title")]
        parts += self._legend()
        tick = low
        while tick <= high + step / 2:
            y = _y(tick, low, high)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "tick"))
            tick = round(tick + step, 10)
        parts += self._bars(low, high)
        return "\n".join([*parts, "</svg>\n"])

    def _legend(self) -> list[str]:
        parts, x = [], float(_LEFT)
        for name, colour in zip(self.series, _COLOURS, strict=False):
            parts.append(f'<rect x="{x:.0f}" y="28" width="10" height="10" fill="{colour}"/>')
            parts.append(_text(x + 14, 37, name, "name"))
            x += 30 + 7 * len(name)
        return parts

    def _bars(self, low: float, high: float) -> list[str]:
        parts = []
        room = (_WIDTH - _LEFT - _RIGHT) / len(self.groups)
        width = room * 0.8 / len(self.series)
        zero = _y(0.0, low, high)
        for at, group in enumerate(self.groups):
            begin = _LEFT + at * room + room * 0.1
            for which, (bars, colour) in enumerate(zip(self.series.values(), _COLOURS, strict=False)):
                x, y = begin + which * width, _y(bars[at], low, high)
                top, tall = min(y, zero), max(abs(y - zero), 0.5)
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{width * 0.94:.1f}" height="{tall:.1f}" fill="{colour}">'
                    f"<title>{bars[at]:.4g}</title></rect>"
                )
            for line, words in enumerate(_wrapped(group, max(6, int(room / 6.5)))):
                parts.append(_text(begin + room * 0.4, _HEIGHT - _BOTTOM + 16 + 13 * line, words, "group"))
        return parts


_OPEN = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
    'font-family="sans-serif" font-size="11">\n'
    "<style>.title{font-size:13px;font-weight:bold}.tick{text-anchor:end;fill:#666}.group{text-anchor:middle}"
    ".grid{stroke:#ddd}</style>\n"
    f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
)


def _axis(low: float, high: float) -> tuple[float, float, float]:
    """Round ends and spacing of some five ticks."""
    span = (high - low) or 1.0
    power = 10.0 ** floor(log10(span / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span / 5)
    return floor(low / step) * step, ceil(high / step) * step, step


def _y(number: float, low: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - (number - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _wrapped(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines[:3]
