"""Numbers as text: durations, shares, counts, sizes, ages."""

from datetime import datetime
from zoneinfo import ZoneInfo

NONE = "–"


def duration(seconds: float | None) -> str:
    """At most three digits, in the unit that fits: `1.3 µs`, `85 ms`, `1.24 s`, `3 min`."""
    if seconds is None:
        return NONE
    if 0 < seconds < 1e-4:
        return f"{_digits(seconds * 1e6)} µs"
    if seconds < 0.1:
        return f"{_digits(seconds * 1000)} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{_digits(seconds)} s"
    return f"{seconds / 60:.0f} min"


def share(value: float | None) -> str:
    """A share of 0..1 in per cent; less than all is not rounded up to 100 %."""
    if value is None:
        return NONE
    return f"{min(value * 100, 99.9) if value < 1 else 100:.3g} %"


def count(value: float | None) -> str:
    """A whole number, shortened from ten thousand on."""
    if value is None:
        return NONE
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{_digits(value / (1e3 if unit == 'k' else limit))} {unit}"
    return f"{value:,.0f}".replace(",", " ")


def rate(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}/s"


def size(value_bytes: float) -> str:
    """Bytes with a decimal prefix."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value_bytes >= limit:
            return f"{_digits(value_bytes / limit)} {unit}"
    return f"{value_bytes:.0f} B"


def ago(then_s: float, now_s: float) -> str:
    return f"{span(now_s - then_s)} ago"


def span(seconds: float) -> str:
    """A long time, coarsely: `45 s`, `12 min`, `3 h`, `2 d`."""
    seconds = max(0.0, seconds)
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(time_s: float, now_s: float, zone: str) -> str:
    """The time of day in the reader's time zone, with the date unless it is today, and the age."""
    then, now = (datetime.fromtimestamp(each, ZoneInfo(zone)) for each in (time_s, now_s))
    text = then.strftime("%H:%M:%S" if then.date() == now.date() else "%d %b %H:%M")
    return f"{text} ({ago(time_s, now_s)})"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
