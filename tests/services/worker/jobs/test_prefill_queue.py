"""The local queue: order by policy, a bounded batch, and no place lost when a job is cancelled."""

import asyncio
from collections.abc import Callable

import pytest

from services.worker.jobs.prefill_queue import PrefillQueue
from shared.domain.job import JobView
from shared.policy import registry


def job(name: str, tokens: int) -> JobView:
    return JobView(name, tokens, 16)


async def run(
    queue: PrefillQueue, view: JobView, order: list[str], go: asyncio.Event, has_room: Callable[[], bool] = lambda: True
) -> None:
    async with queue.turn(view, has_room):
        order.append(view.job_id)
        await go.wait()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["first", "long", "short", "middle"]),
        ("sjf", ["first", "short", "middle", "long"]),
        ("ljf", ["first", "long", "middle", "short"]),
    ],
)
async def test_the_policy_orders_those_that_wait(policy: str, expected: list[str]) -> None:
    queue, order, go = PrefillQueue(registry.prefill_order(policy), 1), list[str](), asyncio.Event()
    jobs = [job("first", 5), job("long", 900), job("short", 10), job("middle", 100)]
    async with asyncio.TaskGroup() as group:
        for view in jobs:
            group.create_task(run(queue, view, order, go))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["first"]
        assert queue.waiting == 3
        assert (queue.queued, queue.queued_tokens) == (4, 1015)  # the same jobs: none of 774 tokens without one
        go.set()
    assert order == expected
    assert (queue.queued, queue.queued_tokens) == (0, 0)


async def test_the_batch_bounds_what_runs_at_once() -> None:
    queue, order, go = PrefillQueue(registry.prefill_order("fcfs"), 4), list[str](), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(run(queue, job(str(number), 1), order, go))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(order) == 4
        go.set()
    assert len(order) == 10


async def test_cancelled_jobs_leave_no_gap() -> None:
    queue, order, go = PrefillQueue(registry.prefill_order("fcfs"), 1), list[str](), asyncio.Event()
    running = asyncio.create_task(run(queue, job("running", 3), order, go))
    waiting = asyncio.create_task(run(queue, job("waiting", 5), order, go))
    last = asyncio.create_task(run(queue, job("last", 7), order, go))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()
    await asyncio.gather(waiting, running, return_exceptions=True)
    go.set()
    await asyncio.wait_for(last, 5)
    assert order == ["running", "last"]
    assert (queue.waiting, queue.queued_tokens) == (0, 0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_job_without_room_waits_and_nobody_overtakes_it() -> None:
    queue, order, go, room = PrefillQueue(registry.prefill_order("fcfs"), 4), list[str](), asyncio.Event(), [False]
    large = asyncio.create_task(run(queue, job("large", 900), order, go, lambda: room[0]))
    small = asyncio.create_task(run(queue, job("small", 1), order, go))
    await settle()
    assert order == []
    assert (queue.waiting, queue.queued_tokens) == (2, 901)
    room[0] = True
    queue.admit()
    await settle()
    assert order == ["large", "small"]
    go.set()
    await asyncio.gather(large, small)


async def test_a_job_that_gives_up_waiting_for_room_lets_the_next_in() -> None:
    queue, order, go = PrefillQueue(registry.prefill_order("fcfs"), 4), list[str](), asyncio.Event()
    large = asyncio.create_task(run(queue, job("large", 900), order, go, lambda: False))
    small = asyncio.create_task(run(queue, job("small", 1), order, go))
    await settle()
    large.cancel()
    await settle()
    assert order == ["small"]
    assert queue.waiting == 0
    go.set()
    await small
