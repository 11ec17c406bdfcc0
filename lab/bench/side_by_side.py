"""Policies side by side at the same rate: what readers of answers feel, in a row each."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from lab.calibrate.traffic import Sample
from shared.domain.job import Slo
from shared.sim.metrics import attainment, summary
from shared.sim.outcomes import SimResult

Row = dict[str, Any]  # by column; seconds, and shares in 0..1
COLUMNS = ("ttft_p50_s", "ttft_p90_s", "jct_p50_s", "jct_p90_s", "itl_p99_s", "longest_gap_p90_s", "longest_gap_max_s")


def of_result(head: Mapping[str, Any], result: SimResult, slo: Slo) -> Row:
    """Of a simulated run. head: what it was, before its figures."""
    figures = summary(result, slo)
    return _row(head, {name: figures[name] for name in COLUMNS}, attainment(result.outcomes, slo).every)


def of_samples(head: Mapping[str, Any], samples: Sequence[Sample], slo: Slo) -> Row:
    """Of a live run, as its clients saw it."""
    longest = [gap_s for one in samples if (gap_s := one.longest_gap_s) is not None]
    figures = {
        **_shares("ttft", [one.ttft_s for one in samples], 50, 90),
        **_shares("jct", [one.jct_s for one in samples], 50, 90),
        **_shares("itl", [gap_s for one in samples for gap_s in one.gaps_s], 99),
        **_shares("longest_gap", longest, 90),
        "longest_gap_max_s": max(longest, default=float("nan")),
    }
    return _row(head, figures, sum(one.met(slo) for one in samples) / len(samples))


def faster(row: Row, factor: float) -> Row:
    """A row whose times are so many times as short."""
    short = {name: round(row[name] / factor, 4) for name in COLUMNS if row[name] is not None}
    return {**row, **short}


def median_of(rows: Sequence[Row]) -> Row:
    """By column; an empty cell where no row has a figure."""
    numbers = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}
    return {name: round(median(values), 4) if values else None for name, values in numbers.items()}


def _shares(name: str, values: Sequence[float], *shares: int) -> dict[str, float]:
    return {f"{name}_p{share}_s": float(np.percentile(values, share)) if values else float("nan") for share in shares}


def _row(head: Mapping[str, Any], figures: Mapping[str, float], attained: float) -> Row:
    known = {name: round(value, 4) if isfinite(value := figures[name]) else None for name in COLUMNS}
    return {**head, "attainment": round(attained, 4), **known}
