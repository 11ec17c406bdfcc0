"""How many prompt tokens a step may compute beside decodes, so that their next tokens come in time.

The rule: a step with prompts takes at most 0.9 × the least of the TPOT and gap targets of the streams in it and of
those that are about to join it. TPOT is a mean, but prompts may be in every step, so it limits each of them; the p99
of the gaps (`itl_s`) limits a step where it is the tighter target.
"""

from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, Protocol

from shared.domain.job import Slo
from shared.domain.rates import StepRates

MARGIN = 0.9  # of the tightest target: predictions err, and a step is not all of the gap between two tokens
FLOOR_TOKENS = 32  # prompts always get on


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
    """Prompts give way to the TPOT and gap targets of those that decode in the same step."""

    name: ClassVar[str] = "on"
    limits: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What the coming step has to do anyhow.

    decodes: how many, of `context_tokens` in all; streams whose KV is on its way to this engine, and the next one that
    waits for room here, count among them. gap_s: the least `gap_target_s` among them. before_tokens: computed tokens
    of the prompt under way, the most if there are several.
    """

    decodes: int
    context_tokens: float
    gap_s: float = inf
    before_tokens: int = 0


def gap_target_s(slo: Slo) -> float:
    """How long the gap between two tokens of a stream of this class may be, in seconds."""
    return min(slo.tpot_s, getattr(slo, "itl_s", slo.tpot_s))


def prefill_tokens(rates: StepRates | None, load: StepLoad, most: int) -> int:
    """The most prompt tokens, up to `most`, with which the predicted step takes at most 0.9 × `gap_s`.

    At least 32, or `most` if that is less. Without decodes or rates it is `most`. Solves
    `mixed_s(x, before, decodes, context) = 0.9 × gap_s`, a quadratic in x.
    """
    if rates is None or load.decodes <= 0 or most <= FLOOR_TOKENS:
        return most
    form = rates.mixed
    fixed_s = form.fixed_s + form.sequence_s * load.decodes + form.context_s * load.context_tokens
    left_s = MARGIN * load.gap_s - fixed_s
    if left_s == inf:
        return most
    if left_s <= 0.0:
        return FLOOR_TOKENS
    square = max(0.0, form.position_s) / 2.0
    linear = max(0.0, form.token_s + form.position_s * load.before_tokens)
    root = linear + sqrt(linear * linear + 4.0 * square * left_s)
    tokens = 2.0 * left_s / root if root > 0.0 else inf
    return most if tokens >= most else max(FLOOR_TOKENS, int(tokens))
