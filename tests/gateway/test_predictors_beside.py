"""A predictor beside each instance: the one beside the prefill instance answers, whichever that is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings
from shared.domain.job import ends_of
from shared.errors import WrongRole
from tests.gateway.cluster import Cluster, make_job, running_cluster
from tests.gateway.predictors import LONG_S, PROMPT, Predictor, run, served, until_asked
from tests.ports import free_address


@asynccontextmanager
async def cluster_and_predictors(**changes: Any) -> AsyncIterator[tuple[Cluster, dict[str, Predictor]]]:
    """Of every instance."""
    predictors = {name: Predictor() for name in ("p0", "d0", "d1")}
    addresses = {name: free_address() for name in predictors}
    async with AsyncExitStack() as stack:
        for name, predictor in predictors.items():
            await stack.enter_async_context(served(predictor, addresses[name]))
        settings = {"predictors_beside": addresses, "predict_timeout_s": LONG_S, **changes}
        yield await stack.enter_async_context(running_cluster(**settings)), predictors


def predicted(predictors: dict[str, Predictor]) -> dict[str, int]:
    return {name: len(predictor.asked) for name, predictor in predictors.items() if predictor.asked}


async def test_the_one_beside_the_prefill_instance_answers_while_it_computes() -> None:
    async with cluster_and_predictors() as (cluster, predictors):
        told = asyncio.Event()

        async def computing(count: int) -> None:
            predictors["p0"].go.set()
            await told.wait()

        predictors["p0"].go.clear()
        cluster.prefill.before_token = computing
        task = asyncio.create_task(run(cluster))
        async with asyncio.timeout(LONG_S):
            while not cluster.prefill.told:
                await asyncio.sleep(0.005)
        told.set()
        job = await task
        assert predicted(predictors) == {"p0": 1}
        request = predictors["p0"].asked[0]
        assert (request.prompt_token_ids, request.prompt_tokens) == (ends_of(PROMPT), len(PROMPT))
        assert cluster.places[0].job.prediction is None, "placement comes first"
        assert cluster.prefill.told[0].prediction == job.prediction
        assert cluster.decodes[0].decodes[0].job.prediction == job.prediction


async def test_sequential_predicts_before_the_prefill_and_not_before_the_placement() -> None:
    async with cluster_and_predictors(predict="sequential") as (cluster, predictors):
        job = await run(cluster)
        assert predicted(predictors) == {"p0": 1}
        assert cluster.places[0].job.prediction is None
        assert job.prediction is not None
        assert cluster.prefill.prefills[0].job.prediction == job.prediction


async def test_an_instance_that_is_flipped_to_prefill_brings_its_predictor() -> None:
    async with cluster_and_predictors(predict="sequential") as (cluster, predictors):
        await run(cluster)
        p0, (d0, d1) = cluster.prefill, cluster.decodes
        cluster.prefill, cluster.decodes[:] = d0, [p0, d1]
        await run(cluster)
        assert predicted(predictors) == {"p0": 1, "d0": 1}


async def test_a_prefill_instance_that_has_just_been_flipped_away_leaves_its_answer() -> None:
    async with cluster_and_predictors(predict="sequential") as (cluster, predictors):
        p0, (d0, d1) = cluster.prefill, cluster.decodes
        p0.refuse = WrongRole("p0 decodes now")
        task = asyncio.create_task(run(cluster))
        await until_asked(predictors["p0"], 1)
        cluster.prefill, cluster.decodes[:] = d0, [d1]
        job = await task
        assert predicted(predictors) == {"p0": 1}, "its answer is as good as another's"
        assert d0.prefills[0].job.prediction == job.prediction


async def test_one_that_does_not_answer_has_no_stand_in() -> None:
    async with cluster_and_predictors(predict_timeout_s=0.05) as (cluster, predictors):
        predictors["p0"].go.clear()
        cluster.prefill.before_token = lambda _: asyncio.sleep(0.2)
        assert (await run(cluster)).prediction is None
        assert predicted(predictors) == {"p0": 1}


@pytest.mark.parametrize("changes", [{"predict": "off"}, {}], ids=["off", "no prefill instance"])
async def test_no_predictor_gets_a_request(changes: dict[str, Any]) -> None:
    async with cluster_and_predictors(**changes) as (cluster, predictors):
        job, _ = make_job(PROMPT, 4, local_only=not changes)
        async with asyncio.timeout(LONG_S):
            await cluster.pipeline.run(job)
        assert not predicted(predictors)
        assert job.prediction is None


def test_predictors_are_of_one_kind() -> None:
    with pytest.raises(ValidationError, match="predictors_beside: there are `predictors`, too"):
        GatewaySettings(
            schedulers=("tcp://a:1",), model="demo", predictors=("tcp://b:1",), predictors_beside={"p": "c"}
        )
