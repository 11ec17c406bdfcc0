import msgspec
import pytest

from dashboard.plan.in_force import ATTAINMENT, GOODPUT, RATE, TTFT, Figure, changes, comparison, deviation
from dashboard.plan.records import Expected, Fleet, Measured
from tests.dashboard.planner import small_fleet


@pytest.mark.parametrize(
    ("figure", "before", "after", "said", "trouble", "gain"),
    [
        (TTFT, 1.0, 1.05, "the same", False, False),
        (TTFT, 1.0, 1.15, "15 % longer", False, False),
        (TTFT, 1.0, 1.5, "50 % longer", True, False),
        (TTFT, 1.0, 3.4, "3.4 times as long", True, False),
        (TTFT, 1.0, 0.6, "40 % shorter", False, True),
        (GOODPUT, 4.0, 3.0, "25 % less", True, False),
        (GOODPUT, 4.0, 9.0, "2.2 times as much", False, True),
        (GOODPUT, 0.0, 9.0, "more", False, True),
        (GOODPUT, 0.0, 0.0, "the same", False, False),
        (RATE, 4.0, 2.0, "50 % less", False, False),
        (ATTAINMENT, 0.97, 0.96, "the same", False, False),
        (ATTAINMENT, 0.97, 0.81, "16 points lower", True, False),
        (ATTAINMENT, 0.0, 0.9, "90 points higher", False, True),
        (TTFT, None, 1.0, "", False, False),
        (TTFT, 1.0, None, "", False, False),
    ],
)
def test_a_deviation_in_words(
    figure: Figure, before: float | None, after: float | None, said: str, trouble: bool, gain: bool
) -> None:
    found = deviation(figure, before, after, "the same")
    assert (found.text, found.trouble, found.gain) == (said, trouble, gain)


def test_expected_measured_and_promised() -> None:
    fleet = msgspec.convert(small_fleet(), Fleet)
    table = comparison(fleet.expected, fleet.measured, fleet.promise)
    for said in ("16 points lower than expected", "61 % longer than expected", "as expected", "room for 40 % more"):
        assert said in table, said
    assert "The plan file promised" in table
    assert "500 ms" in table
    assert "promised" not in comparison(fleet.expected, fleet.measured, None)


def test_what_is_not_known_is_a_dash() -> None:
    table = comparison(Expected(goodput=2.0), Measured(rate=4.0), None)
    assert "50 % short of the rate" in table
    assert "nan" not in table
    assert comparison(None, None, None).count("–") == 15


def test_changes_are_told_from_the_first_column() -> None:
    table = changes(["Now", "Then", "Best"], [Expected(goodput=4.0), None, Expected(goodput=6.0)])
    assert "50 % more" in table
    assert changes(["Now", "Then"], [None, Expected(goodput=6.0)]).count("6/s") == 1
