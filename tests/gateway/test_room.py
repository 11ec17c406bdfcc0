"""A decode instance that turns out to have no room for a job: another one takes it, if one has, and else it stays."""

import asyncio

import pytest

from shared.domain.instance import Promised
from shared.domain.route import Route
from shared.errors import Delayed
from shared.policy.assignment import mark_of
from shared.wire.messages import PlaceRequest
from shared.wire.rpc_server import ServerCall
from tests.gateway.api import until
from tests.gateway.cluster import Cluster, make_job, running_cluster, tokens_of
from tests.gateway.worker import answer

PROMPT = [5, 6, 7, 8, 9]


def _splits(cluster: Cluster, split: int) -> None:
    cluster.binds, cluster.split = True, lambda _: split


@pytest.mark.parametrize("split", [0, 3, 5])
async def test_it_goes_where_there_is_room_and_nothing_is_computed_twice(split: int) -> None:
    async with running_cluster() as cluster:
        _splits(cluster, split)
        cluster.has_room = lambda _: True
        first, second = cluster.decodes
        first.full = True
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert (first.wanted_room, second.wanted_room, len(first.decodes)) == ([True], [True], 0)
        assert len(cluster.prefill.prefills) == (split > 0)
        assert [place.exclude for place in cluster.places] == [(), ("d0",)]
        assert (job.attempt, job.losses, job.failed_instances, job.waited_s) == (1, [], [], 0.0)
        assert "full" in [decision.kind for decision in job.timeline.decisions]


@pytest.mark.parametrize("split", [0, 3, 5])
async def test_where_no_other_has_room_it_stays_and_waits_there(split: int) -> None:
    async with running_cluster() as cluster:
        _splits(cluster, split)
        cluster.has_room = lambda request: not request.exclude
        first, second = cluster.decodes
        first.full = second.full = True
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert (first.wanted_room, second.wanted_room) == ([True, False], [])


@pytest.mark.parametrize("split", [0, 5])
async def test_a_cluster_of_one_decode_instance_is_asked_once_and_no_patience_is_spent(split: int) -> None:
    async with running_cluster(patience_s=0.05) as cluster:
        _splits(cluster, split)
        cluster.has_room = lambda _: True
        cluster.decodes[1:] = []
        cluster.decodes[0].full = True
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert cluster.decodes[0].wanted_room == [True, False]
        assert job.waited_s == 0.0


@pytest.mark.parametrize("split", [0, 5])
async def test_a_route_without_a_promise_of_room_is_never_refused(split: int) -> None:
    async with running_cluster() as cluster:
        _splits(cluster, split)
        cluster.decodes[0].full = True
        job, _ = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert (cluster.decodes[0].wanted_room, cluster.decodes[1].wanted_room) == ([False], [])


async def test_one_that_moves_in_vain_waits_where_it_is_in_the_end() -> None:
    """Schedulers that expect room wherever there is none: the refusals have an end."""
    async with running_cluster() as cluster:
        _splits(cluster, 5)
        cluster.has_room = lambda _: True
        for decode in cluster.decodes:
            decode.full = True
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        first, second = (decode.wanted_room for decode in cluster.decodes)
        assert (first, second) == ([True, True], [True, False])


async def test_with_several_schedulers_the_decode_instance_is_told_what_will_come() -> None:
    async with running_cluster(second_scheduler=True) as cluster:
        _splits(cluster, 3)
        reached, go = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            reached.set()
            await go.wait()

        cluster.prefill.before_token = lambda _: hold()
        job, _ = make_job(PROMPT, 6)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.wait_for(reached.wait(), 5)
        async with asyncio.timeout(5):
            while not cluster.decodes[0].expected:
                await asyncio.sleep(0.005)
        (expected,) = cluster.decodes[0].expected
        assert (expected.transfer_id, 0.0 < expected.keep_s <= 600.0) == (job.transfer_id, True)
        mark = mark_of(job.spec.job_id)
        assert expected.promised == Promised(mark, 5, 4, import_tokens=3, prefill_tokens=2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.decodes[0].releases(1)  # it expects it no more
        assert cluster.decodes[0].released == [job.transfer_id]


async def test_a_single_scheduler_needs_no_announcements() -> None:
    async with running_cluster() as cluster:
        _splits(cluster, 3)
        job, _ = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert not cluster.decodes[0].expected


async def test_one_whose_first_token_is_late_lets_those_pass_that_may_be_in_time() -> None:
    """The large one finds no room, whoever comes; the others behind it in the line are placed meanwhile."""
    async with running_cluster() as cluster:
        room = asyncio.Event()
        plain = cluster.place

        async def place(request: PlaceRequest, call: ServerCall) -> Route:
            if request.job.job_id == "large" and not room.is_set():
                raise Delayed("no room", cause="room", retry_after_s=0.02)
            return await plain(request, call)

        await cluster.scheduler_down()
        cluster.place = place  # type: ignore[method-assign]
        await cluster.scheduler_up()
        lines = cluster.pipeline._queue
        late, _ = make_job(PROMPT, 4, job_id="large", came_s=-2.0)
        waits = asyncio.create_task(cluster.pipeline.run(late))
        await until(lambda: late.delays > 2)
        assert (lines.waiting("default"), lines.is_waiting("default")) == (1, False)
        others = [make_job(PROMPT, 4)[0] for _ in range(3)]
        async with asyncio.timeout(10):
            await asyncio.gather(*(cluster.pipeline.run(one) for one in others))
        assert not waits.done()
        room.set()
        await asyncio.wait_for(waits, 10)
        assert lines.waiting("default") == 0


async def test_one_that_may_be_in_time_keeps_its_place_before_those_behind_it() -> None:
    async with running_cluster() as cluster:
        room = asyncio.Event()
        plain = cluster.place

        async def place(request: PlaceRequest, call: ServerCall) -> Route:
            if not room.is_set():
                raise Delayed("no room", cause="room", retry_after_s=0.02)
            return await plain(request, call)

        await cluster.scheduler_down()
        cluster.place = place  # type: ignore[method-assign]
        await cluster.scheduler_up()
        jobs = [make_job(PROMPT, 4, job_id=f"j{number}", came_s=60.0)[0] for number in range(3)]  # there is time
        running = []
        for number, job in enumerate(jobs):
            running.append(asyncio.create_task(cluster.pipeline.run(job)))
            await until(lambda number=number: cluster.pipeline._queue.waiting("default") == number + 1)
        cluster.places.clear()
        room.set()
        async with asyncio.timeout(10):
            await asyncio.gather(*running)
        assert [one.job.job_id for one in cluster.places] == ["j0", "j1", "j2"]
