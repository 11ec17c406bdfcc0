"""The papers' linear costs, fitted by least squares to measured steps or to a step model."""

from collections.abc import Callable, Sequence

import numpy as np

from shared.cost.step import Batch, StepTimes
from shared.cost.step_rates import least_squares, step_rates_of
from shared.domain.rates import ChunkedCost, HuaweiCost, PartialPrefillCost, Rates, StepRates


def fit_huawei(prefills: Sequence[tuple[int, int, float]], decodes: Sequence[tuple[int, int, float]]) -> HuaweiCost:
    """From (batch, prompt tokens, seconds) of prefills and (batch, length, seconds) of decode iterations."""
    p = [*_solve(prefills, "prefill"), *_solve(decodes, "decode")]
    return HuaweiCost(*p)


def fit_partial_prefill(samples: Sequence[tuple[int, float]]) -> PartialPrefillCost:
    """From (tokens, seconds) of prefills."""
    table = np.array([(tokens, 1.0) for tokens, _ in samples])
    k_p, b_p = least_squares(table, [seconds for _, seconds in samples], "partial prefill")
    return PartialPrefillCost(k_p, b_p)


def fit_chunked(samples: Sequence[tuple[int, int, float]]) -> ChunkedCost:
    """From (prefill context, total decode context, seconds) of iterations that use the whole token budget."""
    table = np.array([(prefill, decode, 1.0) for prefill, decode, _ in samples])
    k_ctxp, k_ctxd, b_c = least_squares(table, [seconds for *_, seconds in samples], "chunked iteration")
    return ChunkedCost(k_ctxp, k_ctxd, b_c)


def huawei_of(model: StepTimes, batches: Sequence[int] = (2, 4, 8, 16, 32), longest: int = 2048) -> HuaweiCost:
    """p1…p8 of a step model, from the light profile that the paper describes (b = 2, 4, 8, …)."""
    lengths = [longest // 8, longest // 4, longest // 2, longest]
    grid = [(b, length) for b in batches for length in lengths]
    prefills = [(b, n, model.step_time_s(Batch(((n, 0),) * b))) for b, n in grid]
    decodes = [(b, n, model.decode_time_s(b, b * n)) for b, n in grid]
    return fit_huawei(prefills, decodes)


def partial_prefill_of(model: StepTimes, longest: int = 2048, chunk: int = 0) -> PartialPrefillCost:
    """k_p and b_p of a step model over prompts up to `longest`, in steps of `chunk` tokens (0: in one step)."""
    sizes = sorted({max(1, longest * i // 16) for i in range(1, 17)})
    return fit_partial_prefill([(n, _chunks_s(model, n, chunk or n)) for n in sizes])


def chunked_of(model: StepTimes, budget: int = 512, decodes: int = 64, longest: int = 4096) -> ChunkedCost:
    """k_ctxp, k_ctxd and b_c of a step model for chunked iterations of `budget` tokens, decodes included."""
    running = min(decodes, budget // 2)
    samples = []
    for context in range(0, longest + 1, max(1, longest // 8)):
        for mean in range(0, longest + 1, max(1, longest // 8)):
            batch = Batch(((budget - running, context),), running, running * mean)
            samples.append((context, running * mean, model.step_time_s(batch)))
    return fit_chunked(samples)


def rates_of(model: StepTimes, budget: int = 512, price_per_hour: float = 0.0, weight: float = 1.0) -> Rates:
    """What policies know about an instance that runs like `model`, in steps of `budget` tokens."""
    partial = partial_prefill_of(model, chunk=budget)
    step, chunked = step_rates_of(model.step_time_s, budget), chunked_of(model, budget)
    return Rates(partial, chunked, huawei_of(model), step, price_per_hour=price_per_hour, weight=weight)


def rates_of_steps(step: StepRates, budget: int) -> Rates:
    """The papers' costs of an instance whose steps cost `step`, in chunks of `budget` tokens; price and weight unknown.

    A prompt of n tokens takes n / budget full steps and, on average, half a one that is not full; the quadratic part
    is taken at a prompt of 1,024 tokens.
    """
    prefill, mixed, decode = step.prefill, step.mixed, step.decode
    token_s = prefill.token_s + prefill.fixed_s / budget
    partial = PartialPrefillCost(token_s + prefill.position_s * 1024.0, prefill.fixed_s / 2.0)
    full_s = mixed.fixed_s + budget * (mixed.token_s + mixed.position_s * budget / 2.0)
    chunked = ChunkedCost(mixed.position_s * budget, mixed.context_s, full_s)
    batch_s = token_s + prefill.position_s * 512.0
    huawei = HuaweiCost(
        batch_s, 0.0, 0.0, prefill.fixed_s / 2.0, decode.context_s, decode.sequence_s, 0.0, decode.fixed_s
    )
    return Rates(partial, chunked, huawei, step)


def saturation_tokens(time_s: Callable[[int], float], share: float = 0.9, most: int = 16384) -> int:
    """The least power of two of prefill tokens per step that reaches `share` of the best throughput.

    This sets ChunkSize (TetriInfer: 512 for OPT-13B on a V100): longer chunks delay decodes and gain little.
    """
    rates = {1 << power: (1 << power) / time_s(1 << power) for power in range(4, most.bit_length())}
    best = max(rates.values())
    return next(size for size, rate in rates.items() if rate >= share * best)


def _chunks_s(model: StepTimes, tokens: int, chunk: int) -> float:
    return sum(model.step_time_s(Batch(((min(chunk, tokens - done), done),))) for done in range(0, tokens, chunk))


def _solve(samples: Sequence[tuple[int, int, float]], what: str) -> tuple[float, ...]:
    table = np.array([(b * n, b, n, 1.0) for b, n, _ in samples], dtype=np.float64)
    return least_squares(table, [seconds for *_, seconds in samples], what)
