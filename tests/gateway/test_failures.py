"""Failures of attempts: patience without an instance, losses, instances without room, and moves of paused jobs."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from gateway.job import MAX_PAUSES, Job
from shared.domain.instance import Promised
from shared.domain.job import Loss, Phase
from shared.domain.prompt import unpacked
from shared.domain.route import Route
from shared.errors import Busy, Delayed, EngineFailed, InstancesLost, PolyphaseError, Stays, Unavailable, WrongRole
from shared.explain import explain
from shared.policy.ledger import mark_of
from shared.timeline import Span
from shared.wire.messages import Pause, PlaceRequest, TokenStep
from shared.wire.rpc_server import ServerCall
from tests.gateway.api import until
from tests.gateway.cluster import Cluster, make_job, running_cluster, tokens_of
from tests.gateway.worker import Worker, answer

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


def _says(worker: Worker, count: int, *pauses: Pause, then: Callable[[], Awaitable[object]]) -> None:
    """Before its `count`-th token of each decode the worker says that the job is paused, and waits for `then`."""

    async def before(number: int) -> None:
        if number == count:
            for pause in pauses:
                worker.calls[-1].send(TokenStep([], pause=pause))
            await then()

    worker.before_token = before


def _paused(worker: Worker, count: int, expected_s: float = 5.0) -> None:
    """For ever, as long as the job stays."""
    _says(worker, count, Pause(expected_s), then=asyncio.Event().wait)


def _moves(job: Job) -> list[str]:
    return [decision.chosen for decision in job.timeline.decisions if decision.kind == "move"]


@pytest.mark.parametrize("split", [None, 3, 0])
async def test_a_paused_stream_goes_on_elsewhere_and_loses_nothing(split: int | None) -> None:
    async with running_cluster(attempts=1, losses_at_one_token=1) as cluster:
        cluster.split = lambda _: split
        _paused(cluster.decodes[0], 4)
        job, steps = make_job(PROMPT, 12)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 12)
        assert job.phase is Phase.COMPLETED
        await asyncio.wait_for(cluster.decodes[0].cancelled.wait(), 5)
        given = 4 + (split is None)  # the prefill instance gave one
        asked, *_ = [place for place in cluster.places if place.job.pause_s]
        assert asked.job.pause_s == 5.0
        assert asked.job.started
        assert asked.exclude == ("d0",)
        assert (asked.job.prompt_tokens, asked.job.max_tokens) == (len(PROMPT) + given, 12 - given)
        (second,) = cluster.decodes[1].decodes
        assert unpacked(second.prompt)[: len(PROMPT) + given] == PROMPT + answer(PROMPT, given)
        if split is None:
            assert cluster.prefill.prefills[1].exclude == ("d0",), "for its dispatcher"


async def test_a_move_is_no_loss_and_its_timeline_says_what_happened() -> None:
    async with running_cluster() as cluster:
        _paused(cluster.decodes[0], 4)
        job, _ = make_job(PROMPT, 12)
        await cluster.pipeline.run(job)
        assert (job.moves, job.losses, job.failed_instances) == (1, [], [])
        assert _moves(job) == [""], "the prefill instance is to name the decode instance"
        stretches = [(span.span, span.instance_id, span.attempt) for span in job.timeline.spans]
        paused = stretches.index((Span.PAUSED, "d0", 1))
        assert stretches[paused - 1] == (Span.DECODE, "d0", 1)
        assert stretches[paused + 1][2] == 2
        assert (Span.LOST, "d0", 1) not in stretches
        told = explain(job.timeline)
        assert told.headline.endswith("; moved once because it was paused.")
        assert any(
            one.text.startswith("It left d0 after 5 tokens: its KV memory there was taken back") for one in told.steps
        )
        await cluster.reporter.flush()
        await until(lambda: bool(cluster.reports) and cluster.reports[-1].phase.final)
        assert not cluster.reports[-1].losses


async def test_one_that_stays_has_its_pause_as_a_stretch_of_its_own() -> None:
    async with running_cluster() as cluster:
        cluster.no_move = Stays("it stays")
        asked = cluster.on_pause
        worker = cluster.decodes[0]
        job, steps = make_job(PROMPT, 12)

        async def before(count: int) -> None:
            if count == 4:
                worker.calls[-1].send(TokenStep([], pause=Pause(5.0)))
                await asked.wait()
                worker.calls[-1].send(TokenStep([], pause=Pause(0.2, computing=True)))
                await until(lambda: job.call.paused is not None and bool(job.call.paused.computed_s))
            if count == 5:
                await until(lambda: len(job.tokens) == 6)

        worker.before_token = before
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 12)
        assert len(steps) == 12, "a word of a pause is no step of the answer"
        assert (job.moves, len(worker.decodes), cluster.decodes[1].decodes) == (0, 1, [])
        spans = job.timeline.spans
        kinds = [span.span for span in spans]
        at = kinds.index(Span.PAUSED)
        assert kinds[at - 1 : at + 3] == [Span.DECODE, Span.PAUSED, Span.RECOMPUTED, Span.DECODE]
        for one, other in zip(spans[at - 1 : at + 2], spans[at : at + 3], strict=True):
            assert one.ended_s == other.started_s
            assert one.started_s <= one.ended_s
        texts = [one.text for one in explain(job.timeline).steps]
        assert any(text.startswith("d0 computed its tokens again in ") for text in texts)


async def test_a_token_that_comes_while_a_place_is_looked_for_keeps_the_job_where_it_is() -> None:
    async with running_cluster() as cluster:
        may_answer = cluster.may_answer = asyncio.Event()
        worker = cluster.decodes[0]

        async def until_asked(count: int) -> None:
            if count == 4:
                worker.calls[-1].send(TokenStep([], pause=Pause(5.0)))
                await cluster.on_pause.wait()
            if count == 6:
                await until(lambda: len(job.tokens) == 7)
                may_answer.set()
                async with asyncio.timeout(5):
                    while not any(report.output_tokens == 7 for report in cluster.reports):
                        await cluster.reporter.flush()
                        await asyncio.sleep(0.005)

        worker.before_token = until_asked
        job, steps = make_job(PROMPT, 12)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 12)
        assert (job.moves, cluster.decodes[1].decodes) == (0, [])
        there = [report for report in cluster.reports if report.output_tokens == 7]
        assert there[0].phase is Phase.DECODE, "the scheduler hears that it did not take the place"


@pytest.mark.parametrize("case", ["no carry", "prompt logprobs", "moves: 0", "a short pause", "computed already"])
async def test_one_that_cannot_be_carried_or_need_not_stays(case: str) -> None:
    async with running_cluster(**({"moves": 0} if case == "moves: 0" else {})) as cluster:
        job, steps = make_job(PROMPT, 8, carry=case != "no carry", local_only=case == "prompt logprobs")
        pause = Pause(0.01 if case == "a short pause" else 5.0, computing=case == "computed already")

        async def heard() -> None:
            if not pause.computing:  # such a word alone begins no pause
                await until(lambda: job.call.paused is not None)

        _says(cluster.decodes[0], 3, pause, then=heard)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 8)
        assert not any(place.job.pause_s for place in cluster.places)
        assert not cluster.decodes[1].decodes


async def test_it_moves_at_most_so_many_times() -> None:
    async with running_cluster(moves=2) as cluster:
        end = asyncio.Event()
        for worker in cluster.decodes:
            _says(worker, 2, Pause(5.0), then=end.wait)
        job, steps = make_job(PROMPT, 30)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await until(lambda: len(cluster.decodes[0].decodes) == 2 and job.call.paused is not None)
        end.set()
        await asyncio.wait_for(task, 10)
        assert tokens_of(steps) == answer(PROMPT, 30)
        assert job.moves == 2
        assert [len(worker.decodes) for worker in cluster.decodes] == [2, 1]
        assert not job.losses


async def test_a_lost_instance_after_a_move_costs_one_loss() -> None:
    async with running_cluster() as cluster:
        _paused(cluster.decodes[0], 3)
        lost = cluster.decodes[1]

        async def die() -> None:
            asyncio.get_running_loop().create_task(lost.stop())
            await asyncio.Event().wait()

        def before(count: int) -> object:
            if count == 3:
                cluster.decodes[0].before_token = None
                return die()
            return asyncio.sleep(0)

        lost.before_token = before
        job, steps = make_job(PROMPT, 12)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 12)
        assert (job.moves, len(job.losses)) == (1, 1)
        assert job.losses[0].instance_id == "d1"
        assert cluster.places[-1].exclude == ("d1",), "where it was paused is no worse than other places now"


async def test_many_pauses_leave_a_timeline_of_bounded_length() -> None:
    job, _ = make_job(PROMPT, 10_000)
    job.begin_attempt()
    for _ in range(3 * MAX_PAUSES):
        job.accept(TokenStep([], pause=Pause(1.0)))
        job.accept(TokenStep([7]))
    job.record_at_engine(Span.DECODE, job.timeline.last_token_s, "d0")
    kinds = [span.span for span in job.timeline.spans]
    assert kinds.count(Span.PAUSED) == MAX_PAUSES
    assert len(kinds) <= 2 * MAX_PAUSES + 1


def test_a_timeline_of_pauses_has_no_gap() -> None:
    job, _ = make_job(PROMPT, 20)
    job.begin_attempt()
    job.accept(TokenStep([1]))
    for computing in (False, True):
        job.accept(TokenStep([], pause=Pause(1.0)))
        if computing:
            job.accept(TokenStep([], pause=Pause(0.1, computing=True)))
        job.accept(TokenStep([2]))
    job.record_at_engine(Span.DECODE, job.timeline.last_token_s + 1.0, "d0")
    spans = job.timeline.spans
    assert [span.span for span in spans] == [
        Span.DECODE,
        Span.PAUSED,
        Span.DECODE,
        Span.PAUSED,
        Span.RECOMPUTED,
        Span.DECODE,
    ]
    assert all(one.ended_s == other.started_s for one, other in pairwise(spans))
