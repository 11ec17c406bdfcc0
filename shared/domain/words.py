"""Figures as people say them."""


def duration(seconds: float) -> str:
    """Two or three digits, in the unit that fits: `60 ms`, `0.48 s`, `1.24 s`, `12 min`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 1.0:
        return f"{seconds:.2g} s"
    return f"{seconds:.3g} s" if seconds < 600.0 else f"{seconds / 60:.0f} min"


def count(number: float, what: str) -> str:
    """`1 token`, `512 tokens`, `1,024 tokens`."""
    return f"{number:,.0f} {what}{'' if round(number) == 1 else 's'}"


def size(size_bytes: float) -> str:
    """With a decimal prefix: `8.4 MB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.3g} {unit}"
    return f"{size_bytes:.0f} B"
