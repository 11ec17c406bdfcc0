"""Chunk size: the number of tokens of a step that saturates the accelerator (TetriInfer 3.3.3; that nine tenths of the
best throughput count as saturated is ours).

With fewer tokens the accelerator is idle while it reads its weights; more delay the decodes in the same step for little
gain.
"""

from dataclasses import dataclass
from math import ceil, inf, sqrt

from shared.domain.rates import StepForm

SHARE = 0.9  # of the best prefill throughput
SMALL = 0.2  # a smaller relative change is not made
LEARNED_STEPS = 32  # steps from which a form describes the instance itself
FLOOR_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """The allowed chunk sizes in tokens: from `least` to `most`, and between them multiples of `block`."""

    least: int
    most: int
    block: int = 1

    @classmethod
    def of(cls, most: int, max_seqs: int, block: int) -> "ChunkBounds":
        """Bounds that leave at least half of a step for prompts with all seats decoding, as far as `most` allows."""
        return cls(min(most, max(FLOOR_TOKENS, 2 * max_seqs)), most, block)


def saturating_tokens(form: StepForm, share: float = SHARE) -> float:
    """The least x with x / prefill_s(x, 0) ≥ share × the best throughput over all x; inf where more always gains.

    With f, t and p for fixed_s, token_s and position_s, prefill_s(x, 0) = f + t·x + p·x²/2 and the best throughput is
    1 / b, b = t + √(2·f·p), at x = √(2·f/p). So x is the lesser root of p·x²/2 − (b/share − t)·x + f = 0; without
    attention that is f/t × share/(1 − share).
    """
    fixed_s, token_s, position_s = (max(0.0, cost) for cost in (form.fixed_s, form.token_s, form.position_s))
    if fixed_s == 0.0:
        return 0.0
    slack_s = (token_s + sqrt(2.0 * fixed_s * position_s)) / share - token_s
    if slack_s <= 0.0:
        return inf
    return 2.0 * fixed_s / (slack_s + sqrt(slack_s * slack_s - 2.0 * fixed_s * position_s))


def chunk_tokens(form: StepForm, bounds: ChunkBounds) -> int:
    """The chunk size of an instance whose prefill steps cost `form`."""
    wanted = saturating_tokens(form)
    if wanted >= bounds.most:
        return bounds.most
    return min(bounds.most, max(bounds.least, ceil(wanted / bounds.block) * bounds.block))


def next_chunk_tokens(now: int, form: StepForm, bounds: ChunkBounds) -> int:
    """The chunk size of an instance that serves with `now`, which stays while few steps are learned from or the change
    would be small.
    """
    if form.steps < LEARNED_STEPS:
        return now
    wanted = chunk_tokens(form, bounds)
    return wanted if abs(wanted - now) > SMALL * now else now
