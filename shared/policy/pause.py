"""A stream whose KV blocks were taken back for others: how long its pause lasts here, and whether to move it.

Wherever the stream goes on, its prompt and its tokens have to be computed again, so that a move costs no more work than
staying. What differs is how soon there is room and how long the computing takes.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from shared.domain.rates import UNKNOWN_STEPS, StepRates
from shared.policy.kv_ahead import Ahead, ahead_of, fits_after

MOVE_SHARE = 0.5  # of the pause here, that a move may take at most: either estimate may be off by a third
MOVE_LEAST_S = 0.1  # that a move has to save at least: less is within the age of the loads that it rests on
PAUSE_NEWS_S = 1.0  # so often the instance tells how long the pause is expected to last, and a place is looked for
STEADY_TOKENS = 16  # that it has to have room for beside its context: one that fits for a step only is paused again


class Beside(NamedTuple):
    """The jobs that have blocks where a stream is paused: what they will hold (`kv_ahead`), how many they are, and
    their context.
    """

    ahead: Ahead
    jobs: int
    context_tokens: int

    @classmethod
    def of(cls, jobs: Sequence[tuple[int, int]], block_size: int, part: float = 1.0) -> "Beside":
        """Of jobs with (tokens held now, tokens to come). part: see `own_part`."""
        return cls(ahead_of(jobs, block_size, part), len(jobs), ceil(part * sum(now for now, _ in jobs)))


def pause_s(
    beside: Beside, room_tokens: int, held: int, left: int, block_size: int, rates: StepRates | None, chunk: int
) -> float:
    """Seconds until a stream of `held` tokens, with `left` to come, gives its next token where it was paused.

    room_tokens: of all blocks, less what paused streams hold that get blocks first. chunk: tokens of a step.
    """
    rates = rates or UNKNOWN_STEPS
    decodes, context = beside.jobs, beside.context_tokens
    steps = fits_after(beside.ahead, room_tokens, held, min(left, STEADY_TOKENS), block_size)
    room_s = steps * rates.decode_s(decodes, context)
    budget = max(1, chunk - decodes)
    count = -(-held // budget)
    each = held / count
    return room_s + sum(rates.mixed_s(each, each * at, decodes, context) for at in range(count))


def moves(here_s: float, elsewhere_s: float) -> bool:
    """Whether a stream that is paused for `here_s` more should go on where its next token comes in `elsewhere_s`."""
    return elsewhere_s <= MOVE_SHARE * here_s and here_s - elsewhere_s >= MOVE_LEAST_S
