"""What disturbs a measurement is noticed."""

import asyncio
import time

from tools.calibrate.host_watch import TimerWatch


async def test_a_loop_that_was_held_up_makes_timers_late() -> None:
    async with TimerWatch() as timers:
        await asyncio.sleep(0.02)
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.sleep(0.02)
    assert timers.late_s >= 0.25
