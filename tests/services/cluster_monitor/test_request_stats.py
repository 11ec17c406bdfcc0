from math import ceil
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cluster_monitor.request_stats import (
    CLASSES,
    KEPT_S,
    MOST,
    OTHER,
    Ended,
    Histogram,
    How,
    Served,
    ServedBook,
    bucket_of,
    merged,
    observe,
    quantile,
    total,
    window_begins,
)


def ended(slo: str = "chat", how: How = How.COMPLETED, at: float = 1_000.0, **more: Any) -> Ended:
    base: dict[str, Any] = {"ttft_s": 0.5, "tpot_s": 0.05, "ttft_target_s": 1.0, "tpot_target_s": 0.1}
    return Ended(slo, how, at, **(base | {"prompt_tokens": 100, "output_tokens": 20} | more))


def served(*some: Ended) -> Served:
    found = Served()
    for one in some:
        found.add(one)
    return found


def test_what_is_counted() -> None:
    found = served(
        ended(seconds={"queue": 0.2, "decode": 1.0}, whole_s=1.5, predicted="classifier", transfers=1),
        ended(ttft_s=2.0, seconds={"queue": 1.8}, whole_s=3.0, transfers=1, transfers_failed=1),
        ended(tpot_s=None, output_tokens=1),
        ended(how=How.FAILED, ttft_s=None, tpot_s=None, code="peer_lost"),
        ended(how=How.CANCELLED),
        ended(how=How.REFUSED, ttft_s=None, tpot_s=None, code="busy", count=7),
    )
    assert (found.completed, found.failed, found.cancelled, found.refused, found.judged) == (3, 1, 1, 7, 4)
    assert (found.ttft_met, found.tpot_met, found.met) == (2, 3, 2)
    assert (found.failures, found.refusals, found.predicted) == ({"peer_lost": 1}, {"busy": 7}, {"classifier": 1})
    assert (found.timed, found.whole_s, found.seconds) == (2, 4.5, {"queue": 2.0, "decode": 1.0})
    assert found.itl_met == 3
    assert sum(found.stages["queue"].values()) == 2
    assert (found.transfers, found.transfers_failed) == (2, 1)
    assert (found.ttft_target_s, found.tpot_target_s) == (1.0, 0.1)


def test_a_pause_misses_the_target_that_the_mean_meets() -> None:
    gaps: dict[str, Any] = {"itl_target_s": 0.25, "gaps": 19}
    found = served(ended(longest_gap_s=0.1, **gaps), ended(longest_gap_s=2.0, gaps_over=1, **gaps))
    assert (found.tpot_met, found.itl_met, found.met, found.itl_target_s) == (2, 1, 1, 0.25)
    assert sum(found.longest_gap.values()) == 2
    assert total([found, served(ended(longest_gap_s=0.2, **gaps))]).itl_met == 2


def test_parts_add_up_to_the_whole() -> None:
    some = [
        ended(seconds={"queue": 0.2}, whole_s=1.0, predicted="none"),
        ended(how=How.FAILED, code="lost"),
        ended(ttft_s=3.0, seconds={"prefill": 0.5}, whole_s=2.0),
    ]
    assert total([served(some[0]), served(*some[1:])]) == served(*some)
    assert total([]) == Served()


def test_as_json_and_back() -> None:
    found = served(ended(seconds={"queue": 0.2}))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Served) == found


def test_steps_of_time() -> None:
    book = ServedBook()
    for at in (1_000.0, 1_009.9, 1_010.0, 1_060.0):
        book.add(ended(at=at), at)
    assert [(slot, one.completed) for slot, one in book.changed(1_060.0)] == [
        ((10, 1_000, "chat"), 2),
        ((10, 1_010, "chat"), 1),
        ((10, 1_060, "chat"), 1),
        ((60, 960, "chat"), 3),
        ((60, 1_020, "chat"), 1),
    ]
    assert book.changed(1_060.0) == []
    book.add(ended(at=1_001.0), 1_061.0)  # a scheduler told late
    assert [(slot, one.completed) for slot, one in book.changed(1_061.0)] == [
        ((10, 1_000, "chat"), 3),
        ((60, 960, "chat"), 4),
    ]


@pytest.mark.parametrize(("at", "slot"), [(2_000.0, 1_000), (-99_999.0, 400)])
def test_clocks_that_are_wrong(at: float, slot: int) -> None:
    book = ServedBook()
    book.add(ended(at=at), 1_000.0)
    assert book.changed(1_000.0)[0][0] == (10, slot, "chat")


def test_what_is_old_is_forgotten() -> None:
    book = ServedBook()
    book.add(ended(), 1_000.0)
    book.changed(1_000.0)
    book.changed(1_000.0 + KEPT_S + 300.0)
    assert book.window(1e9, 1_000.0) == {}


def test_the_window_before_now() -> None:
    book = ServedBook()
    for at in (900.0, 945.0, 950.0, 1_000.0):
        book.add(ended(at=at), at)
    book.add(ended("batch", at=1_000.0), 1_000.0)
    found = book.window(60.0, 1_005.0)
    assert {slo: one.completed for slo, one in found.items()} == {"chat": 3, "batch": 1}


def test_classes_beyond_the_bound_share_one_row() -> None:
    book = ServedBook()
    for number in range(CLASSES + 3):
        book.add(ended(f"class-{number}"), 1_000.0)
    found = book.window(60.0, 1_000.0)
    assert len(found) == CLASSES + 1
    assert found[OTHER].completed == 3


def test_a_window_begins_with_a_whole_step() -> None:
    assert [window_begins(60.0, now) for now in (1_000.0, 1_005.0, 1_009.9, 1_010.0)] == [940.0, 940.0, 940.0, 950.0]


def test_time_before_first_tokens_adds_up() -> None:
    one = Served()
    one.add(ended(seconds={"queue": 0.2, "decode": 1.0}, before_first={"queue": 0.2}))
    assert total([one, one]).before_first == {"queue": 0.4}


def test_steps_are_kept_for_as_long_as_a_request_may_be_told_late() -> None:
    """A class that is served without a pause has a bounded number of them, however long that goes on."""
    counts = []
    for hours in (1, 3):
        book = ServedBook(600.0)
        for at in range(0, hours * 3_600, 10):
            book.add(ended(at=float(at)), float(at))
            book.changed(float(at))
        counts.append(len(book._slots))
    assert counts == [75, 75]  # 63 steps of 10 s and 12 of a minute
    book.add(ended(at=3 * 3_600 - 500.0), 3 * 3_600.0)
    assert book.changed(3 * 3_600.0)[0][0] == (10, 3 * 3_600 - 500, "chat")


seconds = st.floats(1e-4, 1e4)


def counted(values: list[float]) -> Histogram:
    histogram: Histogram = {}
    for value in values:
        observe(histogram, value)
    return histogram


@given(st.lists(seconds, min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_within_five_per_cent(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, ceil(share * len(values))) - 1]
    found = quantile(counted(values), share)
    assert found == pytest.approx(exact, rel=0.0501)


@given(st.lists(seconds), st.lists(seconds))
def test_merged_counts_are_those_of_all(some: list[float], others: list[float]) -> None:
    assert merged([counted(some), counted(others)]) == counted(some + others)


def test_the_ends() -> None:
    assert (bucket_of(0.0), bucket_of(1e-9), bucket_of(1e9)) == (0, 0, MOST)
    assert quantile({}, 0.5) is None
