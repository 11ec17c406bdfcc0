"""Predictions of lengths: when they arrive, which replica is called, and predictors beside instances."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.job import Job
from gateway.lengths import ASIDE_S, MAX_CALLS, Replica, Replicas
from gateway.settings import GatewaySettings
from shared.domain.job import ends_of
from shared.errors import Busy, DeadlineExceeded, NotConnected, PolyphaseError, WrongRole
from tests.gateway.cluster import Cluster, make_job, running_cluster
from tests.gateway.predictors import LONG_S, PROMPT, Predictor, placement_s, run, served, until_asked
from tests.gateway.rude_predictor import SOURCE, rude_predictor
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


class Those:
    """Replicas `names`, all of them there at first."""

    def __init__(self, names: str) -> None:
        self.there = set(names)
        self.now_s = 0.0
        self.replicas = Replicas(names, self.there.__contains__, lambda: self.now_s)

    def asked(self, count: int) -> str:
        """Who is, one after the other."""
        found = []
        for _ in range(count):
            replica = self.replicas.first()
            with self.replicas.calling(replica):
                found.append(replica.address)
        return "".join(found)

    def fails(self, name: str, error: PolyphaseError) -> Replica:
        """A call to it does."""
        replica = next(one for one in _each(self.replicas, self.there) if one.address == name)
        with suppress(PolyphaseError), self.replicas.calling(replica):
            raise error
        return replica


def _each(replicas: Replicas, there: set[str]) -> Iterable[Replica]:
    """In turn, until all were seen."""
    for _ in there:
        replica = replicas.first()
        with replicas.calling(replica):
            yield replica


def _address(replica: Replica | None) -> str:
    return replica.address if replica else ""


def test_without_a_call_under_way_they_are_asked_in_turn() -> None:
    assert Those("abc").asked(7) == "abcabca"


def test_the_fewest_calls_under_way_come_first() -> None:
    those = Those("ab")
    with those.replicas.calling(those.replicas.first()), those.replicas.calling(those.replicas.first()):
        with those.replicas.calling(those.replicas.first()):  # a has two
            assert those.asked(3) == "bbb"
        assert sorted(those.asked(2)) == ["a", "b"]


@pytest.mark.parametrize("error", [Busy(""), DeadlineExceeded(""), NotConnected(""), PolyphaseError("")])
def test_one_that_failed_is_left_aside_for_a_while(error: PolyphaseError) -> None:
    those = Those("ab")
    those.fails("a", error)
    assert those.asked(3) == "bbb"
    those.now_s = ASIDE_S
    assert set(those.asked(2)) == {"a", "b"}


def test_one_that_is_not_there_is_asked_only_where_nobody_is() -> None:
    those = Those("ab")
    those.there.discard("a")
    assert those.asked(2) == "bb"
    those.there.discard("b")
    assert set(those.asked(4)) == {"a", "b"}


def test_where_all_have_failed_all_are_asked() -> None:
    those = Those("ab")
    for name in "ab":
        those.fails(name, Busy(""))
    assert set(those.asked(2)) == {"a", "b"}


def test_the_other_one_is_one_that_is_there_and_did_not_fail() -> None:
    those = Those("abc")
    failed = those.fails("a", Busy(""))
    assert _address(those.replicas.other(failed)) in {"b", "c"}
    those.there.discard("b")
    assert _address(those.replicas.other(failed)) == "c"
    those.fails("c", Busy(""))
    assert those.replicas.other(failed) is None


def test_a_call_that_was_given_up_is_no_failure() -> None:
    those = Those("ab")
    replica = those.replicas.first()
    with suppress(ValueError), those.replicas.calling(replica):
        raise ValueError
    assert (replica.calls, those.asked(2)) == (0, "ba")


def test_there_may_be_none() -> None:
    assert not Those("").replicas


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
    with pytest.raises(ValidationError, match="predictors_beside and predictors exclude each other"):
        GatewaySettings(
            schedulers=("tcp://a:1",), model="demo", predictors=("tcp://b:1",), predictors_beside={"p": "c"}
        )
