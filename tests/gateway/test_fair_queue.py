"""The fair queue of jobs that wait for placement, and the time after which clients may try again."""

import asyncio
from dataclasses import replace

import pytest

from gateway.admission import MAX_RETRY_S, MIN_RETRY_S, Admissions, retry_after_s
from gateway.job import Job
from gateway.pipeline import FairQueue
from gateway.settings import BUILT_IN, GatewaySettings, SloClass
from gateway.table import Counts, Kind, LocalTable
from shared.domain.job import Phase, WhenFull
from shared.errors import Busy, Delayed, Overloaded, PolyphaseError
from shared.wire.messages import TokenStep
from tests.gateway.api import until
from tests.gateway.cluster import Cluster, make_job, running_cluster, tokens_of
from tests.gateway.worker import Worker, answer

PROMPT = [5, 6, 7, 8, 9]
BATCH = BUILT_IN["batch"].as_slo("batch")


def batch_job(caller: str = "") -> tuple[Job, list[TokenStep]]:
    job, steps = make_job(PROMPT, 5)
    job.spec = replace(job.spec, slo=BATCH, caller=caller)
    return job, steps


def nobody_may(cluster: Cluster, error: PolyphaseError) -> list[Worker]:
    """No route from now on; the instances that would take jobs."""
    decodes = list(cluster.decodes)
    cluster.decodes.clear()
    cluster.no_route = error
    return decodes


async def test_only_the_head_of_a_line_asks_and_the_next_follows_when_it_was_taken() -> None:
    async with running_cluster() as cluster:
        decodes = nobody_may(cluster, Delayed("later", cause="room", retry_after_s=0.01))
        jobs = [batch_job() for _ in range(5)]
        tasks = [asyncio.create_task(cluster.pipeline.run(job)) for job, _ in jobs]
        await until(lambda: len(cluster.places) >= 4)
        assert {request.job.job_id for request in cluster.places} == {jobs[0][0].spec.job_id}
        cluster.decodes += decodes
        await asyncio.gather(*tasks)
        assert all(tokens_of(steps) == answer(PROMPT, 5) for _, steps in jobs)
        asked = list(dict.fromkeys(request.job.job_id for request in cluster.places))
        assert asked == [job.spec.job_id for job, _ in jobs]
        assert [job.timeline.decisions[0].kind for job, _ in jobs] == ["delay"] + ["placement"] * 4


async def test_a_job_that_waits_and_gives_up_leaves_its_turn_to_the_next() -> None:
    async with running_cluster() as cluster:
        decodes = nobody_may(cluster, Delayed("later", retry_after_s=0.01))
        jobs = [batch_job()[0] for _ in range(3)]
        tasks = [asyncio.create_task(cluster.pipeline.run(job)) for job in jobs]
        await until(lambda: len(cluster.places) >= 2)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        cluster.decodes += decodes
        await tasks[2]
        assert [job.finished for job in jobs] == [False, False, True]


async def test_patience_in_the_line_ends_in_a_429_that_says_so() -> None:
    slo = {"batch": SloClass(when_full=WhenFull.DELAY, queue_s=0.1)}
    async with running_cluster(slo=slo) as cluster:
        nobody_may(cluster, Delayed("later", retry_after_s=0.01))
        job, _ = batch_job()
        with pytest.raises(Overloaded) as refused:
            await cluster.pipeline.run(job)
        assert (refused.value.http_status, refused.value.cause) == (429, "queue")
        assert refused.value.retry_after_s
        assert "'batch'" in refused.value.message
        assert job.phase is Phase.FAILED


async def test_a_refusal_is_not_retried_and_keeps_its_time_over_the_wire() -> None:
    async with running_cluster() as cluster:
        nobody_may(cluster, Overloaded("full", cause="ttft", retry_after_s=7.5))
        job, _ = make_job(PROMPT, 5)
        with pytest.raises(Overloaded) as refused:
            await cluster.pipeline.run(job)
        assert refused.value.retry_after_s == 7.5
        assert len(cluster.places) == 1


async def test_a_job_that_has_begun_says_so() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.dispatches = False
        job, _ = batch_job()
        await cluster.pipeline.run(job)
        assert [request.job.begun for request in cluster.places] == [False, True]


async def test_the_caller_who_has_had_least_is_next() -> None:
    lines, order = FairQueue(), list[str]()
    for caller in "ab":
        lines.shares.came(caller, 0.0)

    async def wait(caller: str) -> None:
        async with lines.turn("batch", caller):
            order.append(caller)
            lines.shares.charge(caller, 400, 0)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group, lines.turn("batch", "a"):
        for caller in "aaabbbb":
            group.create_task(wait(caller))
        await until(lambda: lines.waiting("batch") == 8)
        lines.shares.charge("a", 1000, 0)
    assert "".join(order) == "bbbabaa"
    assert lines.waiting("batch") == 0


def test_when_to_come_again_follows_the_measured_drain() -> None:
    now = 0.0
    counts = Counts(LocalTable(), Kind.OTHERS, lambda: now)
    now = 1.0
    assert retry_after_s(1, counts.left_per_s()) == MAX_RETRY_S
    for number in range(200):
        now = number / 10
        counts.job_left()
    now = 20.0
    assert retry_after_s(50, counts.left_per_s()) == pytest.approx(5.0, rel=0.2)
    assert retry_after_s(1, counts.left_per_s()) == MIN_RETRY_S
    now = 60.0
    assert retry_after_s(50, counts.left_per_s()) > 20.0, "no job has left since"


def test_those_who_yield_leave_the_others_their_room() -> None:
    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="m", max_queued_jobs=2, max_delayed_jobs=3)
    admissions = Admissions(settings, ("a",))
    tickets = [admissions.for_class("batch").admit("a") for _ in range(3)]
    with pytest.raises(Busy):
        admissions.for_class("batch").admit("a")
    assert admissions.for_class("default").admit("a")
    assert admissions.jobs == len(tickets) + 1


async def test_a_job_of_any_class_waits_for_room_and_those_behind_it_do_not_ask() -> None:
    async with running_cluster() as cluster:
        decodes = nobody_may(cluster, Delayed("no room", cause="room", retry_after_s=0.01))
        jobs = [make_job(PROMPT, 5) for _ in range(3)]
        tasks = [asyncio.create_task(cluster.pipeline.run(job)) for job, _ in jobs]
        await until(lambda: len(cluster.places) >= 6)
        asked = [request.job.job_id for request in cluster.places]
        assert all(request.job.can_wait for request in cluster.places)
        assert asked[3:] == [jobs[0][0].spec.job_id] * (len(asked) - 3), "each once, and then the first alone"
        cluster.decodes += decodes
        await asyncio.gather(*tasks)
        assert all(tokens_of(steps) == answer(PROMPT, 5) for _, steps in jobs)


def test_an_instance_is_told_how_much_of_the_answer_is_still_expected() -> None:
    job, _ = make_job(PROMPT, 100)
    assert job.view().answer_tokens == 0, "nothing was said of it"
    job.expected_tokens = 40
    job.tokens = [1] * 10
    assert job.view().answer_tokens == 30
    job.tokens = [1] * 80
    assert job.view().answer_tokens == 20, "it is longer than expected: a quarter more"
