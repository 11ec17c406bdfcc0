"""What placement is told of a prompt's beginning: once a job, only while it wants to know, and nobody else is told."""

import pytest

from gateway import job as job_module
from shared.domain.prompt import BLOCK_TOKENS, block_hashes
from shared.errors import EngineFailed
from tests.gateway.cluster import Cluster, make_job, running_cluster

PROMPT = [number % 900 for number in range(3 * BLOCK_TOKENS + 5)]


async def run(cluster: Cluster, **more: object) -> None:
    job, _ = make_job(PROMPT, 4, **more)  # type: ignore[arg-type]
    await cluster.pipeline.run(job)


async def test_it_is_told_from_the_second_job_on_while_the_policy_looks_at_it() -> None:
    async with running_cluster() as cluster:
        await run(cluster)
        cluster.wants_prefix = True
        await run(cluster)
        await run(cluster)
        cluster.wants_prefix = False
        await run(cluster)
        await run(cluster)
        told = [place.job.prefix for place in cluster.places]
        assert told == [(), (), block_hashes(PROMPT), block_hashes(PROMPT), ()]
        assert len(told[2]) == 3
        for worker in (cluster.prefill, *cluster.decodes):
            assert all(request.job.prefix == () for request in (*worker.prefills, *worker.decodes))


async def test_the_salt_is_part_of_it_and_who_bypasses_the_cache_has_none() -> None:
    async with running_cluster() as cluster:
        cluster.wants_prefix = True
        await run(cluster)
        await run(cluster, salt="s")
        await run(cluster, local_only=True)
        assert [place.job.prefix for place in cluster.places[1:]] == [block_hashes(PROMPT, "s"), ()]


async def test_it_is_computed_once_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def count(*given: object) -> tuple[int, ...]:
        computed.append(given)
        return (1, 2)

    async with running_cluster() as cluster:
        cluster.wants_prefix = True
        await run(cluster)
        monkeypatch.setattr(job_module, "hashes_of", count)
        lost = []

        def lose_once(_: int) -> None:
            if not lost:
                lost.append(1)
                raise EngineFailed("the first attempt is lost")

        cluster.prefill.before_token = lose_once
        await run(cluster)
        assert [place.job.prefix for place in cluster.places[1:]] == [(1, 2), (1, 2)]
        assert len(computed) == 1


async def test_instances_are_told_what_they_are_known_to_hold() -> None:
    async with running_cluster() as cluster:
        cluster.saved = 2
        await run(cluster)
        assert [request.saved for request in cluster.prefill.prefills] == [2]
        await run(cluster, local_only=True)
        requests = [request for worker in cluster.decodes for request in worker.decodes]
        assert sorted((request.handle is None, request.saved) for request in requests) == [(False, 0), (True, 2)]
