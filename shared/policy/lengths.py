"""How long an answer will be, for policies that reserve memory or tell heavy decodes from light ones."""

from enum import StrEnum

from shared.domain.job import JobView

HEAVY_TOKENS = 128


class PredictedEnd(StrEnum):
    """Which end of the predicted range [lower, upper) counts as the length."""

    LOWER = "lower"
    MIDDLE = "middle"
    UPPER = "upper"


def predicted_tokens(job: JobView, end: PredictedEnd, unpredicted_tokens: int) -> int:
    """Output tokens to expect of `job`, never more than its max_tokens.

    Without a prediction, or with one of no confidence, `unpredicted_tokens` is taken.
    Source: TetriInfer 3.3.4 uses the lower end; the other two ends are F (FORMULAS 2).
    """
    if job.prediction is None or job.prediction.confidence <= 0.0:
        return min(job.max_tokens, unpredicted_tokens)
    lower, upper = job.prediction.lower_tokens, job.prediction.upper_tokens
    middle = (lower + upper) // 2
    return min(job.max_tokens, lower if end is PredictedEnd.LOWER else upper if end is PredictedEnd.UPPER else middle)


def is_heavy(job: JobView) -> bool:
    """Whether `job` counts as a heavy decode: more than 128 output tokens.

    Source: TetriInfer 5.1 for the bound; F: the middle of the predicted range is compared, and without a
    prediction max_tokens, so that unpredicted jobs spread by their number.
    """
    return predicted_tokens(job, PredictedEnd.MIDDLE, job.max_tokens) > HEAVY_TOKENS
