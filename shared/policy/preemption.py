"""Who goes first among those that run at an engine, and who gives its KV blocks up when they run short."""

from collections.abc import Callable, Iterable, Reversible
from typing import TypeVar

Item = TypeVar("Item")


def heaviest_first(running: Iterable[Item], weight: Callable[[Item], float]) -> list[Item]:
    """Heavier classes first, and within one in the order given, which is that of admission."""
    return sorted(running, key=weight, reverse=True)


def victim(running: Reversible[Item], weight: Callable[[Item], float]) -> Item:
    """The youngest of the lightest class: the last by `heaviest_first`. Raises ValueError when nobody runs."""
    return min(reversed(running), key=weight)
