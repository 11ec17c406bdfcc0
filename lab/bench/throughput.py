"""What a system does in a stretch of time, from when its answers came."""

import numpy as np
from numpy.typing import ArrayLike


def tokens_per_s(
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    first_s: ArrayLike,
    last_s: ArrayLike,
    from_s: float,
    to_s: float,
) -> float:
    """Tokens a second from `from_s` to `to_s` of requests, shape [n] each: a prompt's tokens count when the first token
    of its answer comes, those of the answer evenly from then to the last.

    Whole requests counted when they end would say more or less by all that is under way at both ends.
    """
    prompts, outputs, first, last = (
        np.asarray(values, np.float64) for values in (prompt_tokens, output_tokens, first_s, last_s)
    )
    inside = (first >= from_s) & (first < to_s)
    took = np.maximum(last - first, 1e-9)
    share = np.clip(np.minimum(last, to_s) - np.maximum(first, from_s), 0.0, None) / took
    return float((prompts[inside].sum() + (outputs * share).sum()) / (to_s - from_s))
