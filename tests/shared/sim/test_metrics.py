from dataclasses import replace
from math import isnan

import numpy as np
import pytest

from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.metrics import attainment, goodput, summary
from shared.sim.outcomes import Gaps, InstanceUse, Outcomes, SimResult, Status
from shared.sim.workload import Workload

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def use(name: str, busy_s: float, price: float = 3.6, accelerators: int = 1) -> InstanceUse:
    return InstanceUse(
        instance_id=name,
        accelerator="A100",
        accelerators=accelerators,
        price_per_hour=price,
        busy_s=busy_s,
        role_s={"prefill": 10.0},
        prefill_tokens=0,
        decode_tokens=0,
        steps=0,
        preemptions=0,
        peak_kv_share=0.5,
        flips=1,
    )


def outcomes() -> Outcomes:
    """Four that completed, of which two meet both targets; one refused."""
    workload = Workload("w", np.arange(5.0), np.full(5, 100), np.array([11, 11, 11, 1, 11]))
    empty = Outcomes.empty(workload)
    return replace(
        empty,
        first_token_s=workload.arrival_s + np.array([0.5, 2.0, 0.5, 1.0, np.nan]),
        last_token_s=workload.arrival_s + np.array([1.0, 2.5, 2.5, 1.0, np.nan]),
        status=np.array([0, 0, 0, 0, int(Status.REFUSED)], dtype=np.int8),
        attempts=np.array([1, 2, 1, 1, 1], dtype=np.int16),
        longest_gap_s=np.array([0.1, 0.4, 0.25, np.nan, np.nan]),
        gaps_over=np.array([0, 1, 0, 0, 0]),
    )


def result(**changes: object) -> SimResult:
    gaps = Gaps()
    gaps.add(0.05, 9)
    gaps.add(0.2, 1)
    plain = SimResult("w", "l", outcomes(), (use("p", 5.0), use("d", 10.0, accelerators=2)), gaps, 10.0, 42, 2e9)
    return replace(plain, **changes)


def test_attainment_counts_every_request() -> None:
    met = attainment(outcomes(), SLO)
    assert met.ttft == pytest.approx(3 / 5)  # the one token that comes after exactly 1 s is in time
    assert met.tpot == pytest.approx(3 / 5)  # and has no TPOT to miss
    assert met.itl == pytest.approx(3 / 5)  # of ten gaps none may be longer; one token has none
    assert met.every == pytest.approx(2 / 5)
    paused = replace(outcomes(), gaps_over=np.array([1, 0, 0, 0, 0]), longest_gap_s=np.full(5, 0.4))
    assert attainment(paused, SLO).every == pytest.approx(1 / 5)


def test_latencies_are_of_completed_requests() -> None:
    figures = summary(result(), SLO)
    assert figures["ttft_mean_s"] == pytest.approx(1.0)
    assert figures["ttft_p50_s"] == pytest.approx(0.75)
    assert figures["jct_mean_s"] == pytest.approx((1.0 + 2.5 + 2.5 + 1.0) / 4)
    assert figures["tpot_mean_s"] == pytest.approx((0.05 + 0.05 + 0.2) / 3)  # the one-token request has none
    assert figures["tpot_p99_s"] == pytest.approx(np.percentile([0.05, 0.05, 0.2], 99))
    assert figures["longest_gap_p50_s"] == 0.25
    assert figures["longest_gap_max_s"] == 0.4
    assert figures["longest_gap_p90_s"] == pytest.approx(np.percentile([0.1, 0.25, 0.4], 90))
    assert figures["itl_mean_s"] == pytest.approx(0.065)
    assert figures["itl_p50_s"] == pytest.approx(0.05, rel=0.005)
    assert figures["itl_p99_s"] == pytest.approx(0.2, rel=0.005)


