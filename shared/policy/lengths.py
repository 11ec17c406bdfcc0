"""How long an answer will be, for policies that reserve memory or tell heavy decodes from light ones."""

from enum import StrEnum
from math import ceil

from shared.domain.job import JobView

HEAVY_TOKENS = 128


class PredictedEnd(StrEnum):
    """Which length counts: an end of the likeliest range [lower, upper), or a figure of the whole distribution."""

    LOWER = "lower"
    MIDDLE = "middle"
    UPPER = "upper"
    MEAN = "mean"
    P50 = "p50"
    P90 = "p90"


_QUANTILES = {PredictedEnd.P50: 0.5, PredictedEnd.P90: 0.9}


def predicted_tokens(job: JobView, end: PredictedEnd, unpredicted_tokens: int) -> int:
    """Output tokens to expect of `job`, never more than its max_tokens.

    Without a prediction, or with one of no confidence, `unpredicted_tokens` is taken.
    Source: TetriInfer 3.3.4 uses the lower end; the other ends are F (FORMULAS 2), those of the distribution ours: what
    must hold asks for p90, a sum over many jobs for the mean.
    """
    said = job.prediction
    if said is None or said.confidence <= 0.0:
        return min(job.max_tokens, unpredicted_tokens)
    if end is PredictedEnd.MEAN:
        return min(job.max_tokens, _whole(said.mean))
    if end in _QUANTILES:
        return min(job.max_tokens, _whole(said.quantile(_QUANTILES[end])))
    lower, upper = said.lower_tokens, said.upper_tokens
    middle = (lower + upper) // 2
    return min(job.max_tokens, lower if end is PredictedEnd.LOWER else upper if end is PredictedEnd.UPPER else middle)


def _whole(tokens: float) -> int:
    return ceil(tokens - 1e-6)  # what a sum of shares is off by


def is_heavy(job: JobView) -> bool:
    """Whether `job` counts as a heavy decode: more than 128 output tokens.

    Source: TetriInfer 5.1 for the bound; F: the median of what is predicted is compared (of a mere range its middle),
    and without a prediction max_tokens, so that unpredicted jobs spread by their number.
    """
    known = job.prediction is not None and bool(job.prediction.shares)
    return predicted_tokens(job, PredictedEnd.P50 if known else PredictedEnd.MIDDLE, job.max_tokens) > HEAVY_TOKENS
