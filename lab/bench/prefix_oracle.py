"""What prefix caches could save at most: one cache that serves everybody and knows everything at once."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


def oracle_tokens(
    prompts: Iterable[tuple[Sequence[int], int]], block_tokens: int, blocks: int | None = None
) -> list[int]:
    """Tokens of each prompt that such a cache would save. prompts: in order of arrival, ids of whole blocks and tokens.

    It holds every block of every prompt from the moment of its arrival, before anybody has computed it; of more than
    `blocks` (None: any number) the least recently used are forgotten. As in an engine the longest run of blocks from
    the start counts, and the last token is always computed.
    """
    held, found = OrderedDict[int, None](), []
    for ids, tokens in prompts:
        run = next((at for at, block in enumerate(ids) if block not in held), len(ids))
        found.append(max(0, min(run * block_tokens, tokens - 1)))
        for block in ids:
            held[block] = None
            held.move_to_end(block)
        while blocks is not None and len(held) > blocks:
            held.popitem(last=False)
    return found


def imbalance(computed: Sequence[float]) -> float:
    """The most that one instance computed over the mean; 1.0 where all computed as much."""
    return max(computed) * len(computed) / max(1e-9, sum(computed))
