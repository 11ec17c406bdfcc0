"""Addresses of a service of several processes, written with commas between them."""


def several(text: str) -> tuple[str, ...]:
    """The addresses, in order."""
    return tuple(part for part in (each.strip() for each in text.split(",")) if part)
