"""A job whose client is gone: its calls are cancelled, and what it left staged or fetched is freed."""

import asyncio

import pytest

from shared.domain.job import Phase
from tests.gateway.api import until
from tests.gateway.cluster import make_job, running_cluster

PROMPT = [5, 6, 7, 8, 9]


async def test_cancelling_stops_the_decode_leg_and_frees_the_staged_kv() -> None:
    async with running_cluster() as cluster:
        decode, reached = cluster.decodes[0], asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        decode.before_token = lambda count: hang() if count == 3 else asyncio.sleep(0)
        job, _ = make_job(PROMPT, 10)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.wait_for(reached.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(decode.cancelled.wait(), 1)
        await until(lambda: cluster.prefill.released == [job.transfer_id], 1)
        assert job.phase is Phase.CANCELLED


async def test_cancelling_stops_the_prefill_leg_and_drops_what_was_fetched() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.chunked = True
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        cluster.prefill.before_token = lambda _: hang()
        job, _ = make_job(PROMPT, 10)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.wait_for(reached.wait(), 5)
        await until(lambda: bool(cluster.decodes[0].prefetched))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cluster.prefill.cancelled.wait(), 1)
        await until(lambda: cluster.decodes[0].released == [job.transfer_id], 1)
