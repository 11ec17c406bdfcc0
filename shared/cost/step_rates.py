"""Step times as three linear forms: of prefill chunks alone, of decodes alone, and of both. Fitted to any step times.

Cronus eq. 3 and Huawei eqs 3 and 4 are such forms. One form for each kind of step is within some 10 % of measured and
modelled steps.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from shared.cost.step import Batch
from shared.domain.rates import StepForm, StepRates
from shared.errors import InvalidRequest

NAMES = ("fixed_s", "token_s", "position_s", "sequence_s", "context_s")  # of StepForm, in the order of `terms_of`
# Which of the terms count for a kind of step; the others are 0 in all of its batches.
TERMS: dict[str, tuple[int, ...]] = {"prefill": (0, 1, 2), "decode": (0, 3, 4), "mixed": (0, 1, 2, 3, 4)}


def step_rates_of(time_s: Callable[[Batch], float], budget: int = 512, decodes: int = 128) -> StepRates:
    """The three linear forms of step times, over steps of up to `budget` tokens and `decodes` decodes."""
    batches = profile_batches(budget, decodes)
    forms = [fit_form(kind, [(batch, time_s(batch)) for batch in of_kind]) for kind, of_kind in batches.items()]
    return StepRates(*forms)


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


def terms_of(batch: Batch) -> tuple[float, float, float, float, float]:
    """What the linear forms weigh: 1, prompt tokens, their positions, decodes, the decodes' context."""
    tokens = positions = 0.0
    for new, before in batch.prefill:
        tokens += new
        positions += new * (before + new / 2.0)
    return 1.0, tokens, positions, float(batch.decode_count), float(batch.decode_context_tokens)


def fit_form(kind: str, samples: Sequence[tuple[Batch, float]]) -> StepForm:
    """The form of one kind of step from (batch, seconds): least squares of relative errors, without negative terms."""
    terms = TERMS[kind]
    table = np.array([terms_of(batch) for batch, _ in samples])[:, terms]
    seconds = checked_seconds([seconds for _, seconds in samples], len(terms), f"{kind} steps")
    scale = np.maximum(np.abs(table / seconds[:, None]).max(axis=0), 1e-30)  # terms differ by many orders of magnitude
    found = nnls(table / seconds[:, None] / scale, np.ones(len(seconds)))[0] / scale
    every = dict.fromkeys(range(len(NAMES)), 0.0) | dict(zip(terms, map(float, found), strict=True))
    return StepForm(every[0], every[1], every[2], every[3], every[4])


def checked_seconds(seconds: Sequence[float], columns: int, what: str) -> NDArray[np.float64]:
    """The times as an array. Raises InvalidRequest for too few samples, and for times that are not positive."""
    if len(seconds) < columns or columns == 0:
        raise InvalidRequest(f"{what}: {len(seconds)} samples are too few for {columns or 'any'} coefficients")
    measured = np.asarray(seconds, dtype=np.float64)
    if not np.all(np.isfinite(measured) & (measured > 0)):
        raise InvalidRequest(f"{what}: sample times must be positive and finite")
    return measured


def least_squares(table: NDArray[np.float64], seconds: Sequence[float], what: str) -> tuple[float, ...]:
    """Least squares of relative errors, so that short steps count as much as long ones."""
    columns = table.shape[1] if table.ndim == 2 else 0
    measured = checked_seconds(seconds, columns, what)
    solution, _, rank, _ = np.linalg.lstsq(table / measured[:, None], np.ones(len(measured)), rcond=None)
    if rank < columns:
        raise InvalidRequest(f"{what}: the samples do not vary enough to tell {columns} coefficients apart")
    return tuple(float(x) for x in solution)
