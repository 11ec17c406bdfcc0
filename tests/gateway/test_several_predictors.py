"""Several predictors: the questions are spread over them, and one that refuses, dies or freezes is not missed.

They are asked before placement here, so that a job has waited for an answer or for a deadline.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway.job import Job
from shared.errors import Busy
from tests.gateway.cluster import Cluster, running_cluster
from tests.gateway.predictors import LONG_S, Predictor, placement_s, run, served, until_asked
from tests.gateway.rude_predictor import SOURCE, rude_predictor
from tests.ports import free_address

DEADLINE_S = 1.5  # longer than a call waits for a connection that was lost
SLACK_S = 3.0  # of a busy machine


@asynccontextmanager
async def cluster_and_replicas(count: int) -> AsyncIterator[tuple[Cluster, list[Predictor]]]:
    """Each has been asked at least once."""
    predictors, addresses = [Predictor() for _ in range(count)], tuple(free_address() for _ in range(count))
    async with AsyncExitStack() as stack:
        for predictor, address in zip(predictors, addresses, strict=True):
            await stack.enter_async_context(served(predictor, address))
        settings = {"predict": "sequential", "predict_timeout_s": LONG_S}
        cluster = await stack.enter_async_context(running_cluster(predictors=addresses, **settings))
        async with asyncio.timeout(LONG_S):
            while not all(predictor.asked for predictor in predictors):
                await run(cluster)
        yield cluster, predictors


async def test_they_are_asked_in_turn() -> None:
    async with cluster_and_replicas(3) as (cluster, predictors):
        before = [len(predictor.asked) for predictor in predictors]
        for _ in range(6):
            assert (await run(cluster)).prediction is not None
        assert [len(each.asked) - was for each, was in zip(predictors, before, strict=True)] == [2, 2, 2]


async def test_the_one_with_the_fewest_calls_is_asked() -> None:
    async with cluster_and_replicas(2) as (cluster, (first, _)):
        first.go.clear()
        pair = [asyncio.create_task(run(cluster)) for _ in range(2)]  # one of them at each
        await until_asked(first, len(first.asked) + 1)
        await asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED)
        had = len(first.asked)
        for _ in range(4):
            assert (await run(cluster)).prediction is not None
        assert len(first.asked) == had
        first.go.set()
        await asyncio.gather(*pair)


async def test_a_refusal_is_no_answer_while_another_has_one() -> None:
    async with cluster_and_replicas(2) as (cluster, (first, _)):
        first.refuse, had = Busy("too many"), len(first.asked)
        for _ in range(3):
            assert (await run(cluster)).prediction is not None
        assert len(first.asked) > had


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_dies_or_freezes_under_load_costs_no_job_more_than_the_deadline(how: signal.Signals) -> None:
    jobs: list[Job] = []
    addresses, good = (free_address(), free_address()), Predictor(takes_s=0.02)
    settings = {"predict": "sequential", "predict_timeout_s": DEADLINE_S}

    async def user() -> None:
        while True:
            jobs.append(await run(cluster))

    def unknown() -> list[Job]:
        return [job for job in jobs if job.prediction is None]

    async def until(done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S):
            while not done():
                await asyncio.sleep(0.01)

    async with (
        rude_predictor(addresses[0]) as rude,
        served(good, addresses[1]),
        running_cluster(predictors=addresses, **settings) as cluster,
        asyncio.TaskGroup() as users,
    ):
        tasks = [users.create_task(user()) for _ in range(8)]
        await until(lambda: {SOURCE, "classifier"} <= {job.prediction.source for job in jobs if job.prediction})
        assert not unknown()
        rude.send_signal(how)
        if how is signal.SIGSTOP:
            await until(lambda: bool(unknown()))
        had = len(jobs)
        await until(lambda: len(jobs) >= had + 60)
        for task in tasks:
            task.cancel()
    assert max(placement_s(job) for job in jobs) < DEADLINE_S + SLACK_S
    # Nobody misses the one that died; who had asked the one that froze does, and those few who try it again.
    assert len(unknown()) <= (0 if how is signal.SIGKILL else 12)
    assert {job.attempt for job in jobs} == {1}
