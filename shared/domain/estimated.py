"""What the estimate of a route predicts, and how true such predictions turned out."""

from enum import StrEnum

import msgspec

from shared.domain.numbers import Finite

SHORT, LONG = 512, 4096  # tokens of the prompts that count as short, and as long


class RouteKind(StrEnum):
    """Who computes the prompt of a route, for comparisons of estimates with their outcomes."""

    WHOLE = "whole"  # the decode instance
    FULL = "full"  # a prefill instance
    SPLIT = "split"  # both
    KEPT = "kept"  # a prefill instance, which keeps the first tokens of the answer
    PULLED = "pulled"  # the first of these instances, which pulls the KV of the beginning


class Estimated(msgspec.Struct, frozen=True):
    """What the estimate of a route predicts, from the placement on: seconds to the first token, and for each further
    token. computes, decodes: the instances where the prompt begins and for whose decode it was made; a dispatcher may
    choose another one. late_s, pace: corrections that the predicted times contain, learned from earlier outcomes:
    seconds that were added to the time to the first token, and the factor of the time per token.
    """

    ttft_s: Finite
    tpot_s: Finite
    kind: RouteKind
    computes: str
    decodes: str
    late_s: Finite = 0.0
    pace: Finite = 1.0


class PromptSize(StrEnum):
    """The length of a prompt."""

    SHORT = "short"  # up to `SHORT` tokens
    MEDIUM = "medium"
    LONG = "long"  # from `LONG` tokens on

    @classmethod
    def of(cls, tokens: int) -> "PromptSize":
        return cls.SHORT if tokens <= SHORT else cls.MEDIUM if tokens < LONG else cls.LONG


class ErrorFigures(msgspec.Struct, frozen=True):
    """Relative errors of the last `count` requests. bias: their median; median, p90: of their absolute values."""

    count: int
    bias: float
    median: float
    p90: float
