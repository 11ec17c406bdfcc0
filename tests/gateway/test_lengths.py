"""What a predictor says reaches the first placement when it is quick, the dispatch when it is not, and never holds a
job up for longer than a moment, or where it is asked before placement than its deadline, whatever it does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.lengths import MAX_CALLS
from shared.domain.job import ends_of
from shared.errors import Busy
from tests.gateway.cluster import Cluster, make_job, running_cluster
from tests.gateway.predictors import LONG_S, PROMPT, Predictor, placement_s, run, served, until_asked
from tests.ports import free_address


@asynccontextmanager
async def cluster_and_predictor(**changes: object) -> AsyncIterator[tuple[Cluster, Predictor]]:
    address, predictor = free_address(), Predictor()
    async with served(predictor, address), running_cluster(predictors=(address,), **changes) as cluster:
        yield cluster, predictor


async def run_until_answered(cluster: Cluster) -> None:
    """A job whose prompt takes as long as its prediction."""
    job, _ = make_job(PROMPT, 4)

    async def computing(count: int) -> None:
        while job.prediction is None:
            await asyncio.sleep(0.001)

    cluster.prefill.before_token = computing
    async with asyncio.timeout(LONG_S):
        await cluster.pipeline.run(job)
    cluster.prefill.before_token = None


def placed_with(cluster: Cluster) -> list[bool]:
    return [place.job.prediction is not None for place in cluster.places]


async def test_the_first_placement_has_what_a_quick_classifier_says() -> None:
    async with cluster_and_predictor(predict_wait_s=LONG_S) as (cluster, predictor):
        await run_until_answered(cluster)  # nobody knows yet that it pays to wait
        job = await run(cluster)
        assert placed_with(cluster)[-1]
        request = predictor.asked[-1]
        assert (request.prompt_token_ids, request.prompt_tokens) == (ends_of(PROMPT), len(PROMPT))
        assert request.max_tokens == 4
        assert cluster.prefill.prefills[-1].job.prediction == job.prediction
        (decided,) = [one for one in job.timeline.decisions if one.kind == "prediction"]
        assert decided.chosen == "400 tokens or more"
        assert decided.reasons[0].what == "classifier"


async def test_what_comes_later_is_told_to_the_prefill_under_way_and_to_decode() -> None:
    async with cluster_and_predictor(predict_timeout_s=10 * LONG_S) as (cluster, predictor):
        predictor.go.clear()
        told = asyncio.Event()

        async def computing(count: int) -> None:
            predictor.go.set()
            await told.wait()

        cluster.prefill.before_token = computing
        task = asyncio.create_task(run(cluster))
        async with asyncio.timeout(LONG_S):
            while not cluster.prefill.told:
                await asyncio.sleep(0.005)
        told.set()
        await task
        (said,) = cluster.prefill.told
        assert said.transfer_id == cluster.prefill.prefills[0].transfer_id
        assert said.prediction.lower_tokens == 400
        assert cluster.prefill.prefills[0].job.prediction is None
        assert cluster.decodes[0].decodes[0].job.prediction == said.prediction


@pytest.mark.parametrize("whole", [False, True], ids=["after its prefill", "where all is computed"])
async def test_what_comes_after_the_prefill_is_told_to_decode_alone(whole: bool) -> None:
    async with cluster_and_predictor(predict_timeout_s=10 * LONG_S) as (cluster, predictor):
        predictor.go.clear()
        decode = cluster.decodes[0]

        async def decoding(count: int) -> None:
            predictor.go.set()
            async with asyncio.timeout(LONG_S):
                while not decode.told:
                    await asyncio.sleep(0.005)

        decode.before_token = decoding
        job, _ = make_job(PROMPT, 4, local_only=whole)
        async with asyncio.timeout(LONG_S):
            await cluster.pipeline.run(job)
        (said,) = decode.told
        assert (said.job_id, said.prediction.lower_tokens) == (job.spec.job_id, 400)
        assert decode.decodes[0].job.prediction is None
        if not whole:
            await cluster.prefill.releases(1)  # by the same connection, after all that was sent
        assert not cluster.prefill.told


@pytest.mark.parametrize(("source", "takes_s", "wait_s"), [("observed", 0.0, LONG_S), ("classifier", 1.5, 1.0)])
async def test_placement_waits_for_no_answer_that_does_not_pay(source: str, takes_s: float, wait_s: float) -> None:
    """One that says what schedulers know themselves, and a classifier that is slower than the wait."""
    async with cluster_and_predictor(predict_wait_s=wait_s, predict_timeout_s=10 * LONG_S) as (cluster, predictor):
        predictor.source, predictor.takes_s = source, takes_s
        await run_until_answered(cluster)
        predictor.go.clear()
        job = await run(cluster)
        assert not placed_with(cluster)[-1]
        assert placement_s(job) < 0.9


async def test_one_that_hangs_of_a_sudden_costs_a_moment_and_then_nothing() -> None:
    async with cluster_and_predictor(predict_wait_s=0.25, predict_timeout_s=2.0) as (cluster, predictor):
        await run_until_answered(cluster)
        predictor.go.clear()
        waited = []
        for _ in range(6):
            waited.append(placement_s(await run(cluster)))
        assert waited[0] > 0.2
        assert max(waited[1:]) < 0.2


async def test_calls_are_bounded_in_number_and_end_with_their_jobs() -> None:
    async with cluster_and_predictor(predict_timeout_s=10 * LONG_S) as (cluster, predictor):
        predictor.go.clear()
        cluster.prefill.before_token = lambda _: asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(run(cluster)) for _ in range(MAX_CALLS + 20)]
        await until_asked(predictor, MAX_CALLS)
        async with asyncio.timeout(LONG_S):
            while len(cluster.prefill.prefills) < len(tasks):
                await asyncio.sleep(0.005)
        assert len(predictor.asked) == MAX_CALLS
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(LONG_S):
            while predictor.ended < MAX_CALLS:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("refuse", [Busy("too many"), ValueError("a bug")])
async def test_a_refusal_or_a_crash_is_no_fault_of_the_job(refuse: Exception) -> None:
    async with cluster_and_predictor() as (cluster, predictor):
        predictor.refuse = refuse
        job = await run(cluster)
        assert (job.prediction, job.attempt) == (None, 1)


async def test_one_that_is_not_there_is_no_fault_of_the_job() -> None:
    async with running_cluster(predictors=(free_address(),)) as cluster:
        assert (await run(cluster)).prediction is None


async def test_one_token_needs_no_prediction() -> None:
    async with cluster_and_predictor() as (cluster, predictor):
        await run(cluster, max_tokens=1)
        await run_until_answered(cluster)
        assert [one.max_tokens for one in predictor.asked] == [4]


async def test_before_placement_it_is_waited_for_however_slow_it_has_been() -> None:
    async with cluster_and_predictor(predict="sequential", predict_timeout_s=LONG_S) as (cluster, predictor):
        predictor.takes_s = 0.05
        for source in ("classifier", "observed"):
            predictor.source = source
            job = await run(cluster)
            assert placed_with(cluster)[-1]
            assert cluster.prefill.prefills[-1].job.prediction == job.prediction


async def test_before_placement_one_that_hangs_costs_its_deadline_and_no_more() -> None:
    async with cluster_and_predictor(predict="sequential", predict_timeout_s=0.3) as (cluster, predictor):
        predictor.go.clear()
        for _ in range(2):
            assert 0.25 < placement_s(await run(cluster)) < 2.0
        assert placed_with(cluster) == [False, False]


async def test_before_placement_one_that_hangs_leaves_half_of_what_is_left_of_the_target() -> None:
    async with cluster_and_predictor(predict="sequential", predict_timeout_s=LONG_S) as (cluster, predictor):
        predictor.go.clear()
        assert placement_s(await run(cluster, ttft_s=0.4)) < 2.0
        predictor.go.set()
        await run(cluster)  # the answer that comes later ends with its job
        assert predictor.ended == len(predictor.asked) == 2


async def test_before_placement_a_refusal_or_nobody_holds_no_job_up() -> None:
    async with cluster_and_predictor(predict="sequential", predict_timeout_s=LONG_S) as (cluster, predictor):
        predictor.refuse = Busy("too many")
        assert placement_s(await run(cluster)) < 2.0
    nobody = (free_address(),)
    async with running_cluster(predictors=nobody, predict="sequential", predict_timeout_s=0.3) as cluster:
        assert placement_s(await run(cluster)) < 2.0


async def test_before_placement_who_finds_all_calls_taken_does_not_wait() -> None:
    async with cluster_and_predictor(predict="sequential", predict_timeout_s=LONG_S) as (cluster, predictor):
        predictor.go.clear()
        tasks = [asyncio.create_task(run(cluster)) for _ in range(MAX_CALLS)]
        await until_asked(predictor, MAX_CALLS)
        assert placement_s(await run(cluster)) < 2.0
        assert len(predictor.asked) == MAX_CALLS
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_that_runs_where_nobody_shall_be_asked_gets_no_calls() -> None:
    async with cluster_and_predictor(predict="off", predict_wait_s=LONG_S) as (cluster, predictor):
        jobs = [await run(cluster) for _ in range(3)]
        assert [job.prediction for job in jobs] == [None] * 3
        assert not predictor.asked
