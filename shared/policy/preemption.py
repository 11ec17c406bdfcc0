"""Preemption: the order of the requests that run at an engine, and which one loses its KV blocks when they run
short.
"""

from collections.abc import Callable, Iterable, Reversible
from typing import TypeVar

Item = TypeVar("Item")
Rank = tuple[float, bool]  # the weight of a request's class, and whether it is a stream: its client has tokens


def heaviest_first(running: Iterable[Item], rank: Callable[[Item], Rank]) -> list[Item]:
    """Heavier classes first, streams first within a class, and otherwise the order given, which is that of
    admission.
    """
    return sorted(running, key=rank, reverse=True)


def victim(running: Reversible[Item], rank: Callable[[Item], Rank]) -> Item:
    """The last by `heaviest_first`: of the lightest class the youngest prompt without a token, or without such a prompt
    the youngest stream. Raises ValueError when nothing runs.
    """
    return min(reversed(running), key=rank)
