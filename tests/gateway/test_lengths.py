"""Predictions of lengths: when they arrive, which replica gets the request, and predictors beside instances."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.job import Job
from gateway.lengths import ASIDE_S, MAX_CALLS, Replica, Replicas
from gateway.settings import GatewaySettings
from shared.domain.job import Slo, ends_of
from shared.errors import Busy, DeadlineExceeded, NotConnected, PolyphaseError, WrongRole
from shared.timeline import Span
from tests.gateway.cluster import Cluster, Predictor, make_job, running_cluster, until
from tests.gateway.processes import processes, run_predictor
from tests.patience import paused_s
from tests.ports import free_address

PROMPT = list(range(1000))
LONG_S = 20.0  # no test that passes waits so long


@asynccontextmanager
async def cluster_and_predictors(count: int = 1, **changes: Any) -> AsyncIterator[tuple[Cluster, list[Predictor]]]:
    """The predictors are replicas."""
    predictors, addresses = [Predictor() for _ in range(count)], tuple(free_address() for _ in range(count))
    async with AsyncExitStack() as stack:
        for predictor, address in zip(predictors, addresses, strict=True):
            await stack.enter_async_context(predictor.serving(address))
        settings = {"predictors": addresses, "predict_timeout_s": 10 * LONG_S, **changes}
        yield await stack.enter_async_context(running_cluster(**settings)), predictors


async def run(cluster: Cluster, max_tokens: int = 4, ttft_s: float = 2 * LONG_S, **changes: Any) -> Job:
    return await cluster.completes(max_tokens, PROMPT, slo=Slo(ttft_s=ttft_s), **changes)


async def run_until_answered(cluster: Cluster) -> None:
    """A job whose prompt takes as long as its prediction."""
    job, _ = make_job(PROMPT, 4)
    cluster.prefill.before_token = lambda _: until(lambda: job.prediction)
    async with asyncio.timeout(LONG_S):
        await cluster.pipeline.run(job)
    cluster.prefill.before_token = None


def placement_s(job: Job) -> float:
    (placement,) = [span for span in job.timeline.spans if span.span is Span.PLACEMENT]
    return placement.ended_s - placement.started_s


def placed_with(cluster: Cluster) -> list[bool]:
    return [place.job.prediction is not None for place in cluster.places]


async def test_placement_waits_for_a_quick_classifier() -> None:
    async with cluster_and_predictors(predict_wait_s=LONG_S) as (cluster, (predictor,)):
        await run_until_answered(cluster)  # the gateway does not know yet that waiting pays
        job = await run(cluster)
        assert placed_with(cluster)[-1]
        request = predictor.requests[-1]
        expected = (ends_of(PROMPT), len(PROMPT), 4)
        assert (request.prompt_token_ids, request.prompt_tokens, request.max_tokens) == expected
        assert cluster.prefill.prefills[-1].job.prediction == job.prediction
        (decision,) = [each for each in job.timeline.decisions if each.kind == "prediction"]
        assert (decision.chosen, decision.reasons[0].what) == ("400 tokens or more", "classifier")


@pytest.mark.parametrize("during", ["prefill", "decode", "decode of a local job"])
async def test_a_later_prediction_is_sent_to_the_instance_at_work(during: str) -> None:
    async with cluster_and_predictors() as (cluster, (predictor,)):
        predictor.go.clear()
        prefill, decode = cluster.prefill, cluster.decodes[0]
        worker = prefill if during == "prefill" else decode

        async def computing(_: int) -> None:
            predictor.go.set()
            await until(lambda: worker.predictions)

        worker.before_token = computing
        job = await run(cluster, local_only="local" in during)
        (message,) = worker.predictions
        assert message.prediction.lower_tokens == 400
        if during == "prefill":
            assert message.transfer_id == prefill.prefills[0].transfer_id
            assert prefill.prefills[0].job.prediction is None
            assert decode.decodes[0].job.prediction == message.prediction
            return
        assert message.job_id == job.spec.job_id
        assert decode.decodes[0].job.prediction is None
        if during == "decode":
            await prefill.releases(1)  # on the same connection, after all messages
        assert not prefill.predictions


@pytest.mark.parametrize(("source", "takes_s", "wait_s"), [("observed", 0.0, LONG_S), ("classifier", 2.0, 1.5)])
async def test_placement_does_not_wait_for_an_answer_that_does_not_pay(
    source: str, takes_s: float, wait_s: float
) -> None:
    """A source that schedulers know themselves, and a classifier that is slower than the wait."""
    async with cluster_and_predictors(predict_wait_s=wait_s) as (cluster, (predictor,)):
        predictor.source, predictor.takes_s = source, takes_s
        await run_until_answered(cluster)
        predictor.go.clear()
        job = await run(cluster)
        assert not placed_with(cluster)[-1]
        assert placement_s(job) - paused_s() < wait_s


async def test_a_predictor_that_hangs_is_waited_for_once() -> None:
    wait_s = 1.5
    async with cluster_and_predictors(predict_wait_s=wait_s) as (cluster, (predictor,)):
        await run_until_answered(cluster)
        predictor.go.clear()
        waits = [placement_s(await run(cluster)) for _ in range(4)]
        assert waits[0] > 0.9 * wait_s
        assert max(waits[1:]) - paused_s() < 0.9 * wait_s


@pytest.mark.parametrize("predict", ["parallel", "sequential"])
async def test_calls_are_bounded_in_number_and_end_with_their_jobs(predict: str) -> None:
    async with cluster_and_predictors(predict=predict) as (cluster, (predictor,)):
        predictor.go.clear()
        cluster.prefill.hang_at(0)
        running = [asyncio.create_task(run(cluster)) for _ in range(MAX_CALLS)]
        await until(lambda: len(predictor.requests) == MAX_CALLS)
        cluster.prefill.before_token = None
        assert placement_s(await run(cluster)) < LONG_S  # in sequential mode it does not wait, either
        assert len(predictor.requests) == MAX_CALLS
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: predictor.ended == MAX_CALLS)


@pytest.mark.parametrize("predict", ["parallel", "sequential"])
@pytest.mark.parametrize("refuse", [Busy("too many"), ValueError("a bug"), None], ids=["busy", "crash", "not there"])
async def test_a_failed_prediction_holds_no_job_up(refuse: Exception | None, predict: str) -> None:
    settings = {"predict": predict, "predict_timeout_s": LONG_S if refuse else 0.3}
    if refuse is None:
        settings["predictors"] = (free_address(),)
    async with cluster_and_predictors(**settings) as (cluster, (predictor,)):
        predictor.refuse = refuse
        job = await run(cluster)
        assert (job.prediction, job.attempt) == (None, 1)
        assert placement_s(job) < LONG_S


async def test_an_answer_of_one_token_needs_no_prediction() -> None:
    async with cluster_and_predictors() as (cluster, (predictor,)):
        await run(cluster, max_tokens=1)
        await run_until_answered(cluster)
        assert [request.max_tokens for request in predictor.requests] == [4]


async def test_sequential_placement_waits_for_each_answer() -> None:
    async with cluster_and_predictors(predict="sequential", predict_timeout_s=LONG_S) as (cluster, (predictor,)):
        predictor.takes_s = 0.05
        for predictor.source in ("classifier", "observed"):
            job = await run(cluster)
            assert placed_with(cluster)[-1]
            assert cluster.prefill.prefills[-1].job.prediction == job.prediction


@pytest.mark.parametrize(("timeout_s", "ttft_s"), [(0.3, LONG_S), (LONG_S, 0.4)])
async def test_sequential_placement_waits_for_the_timeout_and_half_of_the_target(
    timeout_s: float, ttft_s: float
) -> None:
    async with cluster_and_predictors(predict="sequential", predict_timeout_s=timeout_s) as (cluster, (predictor,)):
        predictor.go.clear()
        assert 0.15 < placement_s(await run(cluster, ttft_s=ttft_s)) < LONG_S / 2
        assert placed_with(cluster) == [False]
        await until(lambda: predictor.ended == 1)  # the call ends with its job


# Replicas


class Some:
    """Replicas with these names, all of them connected at first."""

    def __init__(self, names: str) -> None:
        self.connected = set(names)
        self.now_s = 0.0
        self.replicas = Replicas(names, self.connected.__contains__, lambda: self.now_s)

    def called(self, count: int) -> str:
        """The names of the replicas that get so many calls, one after the other."""
        names = []
        for _ in range(count):
            replica = self.replicas.first()
            with self.replicas.calling(replica):
                names.append(replica.address)
        return "".join(names)

    def fail(self, name: str, error: PolyphaseError | None = None) -> Replica:
        """A call to it fails."""
        replica = next(each for each in self._in_turn() if each.address == name)
        with suppress(PolyphaseError), self.replicas.calling(replica):
            raise error or Busy("")
        return replica

    def _in_turn(self) -> Iterable[Replica]:
        for _ in self.connected:
            replica = self.replicas.first()
            with self.replicas.calling(replica):
                yield replica

    def other(self, replica: Replica) -> str:
        found = self.replicas.other(replica)
        return found.address if found else ""


def test_replicas_without_a_call_take_turns() -> None:
    assert Some("abc").called(7) == "abcabca"
    assert not Some("").replicas


def test_the_replica_with_the_fewest_calls_comes_first() -> None:
    some = Some("ab")
    calling, first = some.replicas.calling, some.replicas.first
    with calling(first()), calling(first()):
        with calling(first()):  # a has two
            assert some.called(3) == "bbb"
        assert sorted(some.called(2)) == ["a", "b"]


@pytest.mark.parametrize("error", [Busy(""), DeadlineExceeded(""), NotConnected(""), PolyphaseError("")])
def test_a_replica_that_failed_is_avoided_for_a_while(error: PolyphaseError) -> None:
    some = Some("ab")
    some.fail("a", error)
    assert some.called(3) == "bbb"
    some.now_s = ASIDE_S
    assert set(some.called(2)) == {"a", "b"}


def test_replicas_that_are_not_connected_or_failed_are_called_where_there_is_no_other() -> None:
    some = Some("ab")
    some.connected.discard("a")
    assert some.called(2) == "bb"
    some.connected.discard("b")
    assert set(some.called(4)) == {"a", "b"}
    some = Some("ab")
    for name in "ab":
        some.fail(name)
    assert set(some.called(2)) == {"a", "b"}


def test_the_second_try_goes_to_a_replica_that_is_connected_and_did_not_fail() -> None:
    some = Some("abc")
    failed = some.fail("a")
    assert some.other(failed) in {"b", "c"}
    some.connected.discard("b")
    assert some.other(failed) == "c"
    some.fail("c")
    assert some.other(failed) == ""


def test_a_call_that_was_given_up_is_no_failure() -> None:
    some = Some("ab")
    replica = some.replicas.first()
    with suppress(ValueError), some.replicas.calling(replica):
        raise ValueError
    assert (replica.calls, some.called(2)) == (0, "ba")


async def test_a_request_goes_to_the_replica_with_the_fewest_calls_and_again_after_a_refusal() -> None:
    async with cluster_and_predictors(2, predict="sequential", predict_timeout_s=LONG_S) as (cluster, (first, second)):
        while not (first.requests and second.requests):
            await run(cluster)
        first.go.clear()
        pair = [asyncio.create_task(run(cluster)) for _ in range(2)]  # one at each replica
        await asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED)
        had = len(first.requests)
        for _ in range(4):
            assert (await run(cluster)).prediction is not None
        assert len(first.requests) == had
        first.go.set()
        await asyncio.gather(*pair)
        first.refuse = Busy("too many")
        for _ in range(3):
            assert (await run(cluster)).prediction is not None
        assert len(first.requests) > had


TIMEOUT_S = 2.0  # longer than a call waits for a connection that was lost, shorter than a frozen peer counts as alive
SLACK_S = 3.0  # of a busy machine


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_replica_that_dies_or_freezes_under_load_costs_no_job_more_than_the_timeout(
    number: signal.Signals,
) -> None:
    jobs: list[Job] = []
    addresses, good = (free_address(), free_address()), Predictor(takes_s=0.02)
    settings: dict[str, Any] = {"predict": "sequential", "predict_timeout_s": TIMEOUT_S, "predictors": addresses}

    async def user() -> None:
        while True:
            jobs.append(await run(cluster))

    def unknown() -> list[Job]:
        return [job for job in jobs if job.prediction is None]

    def sources() -> set[str]:
        return {job.prediction.source for job in jobs if job.prediction}

    with processes(run_predictor, (addresses[0], "remote")) as (remote,):
        async with good.serving(addresses[1]), running_cluster(**settings) as cluster, asyncio.TaskGroup() as users:
            tasks = [users.create_task(user()) for _ in range(8)]
            await until(lambda: sources() == {"remote", "classifier"}, LONG_S)
            assert not unknown()
            remote.send_signal(number)
            if number is signal.SIGSTOP:
                await until(unknown, LONG_S)
            enough = len(jobs) + 60
            await until(lambda: len(jobs) >= enough, LONG_S)
            for task in tasks:
                task.cancel()
    assert max(placement_s(job) for job in jobs) - paused_s() < TIMEOUT_S + SLACK_S
    # No job misses the replica that died; those that had called the frozen one do, and the few that try it again.
    assert len(unknown()) <= (0 if number is signal.SIGKILL else 12)
    assert {job.attempt for job in jobs} == {1}


# Predictors beside instances


@asynccontextmanager
async def predictors_beside(**changes: Any) -> AsyncIterator[tuple[Cluster, dict[str, Predictor]]]:
    predictors = {name: Predictor() for name in ("p0", "d0", "d1")}
    addresses = {name: free_address() for name in predictors}
    async with AsyncExitStack() as stack:
        for name, predictor in predictors.items():
            await stack.enter_async_context(predictor.serving(addresses[name]))
        settings = {"predictors_beside": addresses, "predict_timeout_s": LONG_S, **changes}
        yield await stack.enter_async_context(running_cluster(**settings)), predictors


def requests(predictors: dict[str, Predictor]) -> dict[str, int]:
    return {name: len(predictor.requests) for name, predictor in predictors.items() if predictor.requests}


async def test_the_predictor_beside_the_prefill_instance_answers_while_the_instance_computes() -> None:
    async with predictors_beside() as (cluster, predictors):
        predictors["p0"].go.clear()

        async def computing(_: int) -> None:
            predictors["p0"].go.set()
            await until(lambda: cluster.prefill.predictions)

        cluster.prefill.before_token = computing
        job = await run(cluster)
        assert requests(predictors) == {"p0": 1}
        request = predictors["p0"].requests[0]
        assert (request.prompt_token_ids, request.prompt_tokens) == (ends_of(PROMPT), len(PROMPT))
        assert placed_with(cluster) == [False]
        assert cluster.prefill.predictions[0].prediction == job.prediction
        assert cluster.decodes[0].decodes[0].job.prediction == job.prediction


async def test_sequential_mode_predicts_before_the_prefill_at_the_instance_that_has_the_role() -> None:
    async with predictors_beside(predict="sequential") as (cluster, predictors):
        job = await run(cluster)
        assert (requests(predictors), placed_with(cluster)) == ({"p0": 1}, [False])
        assert cluster.prefill.prefills[0].job.prediction == job.prediction is not None
        p0, (d0, d1) = cluster.prefill, cluster.decodes
        cluster.prefill, cluster.decodes[:] = d0, [p0, d1]
        await run(cluster)
        assert requests(predictors) == {"p0": 1, "d0": 1}


async def test_an_answer_outlives_the_flip_of_its_prefill_instance() -> None:
    async with predictors_beside(predict="sequential") as (cluster, predictors):
        p0, (d0, d1) = cluster.prefill, cluster.decodes
        p0.refuse = WrongRole("p0 decodes now")
        running = asyncio.create_task(run(cluster))
        await until(lambda: predictors["p0"].requests)
        cluster.prefill, cluster.decodes[:] = d0, [d1]
        job = await running
        assert requests(predictors) == {"p0": 1}
        assert d0.prefills[0].job.prediction == job.prediction


@pytest.mark.parametrize("local_only", [True, False])
@pytest.mark.parametrize("predict", ["off", "parallel"])
async def test_a_predictor_beside_has_no_stand_in(predict: str, local_only: bool) -> None:
    """Neither where it does not answer, nor where there is no prefill instance or no prediction is wanted."""
    wanted = predict != "off" and not local_only
    async with predictors_beside(predict=predict, predict_timeout_s=1.0) as (cluster, predictors):
        predictors["p0"].go.clear()

        async def computing(_: int) -> None:
            await until(lambda: predictors["p0"].ended == wanted)  # its call has timed out
            await asyncio.sleep(0.1)  # in which another predictor might get a call

        cluster.prefill.before_token = computing
        assert (await run(cluster, local_only=local_only)).prediction is None
        assert requests(predictors) == ({"p0": 1} if wanted else {})


def test_predictors_are_of_one_kind() -> None:
    with pytest.raises(ValidationError, match="predictors_beside and predictors exclude each other"):
        GatewaySettings(schedulers=("a:1",), model="demo", predictors=("tcp://b:1",), predictors_beside={"p": "c"})
