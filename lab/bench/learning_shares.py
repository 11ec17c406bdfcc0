"""Who got how much of the new work, before and after an instance was slowed down."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A request, when it came (unix seconds), and where it went. tokens: of its prompt and its answer."""

    at_s: float
    instance_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Episode:
    """An instance was slowed down at `at_s`, unix seconds."""

    instance_id: str
    at_s: float


def placed(rows: Iterable[Mapping[str, Any]]) -> list[Placed]:
    """From rows of the status table; what found no place is left out."""
    return [
        Placed(row["arrived_s"], row["decode_instance"], row["prompt_tokens"] + row["output_tokens"])
        for row in rows
        if row["decode_instance"]
    ]


def share(work: Sequence[Placed], episodes: Sequence[Episode], begins_s: float, ends_s: float) -> float | None:
    """Of the new work of all episodes from `begins_s` until `ends_s` after the slowdown, what the slowed one got.

    None where there was no work.
    """
    mine = every = 0
    for episode in episodes:
        for one in work:
            if begins_s <= one.at_s - episode.at_s < ends_s:
                every += one.tokens
                mine += one.tokens if one.instance_id == episode.instance_id else 0
    return mine / every if every else None


def windows(
    work: Sequence[Placed], episodes: Sequence[Episode], begins_s: float, ends_s: float
) -> list[tuple[float, float | None]]:
    """Shares in windows of `WINDOW_S`, by when each begins."""
    count = round((ends_s - begins_s) / WINDOW_S)
    starts = [begins_s + number * WINDOW_S for number in range(count)]
    return [(start, share(work, episodes, start, start + WINDOW_S)) for start in starts]
