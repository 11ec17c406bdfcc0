"""A request that loses instances: how many it may take with it, and what its progress forgives."""

from collections.abc import Awaitable, Callable

import pytest

from shared.domain.job import Loss, Phase
from shared.errors import EngineFailed, InstancesLost
from tests.gateway.api import until
from tests.gateway.cluster import Cluster, make_job, running_cluster, tokens_of
from tests.gateway.worker import Worker, answer

PROMPT = [5, 6, 7, 8, 9]


def _dies_after(tokens: int, deaths: list[str]) -> Callable[[Worker], Callable[[int], Awaitable[None]]]:
    def of(worker: Worker) -> Callable[[int], Awaitable[None]]:
        async def before(count: int) -> None:
            if count == tokens:
                deaths.append(worker.name)
                raise EngineFailed("the instance died")

        return before

    return of


def _kill_after(cluster: Cluster, tokens: int) -> list[str]:
    """Every decode instance dies once it has given a job so many tokens; the deaths, as they come."""
    deaths: list[str] = []
    for worker in cluster.decodes:
        worker.before_token = _dies_after(tokens, deaths)(worker)
    return deaths


@pytest.mark.parametrize(("carry", "tokens", "most"), [(True, 0, 4), (True, 1, 4), (False, 0, 2), (False, 1, 2)])
async def test_a_request_that_kills_its_instances_is_refused_after_few(carry: bool, tokens: int, most: int) -> None:
    """What can be carried gets a token from each prefill, so that no two of its losses are at the same token."""
    async with running_cluster() as cluster:
        deaths = _kill_after(cluster, tokens)
        job, steps = make_job(PROMPT, 60, carry=carry)
        with pytest.raises(InstancesLost, match=r"d0, d1"):
            await cluster.pipeline.run(job)
        assert len(deaths) == job.attempt == most
        assert set(deaths) == {"d0", "d1"}
        assert tokens_of(steps) == answer(PROMPT, len(job.tokens))
        assert job.phase is Phase.FAILED
        await cluster.reporter.flush()
        await until(lambda: bool(cluster.reports) and cluster.reports[-1].phase.final)
        assert cluster.reports[-1].outcome == InstancesLost.code
        assert [loss.instance_id for loss in cluster.reports[-1].losses] == deaths


async def test_two_instances_lost_at_one_token_are_enough() -> None:
    """The whole prompt is computed where it decodes: nothing gives a token between the losses."""
    async with running_cluster() as cluster:
        cluster.split = lambda _: 0
        deaths = _kill_after(cluster, 0)
        job, _ = make_job(PROMPT, 60)
        with pytest.raises(InstancesLost, match="at output token 0"):
            await cluster.pipeline.run(job)
        assert deaths == ["d0", "d1"]


async def test_one_instance_that_fails_again_and_again_is_no_fault_of_the_request() -> None:
    async with running_cluster() as cluster:
        cluster.split = lambda _: 0
        del cluster.decodes[1]
        deaths = _kill_after(cluster, 0)
        job, _ = make_job(PROMPT, 60)
        with pytest.raises(EngineFailed):
            await cluster.pipeline.run(job)
        assert deaths == ["d0"] * 4


@pytest.mark.parametrize("carry", [True, False])
async def test_a_long_answer_survives_many_losses_that_are_far_apart(carry: bool) -> None:
    async with running_cluster(loss_forgiven_tokens=10) as cluster:
        deaths: list[int] = []

        def dies(worker: Worker) -> None:
            async def before(count: int) -> None:
                if len(deaths) < 6 and count == (12 if carry else 12 * (len(deaths) + 1)):
                    deaths.append(count)
                    raise EngineFailed("the instance died")

            worker.before_token = before

        for worker in cluster.decodes:
            dies(worker)
        job, steps = make_job(PROMPT, 100, carry=carry)
        await cluster.pipeline.run(job)
        assert len(deaths) == len(job.losses) == 6
        assert tokens_of(steps) == answer(PROMPT, 100)


def test_progress_forgives_losses() -> None:
    job, _ = make_job(PROMPT, 1000)
    job.losses = [Loss(at, "d0", 1) for at in (0, 10, 20)]
    assert job.open_losses(100) == 3
    job.losses.append(Loss(120, "d1", 1))
    assert job.open_losses(100) == 3  # a hundred tokens forgave one, and this is one more
    job.losses.append(Loss(1120, "d1", 1))
    assert job.open_losses(100) == 1
    assert job.lost_since(100) == ["d1"]  # one process, however often
    assert job.lost_since(0) == ["d0", "d1"]
