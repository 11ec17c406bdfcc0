"""Made workloads: when requests arrive, and how long they are. Everything follows from its seed.

The first request arrives at time 0. Whole arrays at once: a million requests take a fraction of a second.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.policy.lengths import HEAVY_TOKENS
from shared.sim.workload import Lengths, Workload

HEAVY_PROMPT_TOKENS = 512  # a prompt of more is a heavy prefill (TetriInfer 5.1)


def evenly(workload: Workload, rate: float) -> Workload:
    """The same requests, one each 1/rate seconds."""
    _require_positive(rate=rate)
    return workload.with_arrivals(np.arange(len(workload)) / rate)


def poisson(workload: Workload, rate: float, seed: int = 0) -> Workload:
    """The same requests as a Poisson process of `rate` requests a second."""
    _require_positive(rate=rate)
    return _with_gaps(workload, np.random.default_rng(seed).exponential(1.0 / rate, len(workload) - 1))


def bursts(workload: Workload, rate: float, seed: int = 0, cv: float = 2.0) -> Workload:
    """The same requests with gamma-distributed gaps of mean 1/rate and coefficient of variation `cv`.

    cv 1 is a Poisson process, less is more even, more is in bursts: at 2 the likeliest gap is none.
    """
    _require_positive(rate=rate, cv=cv)
    shape = 1.0 / cv**2
    return _with_gaps(workload, np.random.default_rng(seed).gamma(shape, 1.0 / (rate * shape), len(workload) - 1))


def on_off(workload: Workload, rate: float, seed: int = 0, on_s: float = 10.0, off_s: float = 10.0) -> Workload:
    """The same requests, `on_s` seconds of Poisson arrivals and `off_s` of none in turn; `rate` over both."""
    _require_positive(rate=rate, on_s=on_s)
    if off_s < 0:
        raise InvalidRequest(f"off_s must be at least 0, not {off_s}")
    busy = poisson(workload, rate * (on_s + off_s) / on_s, seed).arrival_s
    return workload.with_arrivals(busy + np.floor(busy / on_s) * off_s)


def synthetic(
    count: int,
    prompt_tokens: float,
    output_tokens: float,
    *,
    prompt_cv: float = 0.0,
    output_cv: float = 0.0,
    longest_tokens: int | None = None,
    seed: int = 0,
) -> Workload:
    """`count` requests, all at time 0, with prompts and outputs of those mean lengths.

    A coefficient of variation above 0 makes lengths log-normal, independent of each other; 0 makes all alike.
    longest_tokens: bound of prompt + output; longer ones are cut, the prompt first (the means then come out lower).
    """
    _require_positive(count=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    rng = np.random.default_rng(seed)
    prompts = _lengths(rng, count, prompt_tokens, prompt_cv)
    outputs = _lengths(rng, count, output_tokens, output_cv)
    if longest_tokens is not None:
        if longest_tokens < 2:
            raise InvalidRequest(f"longest_tokens must be at least 2, not {longest_tokens}")
        prompts = np.minimum(prompts, np.maximum(1, longest_tokens - outputs))
        outputs = np.minimum(outputs, longest_tokens - prompts)
    return Workload(f"synthetic {prompt_tokens:g}/{output_tokens:g}", np.zeros(count), prompts, outputs)


class Tetri(StrEnum):
    """TetriInfer's workloads: light or heavy prefill (more than 512 tokens), light or heavy decode (more than 128)."""

    LPLD = "LPLD"
    LPHD = "LPHD"
    HPLD = "HPLD"
    HPHD = "HPHD"
    MIXED = "Mixed"


def tetri(
    kind: str, count: int = 128, seed: int = 0, lengths: Workload | None = None, longest_tokens: int = 2048
) -> Workload:
    """`count` requests of one of TetriInfer's workloads, all at time 0.

    With `lengths` (a table of ShareGPT's token counts): drawn from its requests of that kind, each at most once
    while there are enough; Mixed from all of them. Only those of at most `longest_tokens` in all take part: the
    paper's OPT-13B has 2048. Without a table: log-normal stand-ins, of which Mixed has a quarter each, see `_PROMPTS`.
    Source: TetriInfer 5.1. Its table is not published: one whose prompts hold the conversation so far (the public
    8k-filtered one) has longer light prompts than the paper's median of 18.
    """
    try:
        chosen = Tetri(kind)
    except ValueError as error:
        raise InvalidRequest(f"unknown workload {kind!r}; known: {', '.join(Tetri)}") from error
    _require_positive(count=count)
    rng = np.random.default_rng(seed)
    if lengths is not None:
        return _drawn(chosen, count, rng, lengths, longest_tokens)
    return _stand_in(chosen, count, rng, longest_tokens)


