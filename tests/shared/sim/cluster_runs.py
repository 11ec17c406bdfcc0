"""Workloads and policies of the tests of whole runs, and what holds for each of them."""

import msgspec
import numpy as np
import pytest

from shared.policy.placement import Policies
from shared.sim.outcomes import SimResult
from shared.sim.spec import plain_policies
from shared.sim.workload import Workload


def workload(*requests: tuple[float, int, int]) -> Workload:
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Workload("test", np.array(arrivals, dtype=np.float64), np.array(prompts), np.array(outputs))


def drawn(count: int, seed: int, rate: float = 20.0) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        "drawn", np.cumsum(rng.exponential(1 / rate, count)), rng.integers(1, 400, count), rng.integers(1, 120, count)
    )


def policies(**changed: object) -> Policies:
    """The default ones but for those named."""
    return msgspec.structs.replace(plain_policies(), **changed)


def with_split(split: object) -> Policies:
    return policies(split=split)


def check(result: SimResult, work: Workload, gaps: bool = True) -> None:
    """What must hold of every run that ends well."""
    rows = result.outcomes
    assert rows.completed.all()
    assert (rows.first_token_s > rows.arrival_s).all()
    assert (rows.last_token_s >= rows.first_token_s).all()
    several_tokens = rows.output_tokens > 1
    assert (rows.last_token_s > rows.first_token_s)[several_tokens].all()
    if gaps:  # every gap between two tokens of a request is counted once, and together they span its decode
        assert result.gaps.count == pytest.approx(float((work.output_tokens - 1).sum()))
        assert result.gaps.total_s == pytest.approx(float((rows.last_token_s - rows.first_token_s).sum()))
    for use in result.instances:
        assert 0.0 <= use.busy_s <= sum(use.role_s.values()) + 1e-9
        assert 0.0 <= use.peak_kv_share <= 1.0
