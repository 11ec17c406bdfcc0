"""Steps that fail: tried again, and the end of the process once they fail again and again."""

import asyncio
import signal
from collections.abc import Callable

import pytest
import uvloop

from shared.runtime import tasks as runner
from shared.runtime.tasks import FAILURES, Alarm, background
from tests.services.control_plane import until


class Step:
    """Fails at the calls that `fails` names, and tells of its `enough`-th."""

    def __init__(self, fails: set[int], enough: int) -> None:
        self.calls = 0
        self.done = asyncio.Event()
        self._fails, self._enough = fails, enough

    async def __call__(self) -> None:
        self.calls += 1
        if self.calls == self._enough:
            self.done.set()
        if self.calls in self._fails:
            raise ValueError("out of range")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that the runner has sent to the process."""
    sent: list[int] = []
    monkeypatch.setattr(runner.os, "kill", lambda _, number: sent.append(number))
    return sent


async def test_a_step_that_fails_is_tried_again(ended: list[int]) -> None:
    step = Step(set(range(1, FAILURES)) | set(range(FAILURES + 1, 2 * FAILURES)), 2 * FAILURES)
    async with background() as tasks:
        tasks.every("often", 0.001, step)
        await asyncio.wait_for(step.done.wait(), 10)
    assert not ended


async def test_failures_in_a_row_end_the_process(ended: list[int]) -> None:
    step = Step(set(range(100)), FAILURES)
    async with background() as tasks:
        tasks.every("often", 0.001, step)
        await asyncio.wait_for(step.done.wait(), 10)
        async with asyncio.timeout(10):
            while not ended:
                await asyncio.sleep(0.001)
    assert (step.calls, ended) == (FAILURES, [signal.SIGTERM])


# A call that is due by the earliest of several times, once


async def test_the_earliest_time_counts_and_it_rings_once_for_all() -> None:
    rung: list[float] = []
    loop = asyncio.get_running_loop()
    alarm = Alarm(lambda: rung.append(loop.time()))
    began = loop.time()
    for wait_s in (3600.0, 0.05, 1800.0):
        alarm.by(began + wait_s)
    await until(lambda: rung, "it rang")
    assert began + 0.04 < rung[0] < began + 1800.0
    alarm.by(loop.time())
    await until(lambda: len(rung) == 2, "and again")


async def test_one_that_is_cancelled_is_silent_until_it_is_set_again() -> None:
    rung: list[int] = []
    alarm = Alarm(lambda: rung.append(len(rung)))
    loop = asyncio.get_running_loop()
    alarm.by(loop.time() + 0.01)
    alarm.cancel()
    await asyncio.sleep(0.05)
    assert not rung
    alarm.by(loop.time() + 3600.0)
    alarm.by(loop.time())
    await until(lambda: rung == [0], "it rang")
    alarm.cancel()


@pytest.mark.parametrize("policy", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_that_is_overdue_can_be_set_again(policy: Callable[[], asyncio.AbstractEventLoop]) -> None:
    rung: list[int] = []

    async def run() -> None:
        alarm = Alarm(lambda: rung.append(len(rung)))
        past = asyncio.get_running_loop().time() - 1.0
        alarm.by(past)
        alarm.by(past - 1.0)
        alarm.by(past + 5.0)
        await until(lambda: rung, "it rang")

    with asyncio.Runner(loop_factory=policy) as runner:
        runner.run(run())
    assert rung == [0]
