from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cluster_monitor.slo_windows import (
    MAX_CLASSES,
    OTHER,
    SAMPLES,
    SloOutcome,
    SloWindows,
    attainment,
    percentile,
)
from shared.errors import InvalidRequest


def outcome(
    ttft: float | None, tpot: float | None, *, slo: str = "chat", failed: bool = False, gaps: int = 0, over: int = 0
) -> SloOutcome:
    longest_s = (0.5 if over else 0.1) if gaps else None
    return SloOutcome(
        slo=slo,
        ended_s=0.0,
        ttft_s=ttft,
        tpot_s=tpot,
        ttft_target_s=1.0,
        tpot_target_s=0.1,
        failed=failed,
        itl_target_s=0.25,
        longest_gap_s=longest_s,
        gaps=gaps,
        gaps_over=over,
    )


@pytest.mark.parametrize(
    ("given_", "ttft", "tpot"),
    [
        (outcome(1.0, 0.1), True, True),
        (outcome(1.1, 0.1), False, True),
        (outcome(0.5, 0.2), True, False),
        (outcome(0.5, None), True, True),
        (outcome(None, None), False, True),
        (outcome(0.5, 0.05, failed=True), False, False),
    ],
)
def test_what_meets_a_target(given_: SloOutcome, ttft: bool, tpot: bool) -> None:
    assert (given_.ttft_met, given_.tpot_met, given_.met) == (ttft, tpot, ttft and tpot)


@pytest.mark.parametrize(
    ("gaps", "over", "met"), [(0, 0, True), (99, 0, True), (99, 1, False), (100, 1, True), (199, 2, False)]
)
def test_of_a_hundred_gaps_one_may_exceed_its_target(gaps: int, over: int, met: bool) -> None:
    given_ = outcome(0.5, 0.05, gaps=gaps, over=over)
    assert (given_.itl_met, given_.met) == (met, met)


def test_the_worst_gap_of_a_window_is_exact() -> None:
    windows = SloWindows([60, 10], Random(0))
    windows.add(outcome(0.5, 0.05, gaps=10, over=1), 100.0)
    for _ in range(4 * SAMPLES):
        windows.add(outcome(0.5, 0.05, gaps=10), 101.0)
    long, short = sorted(windows.reports(115.0), key=lambda one: -one.window_s)
    assert (long.longest_gap_s["max"], long.longest_gap_s["p90"], long.itl_target_s) == (0.5, 0.1, 0.25)
    assert long.itl_attainment == pytest.approx(4 * SAMPLES / (4 * SAMPLES + 1))
    assert (short.longest_gap_s["max"], short.itl_attainment) == (None, None)


def test_attainment_is_the_share_that_met_both() -> None:
    assert attainment([]) is None
    assert attainment([outcome(0.5, 0.05), outcome(0.5, 0.5), outcome(2, 0.05), outcome(0.1, None)]) == 0.5


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 2.0), (0.25, 1.0), (0.75, 3.0), (0.76, 4.0), (1.0, 4.0), (0.0, 1.0)]
)
def test_nearest_rank_percentile(share: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == value
    assert percentile([], share) is None


def test_windows_forget_what_is_older() -> None:
    windows = SloWindows([60, 10], Random(0))
    windows.add(outcome(5.0, None), 100.0)  # missed
    windows.add(outcome(0.5, 0.05), 150.0)
    windows.add(outcome(0.5, 0.05, slo="batch"), 155.0)
    reports = {(r.slo, r.window_s): r for r in windows.reports(155.5)}
    assert reports["chat", 60].requests == 2
    assert reports["chat", 60].attainment == 0.5
    assert reports["chat", 60].ttft_s["p50"] == 0.5
    assert reports["chat", 60].ttft_s["p99"] == 5.0
    assert reports["chat", 10].attainment == 1.0
    assert reports["batch", 10].requests == 1
    assert (reports["chat", 10].ttft_target_s, reports["chat", 10].tpot_target_s) == (1.0, 0.1)
    late = {(r.slo, r.window_s): r for r in windows.reports(1000.0)}
    assert late["chat", 60].ttft_target_s is None
    assert late["chat", 60].requests == 0
    assert late["chat", 60].attainment is None
    assert late["chat", 60].ttft_s["p50"] is None


def test_windows_must_make_sense() -> None:
    with pytest.raises(InvalidRequest, match="windows"):
        SloWindows([], Random(0))


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 0.3)), min_size=1, max_size=300))
def test_counts_are_exact_whatever_is_sampled(latencies: list[tuple[float, float]]) -> None:
    windows = SloWindows([60], Random(0))
    outcomes = [outcome(ttft, tpot) for ttft, tpot in latencies]
    for number, each in enumerate(outcomes):
        windows.add(each, 100.0 + number / (2 * SAMPLES))
    (report,) = windows.reports(103.0)
    assert report.requests == len(outcomes)
    assert report.attainment == pytest.approx(attainment(outcomes))
    assert report.ttft_s["p50"] in [ttft for ttft, _ in latencies]


def test_classes_beyond_the_limit_count_together() -> None:
    """Their names come from outside; without a limit each would be kept for good."""
    windows = SloWindows((60.0,), Random(1))
    for number in range(10 * MAX_CLASSES):
        windows.add(outcome(0.1, 0.01, slo=f"class-{number}"), 100.0)
    reports = {report.slo: report.requests for report in windows.reports(100.0)}
    assert len(reports) == MAX_CLASSES + 1
    assert (reports["class-0"], reports[OTHER]) == (1, 9 * MAX_CLASSES)
