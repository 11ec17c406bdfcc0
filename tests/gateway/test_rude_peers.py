"""Workers that die or freeze without a word."""

import asyncio
import signal

import pytest

from shared.errors import Unavailable
from tests.gateway.api import until
from tests.gateway.cluster import make_job, running_cluster, tokens_of
from tests.gateway.rude import rude_worker
from tests.gateway.worker import answer

PROMPT = [5, 6, 7, 8, 9]
RUDE = [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize("how", RUDE)
@pytest.mark.parametrize("carry", [True, False])
async def test_a_decode_instance_in_mid_answer(how: signal.Signals, carry: bool) -> None:
    async with running_cluster() as cluster, rude_worker("d9", cluster.sockets) as rude:
        cluster.decodes.insert(0, rude)
        job, steps = make_job(PROMPT, 40, carry=carry)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await until(lambda: len(steps) > 5)
        rude.process.send_signal(how)
        await asyncio.wait_for(task, 20)
        assert tokens_of(steps) == answer(PROMPT, 40)
        assert job.attempt == 2
        assert len(cluster.decodes[1].decodes) == 1
        first = cluster.prefill.prefills[0].transfer_id
        await until(lambda: first in cluster.prefill.released)


@pytest.mark.parametrize("how", RUDE)
async def test_the_last_decode_instance_in_mid_answer(how: signal.Signals) -> None:
    async with running_cluster(patience_s=0.5) as cluster, rude_worker("d9", cluster.sockets) as rude:
        cluster.decodes[:] = [rude]
        job, steps = make_job(PROMPT, 40)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await until(lambda: len(steps) > 5)
        rude.process.send_signal(how)
        cluster.decodes.clear()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(task, 20)
        assert tokens_of(steps) == answer(PROMPT, len(steps))
        await until(lambda: len(cluster.prefill.released) == 1)


@pytest.mark.parametrize("how", RUDE)
async def test_a_prefill_instance_at_work(how: signal.Signals) -> None:
    async with running_cluster() as cluster, rude_worker("p9", cluster.sockets) as rude:
        well, cluster.prefill = cluster.prefill, rude
        job, steps = make_job(PROMPT, 6)
        rude.process.send_signal(how)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await until(lambda: bool(cluster.places))
        cluster.prefill = well
        await asyncio.wait_for(task, 20)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert cluster.places[-1].exclude == ("p9",)
