"""Addresses of one service that several processes give: written one after another, with commas between them."""


def several(said: str) -> tuple[str, ...]:
    """Each of them, in order."""
    return tuple(part for part in (each.strip() for each in said.split(",")) if part)
