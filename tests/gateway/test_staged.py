"""What an attempt holds on instances is free at each of its ends."""

import asyncio

import pytest

from shared.errors import EngineFailed, WrongRole
from tests.gateway.api import until
from tests.gateway.cluster import make_job, running_cluster, tokens_of
from tests.gateway.worker import answer

PROMPT = [5, 6, 7, 8, 9]


async def test_a_reply_that_crosses_the_cancellation_leaves_nothing() -> None:
    async with running_cluster() as cluster:
        prefill, reached = cluster.prefill, asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        prefill.before_token, prefill.stubborn = lambda _: hang(), True
        job, _ = make_job(PROMPT, 10)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.wait_for(reached.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await prefill.releases(1)
        assert prefill.released == [job.transfer_id]


async def test_a_first_token_that_ends_the_answer_leaves_nothing() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.stop_token = answer(PROMPT, 1)[0]
        job, _ = make_job(PROMPT, 8)
        await cluster.pipeline.run(job)
        await cluster.prefill.releases(1)


async def test_a_failed_prefill_leaves_nothing() -> None:
    async with running_cluster(attempts=1) as cluster:

        def fail(_: int) -> None:
            raise EngineFailed("a bug")

        cluster.prefill.before_token = fail
        job, _ = make_job(PROMPT, 8)
        with pytest.raises(EngineFailed):
            await cluster.pipeline.run(job)
        await cluster.prefill.releases(1)


async def test_whatever_became_of_the_kv_the_prefill_instance_is_told_once() -> None:
    """That it was pulled, it hears from the importer too, by a connection that may be broken."""
    async with running_cluster() as cluster:
        pulled, _ = make_job(PROMPT, 4)
        await cluster.pipeline.run(pulled)
        cluster.prefill.stop_token = answer(PROMPT, 1)[0]
        over_at_once, _ = make_job(PROMPT, 4)
        await cluster.pipeline.run(over_at_once)
        await cluster.prefill.releases(2)
        assert cluster.prefill.released == [pulled.transfer_id, over_at_once.transfer_id]
        assert not any(decode.released for decode in cluster.decodes)


async def test_a_prefetch_goes_on_until_the_decode_has_ended() -> None:
    async with running_cluster() as cluster:
        decode = cluster.decodes[0]
        cluster.prefill.chunked, decode.fetching = True, asyncio.Event()
        states: list[tuple[int, int]] = []
        decode.before_token = lambda _: states.append((len(decode.prefetched), len(decode.dropped)))
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert states == [(1, 0)] * 5
        await until(lambda: len(decode.dropped) == 1)  # the call that is still under way then is of no use to anybody


async def test_a_prefetch_of_an_instance_that_then_refuses_is_dropped() -> None:
    async with running_cluster() as cluster:
        first, second = cluster.decodes
        cluster.prefill.chunked, first.fetching = True, asyncio.Event()
        first.refuse = WrongRole("draining")
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert len(second.decodes) == 1
        await first.releases(1)
        assert not second.released
        await cluster.prefill.releases(1)


async def test_transfers_of_jobs_with_one_id_differ() -> None:
    async with running_cluster() as cluster:
        first, _ = make_job(PROMPT, 4)
        second, _ = make_job(PROMPT, 4, job_id=first.spec.job_id)
        await asyncio.gather(cluster.pipeline.run(first), cluster.pipeline.run(second))
        assert len({request.transfer_id for request in cluster.prefill.prefills}) == 2