def test_endings_and_throughput() -> None:
    figures = summary(result(), SLO)
    assert [figures[name] for name in ("requests", "completed", "refused", "impossible", "unfinished")] == [
        5,
        4,
        1,
        0,
        0,
    ]
    assert figures["resumed"] == 1
    assert figures["requests_per_s"] == pytest.approx(0.4)
    assert figures["output_tokens_per_s"] == pytest.approx(3.4)
    assert figures["tokens_per_s"] == pytest.approx(43.4)


def test_use_and_cost() -> None:
    figures = summary(result(), SLO)
    assert figures["utilisation_p"] == pytest.approx(0.5)
    assert figures["utilisation_d"] == pytest.approx(1.0)
    assert figures["utilisation_mean"] == pytest.approx(0.75)
    assert figures["resource_s"] == pytest.approx(5.0 + 20.0)
    assert figures["cost_usd"] == pytest.approx(2 * 3.6 * 10 / 3600)
    assert figures["usd_per_million_output_tokens"] == pytest.approx(0.02 / 34e-6)
    assert figures["usd_per_million_tokens"] == pytest.approx(0.02 / 434e-6)
    assert figures["requests_per_usd"] == pytest.approx(200)
    assert figures["output_tokens_per_usd"] == pytest.approx(1700)
    assert figures["kv_gb"] == pytest.approx(2.0)
    assert figures["flips"] == 2


def test_what_does_not_exist_is_nan() -> None:
    workload = Workload("w", np.zeros(2), np.ones(2, dtype=np.int64), np.ones(2, dtype=np.int64))
    figures = summary(result(outcomes=Outcomes.empty(workload), gaps=Gaps(), duration_s=0.0, instances=()), SLO)
    for name in ("ttft_mean_s", "jct_p99_s", "itl_p50_s", "requests_per_s", "utilisation_mean", "requests_per_usd"):
        assert isnan(figures[name])
    assert figures["attainment"] == 0.0
    assert figures["unfinished"] == 2


def run_up_to(capacity: float) -> tuple[list[float], object]:
    """A cluster that meets the SLO of all requests up to a rate, and of none beyond."""
    rates: list[float] = []

    def run(rate: float) -> SimResult:
        rates.append(rate)
        workload = Workload("w", np.zeros(4), np.ones(4, dtype=np.int64), np.ones(4, dtype=np.int64))
        late = 0.5 if rate <= capacity else 5.0
        done = replace(
            Outcomes.empty(workload),
            first_token_s=np.full(4, late),
            last_token_s=np.full(4, late),
            status=np.zeros(4, dtype=np.int8),
        )
        return result(outcomes=done)

    return rates, run


@pytest.mark.parametrize("capacity", [0.11, 1.0, 7.3, 900.0])
@pytest.mark.parametrize("high", [None, 1000.0])
def test_goodput_finds_the_capacity(capacity: float, high: float | None) -> None:
    rates, run = run_up_to(capacity)
    found = goodput(run, SLO, high=high, tolerance=0.01)
    assert capacity * 0.99 <= found.rate <= capacity
    assert found.bounded
    assert found.attainment == 1.0
    assert [rate for rate, _ in found.tried] == rates
    assert len(rates) < 40


def test_goodput_at_the_ends() -> None:
    _, run = run_up_to(0.01)
    assert goodput(run, SLO).rate == 0.0
    _, run = run_up_to(5.0)
    found = goodput(run, SLO, low=1.0, high=2.0)
    assert (found.rate, found.bounded) == (2.0, False)
    _, run = run_up_to(float("inf"))
    assert not goodput(run, SLO).bounded


@pytest.mark.parametrize(
    "bad", [{"target": 0.0}, {"target": 1.1}, {"low": 0.0}, {"low": 2.0, "high": 1.0}, {"tolerance": 0.0}]
)
def test_goodput_refuses_nonsense(bad: dict[str, float]) -> None:
    _, run = run_up_to(1.0)
    with pytest.raises(InvalidRequest, match="goodput needs"):
        goodput(run, SLO, **bad)
