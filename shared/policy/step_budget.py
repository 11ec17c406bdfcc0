"""Prompt tokens of an engine's step: the budget beside decodes, so that their next tokens are in time, and the chunk
size, with which a step saturates the accelerator.

A step with prompts takes at most 0.9 of the TPOT target and 0.6 of the gap target (`itl_s`) of the streams in it, of
the streams that are about to join it, and of its prompts that are to decode here. The share of the gap target is lower
because a stream that is handed over, which may be at any moment, waits for the step under way and then for its own.
"""

from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import ClassVar, Protocol

import msgspec

from shared.domain.job import Slo
from shared.domain.rates import StepForm, StepRates

MARGIN = 0.6  # of the least `gap_target_s`
TPOT_FACTOR = 1.5  # of it: 0.9 of the TPOT target
FLOOR_TOKENS = 32  # of a prompt, in each step: prompts make progress


class StepBudget(Protocol):
    """Whether a step keeps to `prefill_tokens`."""

    name: ClassVar[str]
    limits: ClassVar[bool]


@dataclass(frozen=True, slots=True)
class NoBudget:
    """A step holds as many prompt tokens as the chunk size allows."""

    name: ClassVar[str] = "off"
    limits: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class TpotBudget:
    """A step holds as many prompt tokens as the TPOT and gap targets of its decodes allow."""

    name: ClassVar[str] = "on"
    limits: ClassVar[bool] = True


class StepLoad(msgspec.Struct, frozen=True, gc=False):
    """The work of the next step besides prompts.

    decodes: their number, with `context_tokens` in all; streams whose KV is on its way to this engine, and the next one
    that waits for room here, count among them. gap_s: the least `gap_target_s` of these and of the prompts that are to
    decode here; infinite without any. before_tokens: computed tokens of the prompt under way, the most of several.
    """

    decodes: int
    context_tokens: float
    gap_s: float = inf
    before_tokens: int = 0


def gap_target_s(slo: Slo, gain: float = 1.0) -> float:
    """The longest allowed gap between two steps of a stream of this class, in seconds: its gap target, or 1.5 times its
    TPOT target for each of the `gain` tokens of a step. The TPOT target is a mean, but every step may hold prompts.
    """
    return min(slo.itl_s, TPOT_FACTOR * slo.tpot_s * gain)


def joining_gap_s(slo: Slo, waited_s: float, *, here: bool, gain: float = 1.0) -> float:
    """The rest of that gap for a stream that was handed over and has waited for `waited_s`. While its KV is not here,
    half of the rest: its own step is the one after the next.
    """
    left_s = gap_target_s(slo, gain) - max(0.0, waited_s)
    return left_s if here else left_s / 2.0


def prefill_tokens(rates: StepRates | None, load: StepLoad, most: int) -> int:
    """The most prompt tokens, up to `most`, with which the predicted step takes at most 0.6 × `gap_s`.

    At least 32, or `most` if that is less. Without a target or rates it is `most`. Solves
    `mixed_s(x, before, decodes, context) = 0.6 × gap_s`, a quadratic in x.
    """
    if rates is None or load.gap_s == inf or most <= FLOOR_TOKENS:
        return most
    form = rates.mixed if load.decodes else rates.prefill
    fixed_s = form.fixed_s + form.sequence_s * load.decodes + form.context_s * load.context_tokens
    left_s = MARGIN * load.gap_s - fixed_s
    if left_s <= 0.0:
        return FLOOR_TOKENS
    square = max(0.0, form.position_s) / 2.0
    linear = max(0.0, form.token_s + form.position_s * load.before_tokens)
    root = linear + sqrt(linear * linear + 4.0 * square * left_s)
    tokens = 2.0 * left_s / root if root > 0.0 else inf
    return most if tokens >= most else max(FLOOR_TOKENS, int(tokens))


# The chunk size: the number of tokens of a step that saturates the accelerator (TetriInfer 3.3.3; that nine tenths of
# the best throughput count as saturated is ours). With fewer tokens the accelerator is idle while it reads its weights;
# more delay the decodes in the same step for little gain.

SHARE = 0.9  # of the best prefill throughput
SMALL = 0.2  # a smaller relative change is not made
LEARNED_STEPS = 32  # steps from which a form describes the instance itself
LEAST_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """The allowed chunk sizes in tokens: from `least` to `most`, and between them multiples of `block`."""

    least: int
    most: int
    block: int = 1

    @classmethod
    def for_seats(cls, most: int, max_seqs: int, block: int) -> "ChunkBounds":
        """Bounds that leave at least half of a step for prompts with all seats decoding, as far as `most` allows."""
        return cls(min(most, max(LEAST_CHUNK_TOKENS, 2 * max_seqs)), most, block)


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
