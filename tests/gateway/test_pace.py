"""How long tokens wait for others: not at all in a process that has time, and never beyond its bounds."""

import pytest

from gateway.plain_stream import MIN_INTERVAL_S, PERIOD_S, Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = self.used_s = 100.0

    def pass_(self, busy: float, late_s: float = 0.0) -> None:
        self.now_s += PERIOD_S + late_s
        self.used_s += PERIOD_S * busy


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(lambda: clock.now_s, lambda: clock.used_s)


def test_it_is_off_while_the_process_has_time(clock: Clock, pace: Pace) -> None:
    for _ in range(50):
        clock.pass_(0.5)
        pace.measure()
        assert pace.interval_s == 0.0


def test_it_grows_while_the_process_is_busy_and_ends_when_it_is_not(clock: Clock, pace: Pace) -> None:
    grown = []
    for _ in range(30):
        clock.pass_(0.9)
        pace.measure()
        grown.append(pace.interval_s)
    assert grown[0] == MIN_INTERVAL_S
    assert grown == sorted(grown)
    assert grown[-1] == 1.0
    for _ in range(20):
        clock.pass_(0.2)
        pace.measure()
    assert pace.interval_s == 0.0


def test_it_stays_in_between(clock: Clock, pace: Pace) -> None:
    for _ in range(6):
        clock.pass_(0.9)
        pace.measure()
    held = pace.interval_s
    for _ in range(20):
        clock.pass_(0.65)
        pace.measure()
    assert pace.interval_s == held > 0


def test_a_process_that_is_not_let_run_is_busy(clock: Clock, pace: Pace) -> None:
    """Others use the cores: it computes a third of the time, and is late."""
    clock.pass_(0.7, late_s=PERIOD_S)
    pace.measure()
    assert pace.interval_s > 0


def test_one_that_has_nothing_to_do_is_not_busy_however_late_it_is(clock: Clock, pace: Pace) -> None:
    clock.pass_(0.1, late_s=5 * PERIOD_S)
    pace.measure()
    assert pace.interval_s == 0
