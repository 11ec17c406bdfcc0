"""Step times as three linear forms: of prefill chunks alone, of decodes alone, and of both. Fitted to any step times.

One form for each kind of step is within some 10 % of measured and modelled steps. The linear costs of the papers follow
from these forms (`shared.policy.papers.costs`).
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.optimize import nnls

from shared.cost.step import Batch
from shared.domain.rates import StepForm, StepRates, StepSource
from shared.errors import InvalidRequest

NAMES = ("fixed_s", "token_s", "position_s", "sequence_s", "context_s")  # of StepForm, in the order of `terms_of`
# Which of the terms count for a kind of step; the others are 0 in all of its batches.
TERMS: dict[str, tuple[int, ...]] = {"prefill": (0, 1, 2), "decode": (0, 3, 4), "mixed": (0, 1, 2, 3, 4)}


def step_rates_of(
    time_s: Callable[[Batch], float], budget: int = 512, decodes: int = 128, source: StepSource = StepSource.CATALOGUE
) -> StepRates:
    """The three linear forms of step times, over steps of up to `budget` tokens and `decodes` decodes."""
    batches = profile_batches(budget, decodes)
    forms = {kind: fit_form(kind, [(batch, time_s(batch)) for batch in of_kind]) for kind, of_kind in batches.items()}
    return StepRates(forms["prefill"], forms["decode"], forms["mixed"], source)


def profile_batches(budget: int, decodes: int) -> dict[str, list[Batch]]:
    """A light profile: batches by kind ("prefill", "decode", "mixed") that span what an engine computes."""
    chunks = sorted({max(1, budget // part) for part in (16, 4, 2, 1)})
    counts = sorted({max(1, decodes // part) for part in (128, 32, 8, 4, 2, 1)})
    beside = sorted({max(1, min(decodes, budget // 2) // part) for part in (32, 4, 1)})
    contexts = (128, 512, 1024, 2048, 4096)
    return {
        "prefill": [Batch(((new, before),)) for new in chunks for before in (0, *contexts[1:])],
        "decode": [Batch((), count, count * context) for count in counts for context in contexts],
        "mixed": [
            Batch(((max(1, (budget - count) // part), before),), count, count * context)
            for count in beside
            for part in (4, 1)
            for before in (0, 1024, 2048)
            for context in contexts[::2]
        ],
    }


def kind_of(batch: Batch) -> str:
    """The kind of step that computes the batch."""
    return "decode" if not batch.prefill else "mixed" if batch.decode_count else "prefill"


def terms_of(batch: Batch) -> tuple[float, float, float, float, float]:
    """What the linear forms weigh: 1, prompt tokens, their positions, decodes, the decodes' context."""
    tokens = positions = 0.0
    for new, before in batch.prefill:
        tokens += new
        positions += new * (before + new / 2.0)
    return 1.0, tokens, positions, float(batch.decode_count), float(batch.decode_context_tokens)


def fit_form(kind: str, samples: Sequence[tuple[Batch, float]]) -> StepForm:
    """The form of one kind of step from (batch, seconds): least squares of relative errors, without negative terms.

    Relative errors let short steps count as much as long ones. Raises InvalidRequest for fewer samples than terms, and
    for times that are not positive.
    """
    terms = TERMS[kind]
    if len(samples) < len(terms):
        raise InvalidRequest(f"{kind} steps: {len(samples)} samples are too few for {len(terms)} coefficients")
    seconds = np.array([seconds for _, seconds in samples])
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise InvalidRequest(f"{kind} steps: sample times must be positive and finite")
    table = np.array([terms_of(batch) for batch, _ in samples])[:, terms] / seconds[:, None]
    scale = np.maximum(np.abs(table).max(axis=0), 1e-30)  # terms differ by many orders of magnitude
    found = nnls(table / scale, np.ones(len(seconds)))[0] / scale
    return step_form(terms, found)


def step_form(terms: Iterable[int], values: Iterable[float], error: float = 0.0, steps: int = 0) -> StepForm:
    """A form with these values of these terms (positions in NAMES); the other terms are 0."""
    known = dict.fromkeys(NAMES, 0.0) | {NAMES[term]: float(value) for term, value in zip(terms, values, strict=True)}
    return StepForm(**known, error=error, steps=steps)


def saturation_tokens(time_s: Callable[[int], float], share: float = 0.9, max_tokens: int = 16384) -> int:
    """The least power of two of prefill tokens per step that reaches `share` of the best throughput.

    This sets ChunkSize (TetriInfer: 512 for OPT-13B on a V100): longer chunks delay decodes and gain little.
    """
    rates = {1 << power: (1 << power) / time_s(1 << power) for power in range(4, max_tokens.bit_length())}
    best = max(rates.values())
    return next(size for size, rate in rates.items() if rate >= share * best)
