import asyncio
import threading

import pytest

from predictor.lane import Lane
from shared.errors import Busy, DeadlineExceeded


async def test_results_and_errors_come_back() -> None:
    lane = Lane(2)
    assert await lane.run(lambda: 7, 5.0) == 7
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0, 5.0)
    assert lane.pending == 0
    await lane.close()


async def test_calls_run_one_by_one_in_one_thread() -> None:
    lane = Lane(50)
    names = await asyncio.gather(*(lane.run(lambda: threading.current_thread().name, 5.0) for _ in range(50)))
    assert len(set(names)) == 1
    assert names[0] != threading.current_thread().name
    await lane.close()


async def test_a_full_queue_is_busy_and_a_late_call_never_runs() -> None:
    lane, gate, ran = Lane(1), threading.Event(), []
    running = asyncio.create_task(lane.run(gate.wait, 20.0))
    waiting = asyncio.create_task(lane.run(lambda: ran.append("late"), 0.02))
    await asyncio.sleep(0)
    with pytest.raises(Busy) as refused:
        await lane.run(lambda: ran.append("refused"), 5.0)
    assert refused.value.retry_after_s is not None
    with pytest.raises(DeadlineExceeded):
        await waiting
    gate.set()
    assert await running
    assert await lane.run(lambda: "free again", 5.0) == "free again"
    assert ran == []
    await lane.close()


async def test_what_would_surely_be_late_is_refused_but_an_idle_lane_tries() -> None:
    lane, slow, gate, started = Lane(9), threading.Event(), threading.Event(), threading.Event()
    with pytest.raises(DeadlineExceeded):
        await lane.run(lambda: slow.wait(0.2), 0.05)  # takes 0.2 s, so that is what calls are thought to take

    def work() -> bool:
        started.set()
        return gate.wait(20)

    running = asyncio.create_task(lane.run(work, 20.0))
    assert await asyncio.to_thread(started.wait, 20)
    with pytest.raises(Busy) as refused:
        await lane.run(lambda: 1, 0.3)  # two calls of 0.2 s do not fit into 0.3 s
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 0.39
    patient = asyncio.create_task(lane.run(lambda: 2, 20.0))
    gate.set()
    assert [await running, await patient] == [True, 2]
    await lane.close()


async def test_a_running_call_past_its_deadline_keeps_its_place() -> None:
    lane, gate = Lane(0), threading.Event()
    with pytest.raises(DeadlineExceeded):
        await lane.run(lambda: gate.wait(20), 0.02)
    assert lane.pending == 1
    with pytest.raises(Busy):
        await lane.run(lambda: 1, 5.0)
    gate.set()
    await lane.close()
    assert lane.pending == 0


async def test_a_cancelled_caller_frees_its_place() -> None:
    lane, gate = Lane(1), threading.Event()
    running = asyncio.create_task(lane.run(gate.wait, 20.0))
    waiting = asyncio.create_task(lane.run(lambda: 1, 20.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert lane.pending == 1
    gate.set()
    await running
    await lane.close()
