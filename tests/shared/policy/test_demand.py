"""The profile of what clients ask for, and its shifts."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from shared.domain.demand import DemandSecond, Shift
from shared.domain.job import JobView, Slo
from shared.policy.demand import LATE_S, SILENT_S, DemandBook, DemandCounter
from shared.sim.traces import read_trace

T = 1_000_000  # some second of unix time
TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces" / "azure2023"
CONVERSATION, CODE = (900.0, 0.9, 120.0, 0.8), (1500.0, 0.9, 15.0, 1.0)  # medians and spreads of logarithms


def job(prompt: int = 100, slo: Slo = Slo()) -> JobView:
    return JobView("j", prompt, 100, slo)


def asked(rng: Random, second: int, rate: float, kind: tuple[float, float, float, float]) -> list[DemandSecond]:
    """One second of Poisson arrivals of a kind, as a scheduler counts it."""
    counter, at = DemandCounter("s", second - 1.0), second + rng.expovariate(rate)
    prompt, prompt_spread, output, output_spread = kind
    while at < second + 1:
        tokens = max(1, round(prompt * rng.lognormvariate(0.0, prompt_spread)))
        counter.count_request(job(tokens), 0, 50.0, (0.0, 1.0), at)
        counter.count_end("j", max(1, round(output * rng.lognormvariate(0.0, output_spread))), at)
        at += rng.expovariate(rate)
    return counter.pop_finished(second + 1.0)


def fed(book: DemandBook, second: int, told: list[DemandSecond]) -> list[Shift]:
    book.add(told, second + 1.5)
    return book.advance(second + 1.5)


def plain(source: str, second: int, requests: int = 20, **ended: float) -> DemandSecond:
    one = {"prompt_logs": 4.6, "prompt_log_squares": 21.2, "per_ttft": 0.5, "per_tpot": 5.0}
    sums = {"prompt_tokens": 100.0, "fresh_tokens": 100.0, "fresh_squares": 10_000.0, "output_tokens": 50.0, **one}
    each = {name: value * requests for name, value in sums.items()}
    return msgspec.convert({"source": source, "second": second, "requests": requests, **each, **ended}, DemandSecond)


def test_a_scheduler_counts_whole_seconds_and_tells_of_empty_ones() -> None:
    counter = DemandCounter("s", T + 0.5)
    counter.count_request(job(7), 0, 5.0, (0.0, 1.0), T + 0.7)  # of a second that it did not see whole
    counter.count_request(job(100, Slo("x", 2.0, 0.2)), 60, 8.0, (0.0, 1.0), T + 1.1)
    counter.count_request(job(300, Slo("y", 1.0, 0.1)), 0, 16.0, (1.0, 1.0), T + 1.9)
    assert counter.pop_finished(T + 1.95) == []
    full, empty = counter.pop_finished(T + 3.0)
    assert (full.second, full.requests, full.prompt_tokens, full.fresh_tokens) == (T + 1, 2, 400.0, 340.0)
    assert (full.fresh_squares, full.output_tokens) == (100**2 - 60**2 + 300**2, 24.0)
    assert (full.per_ttft, full.per_tpot) == pytest.approx((1.5, 15.0))
    assert (full.split_least, full.split_most) == (1.0, 2.0)
    assert full.ended == 0
    assert empty == DemandSecond("s", T + 2)
    assert counter.pop_finished(T + 3.5) == []


def test_answers_count_in_the_second_in_which_they_end_beside_what_was_expected() -> None:
    counter = DemandCounter("s", T - 1.0)
    for name in ("a", "b", "c"):
        counter.count_request(JobView(name, 100, 100), 0, 40.0, (0.0, 1.0), T + 0.5)
    counter.count_end("a", 80, T + 1.5)
    counter.count_end("b", 0, T + 1.5)  # it failed
    counter.count_end("a", 80, T + 1.6)  # told twice
    counter.count_end("x", 10, T + 1.6)  # of another scheduler
    _, second = counter.pop_finished(T + 2.0)
    assert (second.requests, second.ended, second.ended_tokens, second.ended_expected) == (0, 1, 80.0, 40.0)


def test_expected_lengths_are_corrected_by_how_answers_turn_out() -> None:
    book = DemandBook()
    for second in range(T, T + 10):
        fed(book, second, [plain("a", second, ended=5, ended_tokens=600.0, ended_expected=200.0)])
    demand = book.demand(T + 10.5)
    assert demand is not None
    assert demand.output_tokens == pytest.approx(3.0 * 50.0)


def test_a_scheduler_that_stood_still_says_nothing_of_that_time() -> None:
    counter = DemandCounter("s", T + 0.0)
    counter.count_request(job(), 0, 5.0, (0.0, 1.0), T + 1.5)
    counter.count_request(job(), 0, 5.0, (0.0, 1.0), T + 9.5)
    assert counter.pop_finished(T + 10.0) == []
    assert [one.second for one in counter.pop_finished(T + 11.0)] == [T + 10]


def test_the_profile_of_two_schedulers_is_their_sum() -> None:
    book = DemandBook()
    for second in range(T, T + 10):
        fed(book, second, [plain("a", second, 10), plain("b", second, 30)])
    demand = book.demand(T + 10.5)
    assert demand is not None
    assert (demand.rate, demand.prompt_tokens, demand.output_tokens) == pytest.approx((40.0, 100.0, 50.0))
    assert (demand.ttft_s, demand.tpot_s, demand.burstiness) == pytest.approx((2.0, 0.2, 0.0))
    assert (demand.requests, demand.age_s) == (400, 10.5)


def test_late_doubled_and_lost_seconds_are_no_lull_and_no_rush() -> None:
    book, rng = DemandBook(), Random(1)
    for second in range(T, T + 40):
        told = [plain("a", second)]
        if second > T and rng.random() < 0.3:
            told = [*told, *told, plain("a", second - 1)]
        if rng.random() > 0.2:  # else lost
            assert fed(book, second, told) == []
    fed(book, T + 40, [plain("a", T + 40)])
    demand = book.demand(T + 41.5)
    assert demand is not None
    assert demand.rate == pytest.approx(20.0)


def test_a_silent_scheduler_makes_the_profile_unknown_until_the_others_have_a_new_one() -> None:
    book = DemandBook()
    for second in range(T, T + 20):
        fed(book, second, [plain("a", second), plain("b", second)])
    known = []
    for second in range(T + 20, T + 40):
        assert fed(book, second, [plain("a", second, 40)]) == []
        demand = book.demand(second + 1.5)
        known.append(demand.rate if demand is not None else None)
    gone = int(SILENT_S)
    assert known[: gone - 1] == [40.0] * (gone - 1)  # what was told until then
    assert known[gone] is None
    assert known[-1] == 40.0
    book.add([plain("a", T + 39)], T + 41.0)
    assert book.demand(T + 60.0) is None  # all are silent


def test_seconds_of_another_time_are_ignored() -> None:
    book = DemandBook()
    book.add([plain("a", T - round(LATE_S) - 2), plain("a", T + 3_600)], T + 0.0)
    assert book.ignored == 2
    assert book.advance(T + 0.0) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("before", "after"), [(CONVERSATION, CODE), (CODE, CONVERSATION)], ids=["to-code", "back"])
def test_other_lengths_are_noticed_soon_and_the_old_ones_forgotten(
    seed: int, before: tuple[float, float, float, float], after: tuple[float, float, float, float]
) -> None:
    book, rng, noticed = DemandBook(), Random(seed), list[int]()
    for second in range(T, T + 60):
        assert fed(book, second, asked(rng, second, 20.0, before)) == []
    for second in range(T + 60, T + 80):
        noticed += [second - T - 60 for _ in fed(book, second, asked(rng, second, 20.0, after))]
    assert len(noticed) == 1
    assert noticed[0] <= 8
    demand = book.demand(T + 81.0)
    assert demand is not None
    assert demand.shift is not None
    assert 19.0 <= demand.age_s <= 22.0
    mean = after[2] * 2.718281828 ** (after[3] ** 2 / 2.0)
    assert demand.output_tokens == pytest.approx(mean, rel=0.35)


def test_a_rush_is_noticed_and_a_lull_is_not() -> None:
    book, rng, found = DemandBook(), Random(5), list[Shift]()
    for second in range(T, T + 120):
        rate = 10.0 if second < T + 40 else 40.0 if second < T + 80 else 2.0
        found += fed(book, second, asked(rng, second, rate, CONVERSATION))
    assert [shift.what for shift in found] == ["arrivals"]
    assert found[0].after == pytest.approx(40.0, rel=0.25)


@pytest.mark.parametrize("seed", range(4))
def test_alike_requests_are_no_shift(seed: int) -> None:
    book, rng = DemandBook(), Random(seed)
    found = [shift for s in range(T, T + 300) for shift in fed(book, s, asked(rng, s, 12.0, CONVERSATION))]
    assert found == []


@pytest.mark.parametrize("name", ["conv", "code"])
@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_real_bursty_traffic_rarely_looks_shifted(name: str, speed: float) -> None:
    path = TRACES / f"AzureLLMInferenceTrace_{name}.csv"
    if not path.exists():
        pytest.skip(f"no {path}")
    trace = read_trace(path)
    counter, book, found, row = DemandCounter("s", -1.0), DemandBook(), list[Shift](), 0
    arrival_s = ((trace.arrival_s - trace.arrival_s[0]) / speed).tolist()
    for second in range(int(arrival_s[-1]) + 1):
        while row < len(arrival_s) and arrival_s[row] < second + 1:
            one = job(int(trace.prompt_tokens[row]))
            counter.count_request(one, 0, 50.0, (0.0, 1.0), arrival_s[row])
            counter.count_end("j", int(trace.output_tokens[row]), arrival_s[row])
            row += 1
        found += fed(book, second, counter.pop_finished(second + 1.0))
    assert row > 8_000
    assert len(found) <= 2  # in an hour, or a quarter of one at four times the rate


def test_answers_of_one_burst_end_shortest_first_and_that_is_no_shift() -> None:
    counter, book, rng, found = DemandCounter("s", T - 1.0), DemandBook(), Random(3), list[Shift]()
    ends: list[tuple[float, str, int]] = []
    for second in range(T, T + 120):
        for number in range(24 if second % 20 < 10 else 0):
            name, at = f"{second}-{number}", second + number / 24
            tokens = max(1, round(200 * rng.lognormvariate(0.0, 0.8)))
            counter.count_request(JobView(name, 500, 1_000), 0, 200.0, (0.0, 1.0), at)
            ends.append((at + 0.02 * tokens, name, tokens))
        for at, name, tokens in sorted(one for one in ends if one[0] < second + 1):
            counter.count_end(name, tokens, max(at, float(second)))
        ends = [one for one in ends if one[0] >= second + 1]
        found += fed(book, second, counter.pop_finished(second + 1.0))
    assert found == []
