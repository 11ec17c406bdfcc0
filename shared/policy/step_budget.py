"""How many prompt tokens a step may compute beside decodes, so that their next tokens come in time."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, Protocol

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
    """Prompts give way to the TPOT targets of those that decode in the same step."""

    name: ClassVar[str] = "on"
    limits: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What the coming step has to do anyhow.

    decodes: how many, of `context_tokens` in all. tpot_s: the tightest target among them. before_tokens: computed
    tokens of the prompt under way, the most if there are several.
    """

    decodes: int
    context_tokens: float
    tpot_s: float = inf
    before_tokens: int = 0


def prefill_tokens(rates: StepRates | None, load: StepLoad, most: int) -> int:
    """The most prompt tokens, up to `most`, with which the predicted step takes at most 0.9 × `tpot_s`.

    Never less than 32, or `most` if that is less. Without decodes or rates it is `most`. Solves
    `mixed_s(x, before, decodes, context) = 0.9 × tpot_s`, a quadratic in x.
    """
    if rates is None or load.decodes <= 0 or most <= FLOOR_TOKENS:
        return most
    form = rates.mixed
    fixed_s = form.fixed_s + form.sequence_s * load.decodes + form.context_s * load.context_tokens
    left_s = MARGIN * load.tpot_s - fixed_s
    if left_s == inf:
        return most
    if left_s <= 0.0:
        return FLOOR_TOKENS
    square = max(0.0, form.position_s) / 2.0
    linear = max(0.0, form.token_s + form.position_s * load.before_tokens)
    root = linear + sqrt(linear * linear + 4.0 * square * left_s)
    tokens = 2.0 * left_s / root if root > 0.0 else inf
    return most if tokens >= most else max(FLOOR_TOKENS, int(tokens))
