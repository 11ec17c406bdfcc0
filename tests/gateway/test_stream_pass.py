"""Which plain streams are served at once, and how long tokens wait for others under load."""

import asyncio
import time
from typing import Any

import pytest

from gateway.plain_stream import MIN_INTERVAL_S, PERIOD_S, Pace, StreamPass


class Stream:
    """Counts how often it is served."""

    def __init__(self, max_delay_s: float, *, urgent: bool = False) -> None:
        self.queued = self.held = False
        self.served_s = asyncio.get_running_loop().time()
        self.max_delay_s = max_delay_s
        self.urgent = urgent
        self.served: list[float] = []
        self.events = 0  # of which gaps are counted
        self.once = asyncio.Event()
        self.failed: Exception | None = None
        self.error: Exception | None = None

    def queue(self) -> None:
        self.queued, self.held = True, False
        self.events += 1

    def advance(self) -> None:
        self.served.append(time.monotonic())
        self.once.set()
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        self.failed = error


def passes(interval_s: float) -> Any:
    pace = Pace()
    pace.interval_s = interval_s
    return StreamPass(pace)


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_tokens_of_a_turn_go_out_together_and_at_once_where_there_is_time() -> None:
    serving, stream = passes(0.0), Stream(1.0)
    for _ in range(5):
        serving.add(stream)
    await turns()
    serving.add(stream)
    await turns()
    assert (len(stream.served), stream.events) == (2, 2)


async def test_under_load_tokens_wait_for_others_up_to_what_their_class_allows() -> None:
    serving = passes(interval_s=60.0)
    began = time.monotonic()
    quick, slow = Stream(max_delay_s=0.05), Stream(max_delay_s=0.2)
    for _ in range(4):
        serving.add(quick)
        serving.add(slow)
        await turns()
    assert not quick.served
    assert not slow.served
    await asyncio.wait_for(slow.once.wait(), 10)
    assert len(quick.served) == len(slow.served) == 1
    assert (quick.events, slow.events) == (1, 1)
    assert quick.served[0] - began >= 0.05
    assert slow.served[0] - began >= 0.2


async def test_the_first_and_the_last_tokens_do_not_wait() -> None:
    serving = passes(interval_s=60.0)
    first, last = Stream(30.0, urgent=True), Stream(30.0)
    serving.add(first)
    serving.add(last)
    await turns()
    assert len(first.served) == 1
    assert not last.served
    last.urgent = True
    serving.add(last)
    await turns()
    assert len(last.served) == 1
    assert not last.held


async def test_a_stream_that_was_served_for_its_end_is_not_served_again_when_its_time_comes() -> None:
    serving = passes(interval_s=60.0)
    ended, other = Stream(0.05), Stream(0.05)
    serving.add(ended)
    serving.add(other)
    ended.urgent = True
    serving.add(ended)
    await asyncio.wait_for(other.once.wait(), 10)
    await turns()
    assert (len(ended.served), len(other.served)) == (1, 1)


async def test_one_that_crashes_fails_alone() -> None:
    serving, bad, good = passes(0.0), Stream(0.0), Stream(0.0)
    bad.error = RuntimeError("a bug")
    serving.add(bad)
    serving.add(good)
    await turns()
    assert bad.failed is bad.error
    assert len(good.served) == 1


async def test_the_pace_is_looked_at_while_there_are_tokens_and_forgotten_when_there_are_none() -> None:
    pace = Pace()
    serving, stream = StreamPass(pace), Stream(1.0)
    pace.interval_s = 0.4
    looks, ended = list[float](), asyncio.Event()
    pace.measure = lambda: looks.append(time.monotonic())  # type: ignore[method-assign]
    end = pace.end
    pace.end = lambda: (end(), ended.set())[0]  # type: ignore[method-assign]
    stream.urgent = True
    async with asyncio.timeout(10):
        while not looks:
            serving.add(stream)  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
        await ended.wait()
    assert pace.interval_s == 0.0
    seen = len(looks)
    await asyncio.sleep(0)
    assert len(looks) == seen


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
