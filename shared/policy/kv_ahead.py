"""KV memory of a decode instance over the steps to come: what its jobs will hold, and whether one more fits to its end.

A job that decodes holds one token more with each step until its answer ends, and then nothing. A sum over all jobs at a
few stretches of steps is enough to see the peak that they come to together, and is short enough for a heartbeat.
Source: ours; the peak of future memory as in LightLLM's past-future scheduler (arXiv 2507.10150), on a grid.
"""

from collections.abc import Iterable
from math import ceil

from shared.domain.instance import InstanceView

# Ends of the stretches, in steps; the last stretch has none. A job counts as there by a quarter too long at most.
STRETCHES = (
    *range(16, 129, 16),
    *range(160, 257, 32),
    *range(320, 1025, 64),
    *(1280, 1536, 2048, 2560, 3072, 4096, 6144, 8192),
)
COUNT = len(STRETCHES)

Ahead = tuple[int, ...]  # the most tokens held in each stretch; empty where no job decodes

OVERDUE_TOKENS = 16  # that an answer longer than expected is taken to go on for, at least
OVERDUE_SHARE = 0.25  # and of what it has given


def remaining_tokens(given: int, expected: int, most: int) -> int:
    """Tokens to come of an answer that has given so many. expected: in all. most: its max_tokens."""
    left = expected - given
    if left <= 0:
        left = max(OVERDUE_TOKENS, int(OVERDUE_SHARE * given))
    return max(1, min(left, most - given))


def own_part(used_tokens: int, held_tokens: int) -> float:
    """Of the tokens that an instance's jobs hold together, the part that takes blocks: where all blocks in use are
    less, jobs share those of a common prefix, and each counts for its part.
    """
    return min(1.0, used_tokens / held_tokens) if held_tokens > 0 and used_tokens > 0 else 1.0


def shared_each(used_tokens: int, held_tokens: int, jobs: int) -> float:
    """Of the tokens that each of an instance's jobs holds, those in blocks that others hold, too, on average."""
    return max(0, held_tokens - used_tokens) / jobs if jobs > 0 else 0.0


def takes_tokens(view: InstanceView, prompt: int, saved: int) -> int:
    """Tokens of KV that a job's prompt takes where the instance is known to hold `saved` of them: all but those in
    blocks that are in use, as far as those that decode there share blocks. An unused cached block counts as
    free until the job takes it.
    """
    load, info = view.load, view.info
    if saved <= 0:
        return prompt
    used = (info.total_blocks - load.free_blocks) * info.block_size
    held = load.context_tokens - load.queued_prefill_tokens - load.waiting_tokens
    return max(1, prompt - min(saved, int(shared_each(used, held, load.decoding))))


def ahead_of(jobs: Iterable[tuple[int, int]], block_size: int, part: float = 1.0) -> Ahead:
    """Of jobs with (tokens held now, tokens to come); each holds whole blocks. part: see `own_part`."""
    held = [0] * COUNT
    for whole, left in jobs:
        now = whole if part >= 1.0 else ceil(part * whole)
        for at in range(COUNT):
            if at and left <= STRETCHES[at - 1]:
                break
            end = STRETCHES[at]
            held[at] += -(-(now + (left if left < end else end)) // block_size) * block_size
    return tuple(held) if held[0] else ()


def with_job(ahead: Ahead, now: int, left: int, block_size: int, after: int = 0) -> Ahead:
    """With one more that begins to decode `after` steps from now. What it holds then is kept for it before, too: how
    fast the steps before that are depends on the prompts in them.
    """
    held = list(ahead) if ahead else [0] * COUNT
    for at in range(COUNT):
        if at and after + left <= STRETCHES[at - 1]:
            break
        gone = max(0, STRETCHES[at] - after)
        held[at] += -(-(now + (left if left < gone else gone)) // block_size) * block_size
    return tuple(held)


def fits_after(ahead: Ahead, room_tokens: int, now: int, left: int, block_size: int) -> float:
    """Steps until a job that then holds `now` tokens, with `left` to come, fits in `room_tokens` to its end.

    0: it fits at once. Where no job decodes it always does.
    """
    whole = -(-(now + left) // block_size) * block_size
    if not ahead or max(ahead) + whole <= room_tokens:
        return 0.0
    start = 0
    last = COUNT
    while last and not ahead[last - 1]:
        last -= 1
    while start < last:
        begins = STRETCHES[start - 1] if start else 0
        ends = begins + left
        at = start
        while at < last and (at == start or STRETCHES[at - 1] < ends):
            most = min(left, STRETCHES[at] - begins)
            if ahead[at] + -(-(now + most) // block_size) * block_size > room_tokens:
                break
            at += 1
        else:
            return float(begins)
        start = at + 1  # not before what is in the way is over
    return float(STRETCHES[last - 1]) if last else 0.0
