"""A call that is due by the earliest of several times, once."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from shared.runtime.tasks import Alarm
from tests.services.control_plane import until


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
