"""Jobs without an instance to run on: one patience, a clear end, and nobody blamed who was not at fault."""

import asyncio

import pytest

from shared.domain.job import Phase
from shared.errors import Busy, EngineFailed, PolyphaseError, Unavailable, WrongRole
from tests.gateway.cluster import Cluster, make_job, running_cluster, tokens_of
from tests.gateway.worker import answer

PROMPT = [5, 6, 7, 8, 9]
REFUSALS = [WrongRole("draining"), Busy("full")]


def excluded(cluster: Cluster) -> set[str]:
    return {name for request in cluster.places for name in request.exclude}


async def gives_up(cluster: Cluster) -> int:
    """Runs a job that nobody takes; how often it was placed as a whole."""
    job, steps = make_job(PROMPT, 5)
    with pytest.raises(Unavailable) as caught:
        await cluster.pipeline.run(job)
    assert caught.value.http_status == 503
    assert caught.value.retry_after_s
    assert "no instance took the job" in caught.value.message
    assert job.phase is Phase.FAILED
    assert len(steps) <= 1
    assert job.waited_s < 1.5, "the patience of 0.4 s was taken more than once"
    return job.attempt


@pytest.mark.parametrize("error", [Unavailable("none"), Busy("one is starting")])
async def test_without_a_decode_instance_there_is_one_patience_and_then_a_503(error: PolyphaseError) -> None:
    async with running_cluster(patience_s=0.4) as cluster:
        cluster.decodes.clear()
        cluster.no_route = error
        assert await gives_up(cluster) == 1


async def test_a_dispatcher_that_finds_none_leaves_it_to_the_gateway() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.dispatches = False
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert len(cluster.prefill.prefills) == 1
        handle = cluster.decodes[0].decodes[0].handle
        assert handle is not None
        assert handle.transfer_id == job.transfer_id
        assert [request.job.local_only for request in cluster.places] == [False, True]
        assert not excluded(cluster)
        assert [decision.kind for decision in job.timeline.decisions] == ["placement", "dispatch"]


async def test_the_staged_kv_waits_for_a_decode_instance_to_come() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.dispatches = False
        decodes = list(cluster.decodes)
        cluster.prefill.before_token = lambda _: cluster.decodes.clear()
        job, steps = make_job(PROMPT, 6)
        task = asyncio.create_task(cluster.pipeline.run(job))
        async with asyncio.timeout(5):
            while len(cluster.places) < 3:  # two were in vain
                await asyncio.sleep(0.005)
        cluster.decodes += decodes
        await task
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert len(cluster.prefill.prefills) == 1
        assert not excluded(cluster)


async def test_when_none_comes_the_kv_is_released_and_nobody_excluded() -> None:
    async with running_cluster(patience_s=0.4) as cluster:
        cluster.prefill.dispatches = False
        cluster.prefill.before_token = lambda _: cluster.decodes.clear()
        assert await gives_up(cluster) == 1
        await cluster.prefill.releases(1)
        assert not excluded(cluster)


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_drain_of_all_decode_instances_ends_within_patience(refusal: PolyphaseError) -> None:
    async with running_cluster(patience_s=0.4) as cluster:
        for decode in cluster.decodes:
            decode.refuse = refusal
        assert await gives_up(cluster) == 1
        assert len(cluster.prefill.prefills) == 1  # the same KV was offered around
        await cluster.prefill.releases(1)


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_drain_of_all_prefill_instances_ends_within_patience(refusal: PolyphaseError) -> None:
    async with running_cluster(patience_s=0.4) as cluster:
        cluster.prefill.refuse = refusal
        await gives_up(cluster)


async def test_a_token_renews_the_patience() -> None:
    async with running_cluster() as cluster:
        job, _ = make_job(PROMPT, 5)
        job.waited_s = 9.9
        await cluster.pipeline.run(job)
        assert job.waited_s == 0.0


@pytest.mark.parametrize("culprit", ["prefill", "decode"])
async def test_only_the_instance_of_the_failed_call_is_excluded(culprit: str) -> None:
    async with running_cluster(attempts=2) as cluster:
        worker = cluster.prefill if culprit == "prefill" else cluster.decodes[0]

        def fail(_: int) -> None:
            worker.before_token = None
            raise EngineFailed("a bug")

        worker.before_token = fail
        job, steps = make_job(PROMPT, 5)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 5)
        assert excluded(cluster) == {worker.name}


async def test_legs_get_what_is_left_of_the_deadline() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.chunked = True
        job, _ = make_job(PROMPT, 5, timeout_s=60.0)
        await cluster.pipeline.run(job)
        decode = cluster.decodes[0]
        assert len(decode.timeouts) == 2  # prefetch and decode
        for timeout_s in (*cluster.prefill.timeouts, *decode.timeouts):
            assert 30 < timeout_s < 60