def _drawn(kind: Tetri, count: int, rng: np.random.Generator, table: Workload, longest: int) -> Workload:
    usable = table.prompt_tokens + table.output_tokens <= longest
    if kind is not Tetri.MIXED:
        usable &= (table.prompt_tokens > HEAVY_PROMPT_TOKENS) == (kind[0] == "H")
        usable &= (table.output_tokens > HEAVY_TOKENS) == (kind[2] == "H")
    pool = np.flatnonzero(usable)
    if not len(pool):
        raise InvalidRequest(f"{table.name}: no request of {kind} with at most {longest} tokens")
    at = rng.choice(pool, count, replace=count > len(pool))
    prefixes = None if table.prefixes is None else tuple(table.prefixes[row] for row in at.tolist())
    drawn = replace(
        table,
        arrival_s=np.zeros(count),
        prompt_tokens=table.prompt_tokens[at],
        output_tokens=table.output_tokens[at],
        prefixes=prefixes,
    )
    return replace(drawn, name=str(kind))


# Median and spread (of the logarithm) of the stand-ins, light and heavy. TetriInfer gives a median of 18 tokens for
# ShareGPT's short prompts (2.2.1) and of 128 for its answers (5.1); the rest is our guess.
_PROMPTS = ((18.0, 1.0), (800.0, 0.4))
_OUTPUTS = ((50.0, 0.8), (280.0, 0.5))


def _stand_in(kind: Tetri, count: int, rng: np.random.Generator, longest: int) -> Workload:
    most_output = longest // 4
    most_prompt = longest - most_output
    if most_output <= HEAVY_TOKENS or most_prompt <= HEAVY_PROMPT_TOKENS:
        raise InvalidRequest(f"longest_tokens {longest} leaves no room for heavy requests; use 704 at least")
    prompt_ranges = ((1, HEAVY_PROMPT_TOKENS), (HEAVY_PROMPT_TOKENS + 1, most_prompt))
    output_ranges = ((1, HEAVY_TOKENS), (HEAVY_TOKENS + 1, most_output))
    if kind is Tetri.MIXED:
        kinds = rng.integers(0, 4, count)
        heavy = (kinds // 2 == 1, kinds % 2 == 1)
    else:
        heavy = (np.full(count, kind[0] == "H"), np.full(count, kind[2] == "H"))
    prompts = _two_sorts(rng, heavy[0], _PROMPTS, prompt_ranges)
    outputs = _two_sorts(rng, heavy[1], _OUTPUTS, output_ranges)
    return Workload(f"{kind} (log-normal)", np.zeros(count), prompts, outputs)


def _two_sorts(
    rng: np.random.Generator,
    heavy: NDArray[np.bool_],
    shapes: tuple[tuple[float, float], ...],
    ranges: tuple[tuple[int, int], ...],
) -> Lengths:
    lengths = np.empty(len(heavy), dtype=np.int64)
    for sort, (median, spread) in enumerate(shapes):
        of_it = heavy == bool(sort)
        lengths[of_it] = _truncated(rng, int(of_it.sum()), median, spread, ranges[sort])
    return lengths


def _truncated(rng: np.random.Generator, count: int, median: float, spread: float, within: tuple[int, int]) -> Lengths:
    """Log-normal lengths, drawn again until they lie within."""
    kept = np.empty(0, dtype=np.int64)
    while len(kept) < count:
        more = np.rint(rng.lognormal(math.log(median), spread, 2 * (count - len(kept)))).astype(np.int64)
        kept = np.concatenate((kept, more[(more >= within[0]) & (more <= within[1])]))
    return kept[:count]


def _lengths(rng: np.random.Generator, count: int, mean: float, cv: float) -> Lengths:
    if not cv >= 0:
        raise InvalidRequest(f"a coefficient of variation must be at least 0, not {cv}")
    if cv == 0:
        return np.full(count, max(1, round(mean)), dtype=np.int64)
    variance = math.log(1.0 + cv**2)
    drawn = rng.lognormal(math.log(mean) - variance / 2.0, math.sqrt(variance), count)
    return np.asarray(np.maximum(1.0, np.rint(drawn)), dtype=np.int64)


def _with_gaps(workload: Workload, gaps: NDArray[np.float64]) -> Workload:
    return workload.with_arrivals(np.concatenate(([0.0], np.cumsum(gaps))))


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise InvalidRequest(f"{name} must be positive, not {value}")


Arrivals = Callable[[Workload, float, int], Workload]

# How requests may arrive, by name: (workload, requests a second, seed).
ARRIVALS: dict[str, Arrivals] = {
    "trace": lambda workload, rate, seed: workload.at_rate(rate),
    "poisson": poisson,
    "even": lambda workload, rate, seed: evenly(workload, rate),
    "bursts": bursts,
    "on_off": on_off,
}
