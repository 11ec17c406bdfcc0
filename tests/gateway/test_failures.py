"""Failures of attempts: patience without an instance, losses, instances without room, and moves of paused jobs."""

import asyncio
import signal
from itertools import pairwise
from typing import Any

import pytest

from gateway.job import MAX_PAUSES, Job
from shared.domain.instance import Promised
from shared.domain.job import Loss, Phase
from shared.domain.prompt import unpacked
from shared.errors import Busy, Delayed, EngineFailed, InstancesLost, Stays, Unavailable, WrongRole
from shared.explain import explain
from shared.policy.ledger import mark_of
from shared.timeline import Span
from shared.wire.messages import Pause, PlaceRequest, TokenStep
from tests.gateway.cluster import PROMPT, Cluster, answer, make_job, running_cluster, tokens_of, until
from tests.gateway.processes import remote_worker
from tests.patience import paused_s


def with_settings(**changes: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cluster", [changes], indirect=True)


# Patience


@with_settings(patience_s=0.4)
@pytest.mark.parametrize(
    "case", ["no instance", "an instance starts", "no dispatch", "decode drains", "decode is busy", "prefill drains"]
)
async def test_a_job_without_an_instance_ends_within_its_patience(cluster: Cluster, case: str) -> None:
    match case:
        case "no instance":
            cluster.decodes.clear()
        case "an instance starts":
            cluster.decodes.clear()
            cluster.no_route = Busy("one is starting")
        case "no dispatch":
            cluster.prefill.dispatches = False
            cluster.prefill.before_token = lambda _: cluster.decodes.clear()
        case "prefill drains":
            cluster.prefill.refuse = WrongRole("draining")
        case _:
            for decode in cluster.decodes:
                decode.refuse = WrongRole("draining") if "drains" in case else Busy("full")
    job, steps = make_job(PROMPT, 5)
    with pytest.raises(Unavailable, match="no instance took the job") as caught:
        await cluster.pipeline.run(job)
    assert (caught.value.http_status, bool(caught.value.retry_after_s), job.phase) == (503, True, Phase.FAILED)
    assert len(steps) <= 1
    assert job.waited_s - paused_s() < 1.5, "it has spent its patience of 0.4 s more than once"
    assert case == "prefill drains" or job.attempt == 1
    if "instance" not in case and case != "prefill drains":
        assert len(cluster.prefill.prefills) == 1, "each decode instance was offered the same KV"
        await cluster.prefill.releases(1)
    if case == "no dispatch":
        assert not cluster.excluded


@pytest.mark.parametrize("late", [False, True])
async def test_a_prefill_instance_without_a_dispatch_leaves_it_to_the_scheduler(cluster: Cluster, late: bool) -> None:
    """late: there is a decode instance only after two requests for one."""
    cluster.prefill.dispatches = False
    decodes, places = list(cluster.decodes), cluster.places
    if late:
        cluster.prefill.before_token = lambda _: cluster.decodes.clear()
        cluster.no_room = lambda _: cluster.decodes.extend(decodes) if len(places) == 4 else None
    job = await cluster.completes()
    assert (len(cluster.prefill.prefills), cluster.excluded) == (1, set())
    assert [request.job.local_only for request in places] == [False] + [True] * (3 if late else 1)
    assert cluster.decodes[0].decodes[0].handle.transfer_id == job.transfer_id
    assert [decision.kind for decision in job.timeline.decisions] == ["placement", "dispatch"]


@with_settings(patience_s=60.0, attempts=1)
async def test_waiting_for_an_instance_that_is_gone_costs_patience_and_no_attempt(cluster: Cluster) -> None:
    await cluster.prefill.stop()
    job, steps = make_job(PROMPT, 5)
    running = cluster.starts(job)
    await until(lambda: job.waited_s >= 1.0, 20)
    await cluster.prefill.start()
    await asyncio.wait_for(running, 20)
    assert tokens_of(steps) == answer(PROMPT, 5)
    assert job.waited_s == 0.0, "a token renews the patience"


# Losses


@with_settings(attempts=2)
@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_only_the_instance_of_the_failed_call_is_excluded(cluster: Cluster, name: str) -> None:
    (cluster.prefill if name == "p0" else cluster.decodes[0]).fail_once(EngineFailed("a bug"))
    await cluster.completes()
    assert cluster.excluded == {name}


@pytest.mark.parametrize(("carry", "token", "most"), [(True, 0, 4), (True, 1, 4), (False, 0, 2), (False, 1, 2)])
async def test_a_request_that_kills_its_instances_is_refused_after_few(
    cluster: Cluster, carry: bool, token: int, most: int
) -> None:
    """A carried job gets a token from each prefill, so that no two of its losses are at the same token."""
    lost = cluster.lose_decodes_at(token)
    job, steps = make_job(PROMPT, 60, carry=carry)
    with pytest.raises(InstancesLost, match=r"d0, d1"):
        await cluster.pipeline.run(job)
    assert (len(lost), job.attempt, set(lost), job.phase) == (most, most, {"d0", "d1"}, Phase.FAILED)
    assert tokens_of(steps) == answer(PROMPT, len(job.tokens))
    report = await cluster.last_report()
    assert report.outcome == InstancesLost.code
    assert [loss.instance_id for loss in report.losses] == lost


@pytest.mark.parametrize(("instances", "losses"), [(2, 2), (1, 4)])
async def test_two_instances_lost_at_one_token_are_enough_but_not_one(
    cluster: Cluster, instances: int, losses: int
) -> None:
    """The whole prompt is computed where it decodes: no token comes between the losses."""
    cluster.split = 0
    del cluster.decodes[instances:]
    lost = cluster.lose_decodes_at(0)
    error, message = (InstancesLost, "at output token 0") if instances == 2 else (EngineFailed, "the instance died")
    with pytest.raises(error, match=message):
        await cluster.completes(60)
    assert lost == ["d0", "d1", "d0", "d0"][:2] if instances == 2 else ["d0"] * losses


@with_settings(loss_forgiven_tokens=10)
@pytest.mark.parametrize("carry", [True, False])
async def test_a_long_answer_survives_many_losses_that_are_far_apart(cluster: Cluster, carry: bool) -> None:
    lost: list[int] = []

    def before(count: int) -> None:
        if len(lost) < 6 and count == (12 if carry else 12 * (len(lost) + 1)):
            lost.append(count)
            raise EngineFailed("the instance died")

    for worker in cluster.decodes:
        worker.before_token = before
    job = await cluster.completes(100, carry=carry)
    assert len(lost) == len(job.losses) == 6


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


# Instances that die or freeze without a message

SIGNALS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
TOKENS = 400  # 20 s on the instance that is lost; those that take its jobs over need no time for a token


@SIGNALS
@pytest.mark.parametrize("case", ["carried", "repeated", "the last instance"])
async def test_a_decode_instance_that_dies_or_freezes(number: signal.Signals, case: str) -> None:
    last = case == "the last instance"
    async with running_cluster(patience_s=0.5) as cluster, remote_worker("d9", cluster.sockets) as remote:
        cluster.decodes.insert(0, remote)
        if last:
            del cluster.decodes[1:]
        job, steps = make_job(PROMPT, TOKENS, carry=case != "repeated")
        running = cluster.starts(job)
        await until(lambda: len(steps) > 5)
        remote.process.send_signal(number)
        if last:
            cluster.decodes.clear()
            with pytest.raises(Unavailable):
                await asyncio.wait_for(running, 20)
        else:
            await asyncio.wait_for(running, 20)
            assert (job.attempt, len(cluster.decodes[1].decodes)) == (2, 1)
        assert tokens_of(steps) == answer(PROMPT, len(steps) if last else TOKENS)
        await until(lambda: cluster.prefill.prefills[0].transfer_id in cluster.prefill.released)


@SIGNALS
async def test_a_prefill_instance_that_dies_or_freezes(number: signal.Signals) -> None:
    async with running_cluster() as cluster, remote_worker("p9", cluster.sockets) as remote:
        well, cluster.prefill = cluster.prefill, remote
        remote.process.send_signal(number)
        running = asyncio.create_task(cluster.completes())
        await until(lambda: cluster.places)
        cluster.prefill = well
        await running
        assert cluster.places[-1].exclude == ("p9",)


# Decode instances without room


@pytest.mark.parametrize(
    ("split", "full", "room", "wanted"),
    [
        *((split, "d0", "anywhere", ([True], [True])) for split in (0, 3, 5)),  # the other has room
        *((split, "d0 d1", "d0", ([True, False], [])) for split in (0, 3, 5)),  # none has: it waits where it is
        (0, "d0", "", ([False], [])),  # a route that promises no room is never refused
        (5, "d0", "", ([False], [])),
        (5, "d0 d1", "anywhere", ([True, True], [True, False])),  # wrong promises: the refusals have an end
    ],
)
async def test_a_job_goes_where_there_is_room_and_nothing_is_computed_twice(
    cluster: Cluster, split: int, full: str, room: str, wanted: tuple[list[bool], list[bool]]
) -> None:
    cluster.binds, cluster.split = True, split
    cluster.has_room = lambda request: room == "anywhere" or (room == "d0" and not request.exclude)
    for decode in cluster.decodes:
        decode.full = decode.name in full
    job = await cluster.completes()
    assert tuple(decode.wanted_room for decode in cluster.decodes) == wanted
    assert len(cluster.prefill.prefills) == (split > 0)
    assert (job.attempt, job.losses, job.failed_instances, job.waited_s) == (1, [], [], 0.0)
    kinds = [decision.kind for decision in job.timeline.decisions]
    assert ("full" in kinds) == bool(room)
    if split and room == "anywhere":  # what an instance has fetched is released where the job leaves it
        assert all(set(decode.released) == {job.transfer_id} for decode in cluster.decodes if decode.full)


async def test_a_whole_job_without_room_goes_to_a_prefill_instance_in_the_same_attempt(cluster: Cluster) -> None:
    def prefill_elsewhere(request: PlaceRequest) -> None:
        cluster.split = 5 if request.exclude else 0

    cluster.binds, cluster.no_room, cluster.has_room = True, prefill_elsewhere, lambda _: True
    cluster.decodes[0].full = True
    job = await cluster.completes()
    assert [decode.wanted_room for decode in cluster.decodes] == [[True], [True]]
    assert len(cluster.prefill.prefills) == 1
    assert (job.attempt, job.losses, job.failed_instances, job.waited_s) == (1, [], [], 0.0)


@with_settings(patience_s=0.05)
@pytest.mark.parametrize("split", [0, 5])
async def test_the_only_decode_instance_is_asked_for_room_once(cluster: Cluster, split: int) -> None:
    cluster.binds, cluster.split = True, split
    cluster.has_room = lambda _: True
    del cluster.decodes[1:]
    cluster.decodes[0].full = True
    assert (await cluster.completes()).waited_s == 0.0
    assert cluster.decodes[0].wanted_room == [True, False]


@pytest.mark.parametrize("cluster", [{"second_scheduler": True}, {}], indirect=True, ids=["two schedulers", "one"])
async def test_with_several_schedulers_the_decode_instance_gets_an_announcement(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    cluster.binds, cluster.split = True, 3
    decode, reached = cluster.decodes[0], cluster.prefill.hang_at(0)
    job, _ = make_job(PROMPT, 6)
    running = cluster.starts(job)
    await asyncio.wait_for(reached.wait(), 20)
    if "two" in request.node.name:
        await until(lambda: decode.expected)
        (expected,) = decode.expected
        assert (expected.transfer_id, 0.0 < expected.keep_s <= 600.0) == (job.transfer_id, True)
        assert expected.promised == Promised(mark_of(job.spec.job_id), 5, 4, import_tokens=3, prefill_tokens=2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await cluster.prefill.releases(1)
    if "two" in request.node.name:
        await decode.releases(1)
    assert len(decode.expected) == len(decode.released) == ("two" in request.node.name)


async def test_a_late_job_lets_jobs_pass_that_may_be_in_time(cluster: Cluster) -> None:
    """The large one finds no room; the others behind it in the queue are placed meanwhile."""
    full, queue = [Delayed("no room", cause="room", retry_after_s=0.02)], cluster.pipeline._queue
    cluster.no_room = lambda request: full[0] if full and request.job.job_id == "large" else None
    late, _ = make_job(PROMPT, 4, job_id="large", age_s=2.0)
    waits = cluster.starts(late)
    await until(lambda: late.delays > 2)
    assert (queue.waiting("default"), queue.is_waiting("default")) == (1, False)
    await asyncio.gather(*(cluster.completes(4) for _ in range(3)))
    assert not waits.done()
    full.clear()
    await asyncio.wait_for(waits, 20)
    assert queue.waiting("default") == 0


async def test_a_job_that_may_be_in_time_keeps_its_place_in_the_queue(cluster: Cluster) -> None:
    full = [Delayed("no room", cause="room", retry_after_s=0.02)]
    cluster.no_room = lambda _: full[0] if full else None
    running = []
    for number in range(3):
        running.append(asyncio.create_task(cluster.completes(4, job_id=f"j{number}", age_s=-60.0)))
        await until(lambda: cluster.pipeline._queue.waiting("default") == len(running))
    cluster.places.clear()
    full.clear()
    await asyncio.gather(*running)
    assert [place.job.job_id for place in cluster.places] == ["j0", "j1", "j2"]


# Moves of paused jobs


@with_settings(attempts=1, losses_at_one_token=1)
@pytest.mark.parametrize("split", [None, 3, 0])
async def test_a_paused_stream_continues_elsewhere_and_loses_nothing(cluster: Cluster, split: int | None) -> None:
    cluster.split = split
    first, second = cluster.decodes
    first.pause_at(4, Pause(5.0))
    job = await cluster.completes(12)
    await asyncio.wait_for(first.cancelled.wait(), 20)
    given = 4 + (split is None)  # the prefill instance gave one
    place, *_ = [place for place in cluster.places if place.job.pause_s]
    assert (place.job.pause_s, place.job.started, place.exclude) == (5.0, True, ("d0",))
    assert (place.job.prompt_tokens, place.job.max_tokens) == (len(PROMPT) + given, 12 - given)
    (decode,) = second.decodes
    assert unpacked(decode.prompt)[: len(PROMPT) + given] == PROMPT + answer(PROMPT, given)
    if split is None:
        assert cluster.prefill.prefills[1].exclude == ("d0",), "for its dispatcher"
        moves = [decision.chosen for decision in job.timeline.decisions if decision.kind == "move"]
        assert moves == [""], "the prefill instance is to name the decode instance"
    assert (job.moves, job.losses, job.failed_instances, job.phase) == (1, [], [], Phase.COMPLETED)
    spans = [(span.span, span.instance_id, span.attempt) for span in job.timeline.spans]
    paused = spans.index((Span.PAUSED, "d0", 1))
    assert spans[paused - 1][:2] in ((Span.DECODE, "d0"), (Span.REPLY, "d0"))
    assert spans[paused + 1][2] == 2
    assert (Span.LOST, "d0", 1) not in spans
    explained = explain(job.timeline)
    assert explained.headline.endswith("; moved once because it was paused.")
    assert any(": its KV memory there was taken back" in step.text for step in explained.steps)
    assert not (await cluster.last_report()).losses


async def test_a_pause_of_a_job_that_stays_is_a_span_of_its_own(cluster: Cluster) -> None:
    cluster.no_move = Stays("it stays")
    worker, (job, steps) = cluster.decodes[0], make_job(PROMPT, 12)

    async def before(count: int) -> None:
        if count == 4:
            worker.calls[-1].send(TokenStep([], pause=Pause(5.0)))
            await cluster.on_pause.wait()
            worker.calls[-1].send(TokenStep([], pause=Pause(0.2, computing=True)))
            await until(lambda: job.call.paused is not None and job.call.paused.computed_s)
        if count == 5:
            await until(lambda: len(job.tokens) == 6)

    worker.before_token = before
    await cluster.pipeline.run(job)
    assert tokens_of(steps) == answer(PROMPT, 12)
    assert len(steps) == 12, "the report of a pause is no step of the answer"
    assert (job.moves, len(worker.decodes), cluster.decodes[1].decodes) == (0, 1, [])
    kinds = [span.span for span in job.timeline.spans]
    at = kinds.index(Span.PAUSED)
    assert kinds[at - 1 : at + 3] == [Span.DECODE, Span.PAUSED, Span.RECOMPUTED, Span.DECODE]
    assert all(one.ended_s == other.started_s for one, other in pairwise(job.timeline.spans[at - 1 : at + 3]))
    assert any(step.text.startswith("d0 computed its tokens again in ") for step in explain(job.timeline).steps)


async def test_a_token_that_comes_before_the_move_keeps_the_job_where_it_is(cluster: Cluster) -> None:
    may_move = cluster.may_move = asyncio.Event()
    worker, (job, steps) = cluster.decodes[0], make_job(PROMPT, 12)

    async def before(count: int) -> None:
        if count == 4:
            worker.calls[-1].send(TokenStep([], pause=Pause(5.0)))
            await cluster.on_pause.wait()
        if count == 6:
            await until(lambda: len(job.tokens) == 7)
            may_move.set()
            async with asyncio.timeout(20):
                while not any(report.output_tokens == 7 for report in cluster.reports):
                    await cluster.reporter.flush()
                    await asyncio.sleep(0.005)

    worker.before_token = before
    await cluster.pipeline.run(job)
    assert tokens_of(steps) == answer(PROMPT, 12)
    assert (job.moves, cluster.decodes[1].decodes) == (0, [])
    report = next(report for report in cluster.reports if report.output_tokens == 7)
    assert report.phase is Phase.DECODE, "the scheduler learns that the job did not use the place"


@pytest.mark.parametrize(
    ("cluster", "case"),
    [
        ({}, "not carried"),
        ({}, "local only"),
        ({"moves": 0}, "no moves"),
        ({}, "short pause"),
        ({}, "computed already"),
    ],
    indirect=["cluster"],
)
async def test_a_job_that_cannot_be_carried_or_need_not_move_stays(cluster: Cluster, case: str) -> None:
    job, steps = make_job(PROMPT, 8, carry=case != "not carried", local_only=case == "local only")
    pause = Pause(0.01 if case == "short pause" else 5.0, computing=case == "computed already")

    async def paused() -> None:
        if not pause.computing:  # such a report alone begins no pause
            await until(lambda: job.call.paused is not None)

    cluster.decodes[0].pause_at(3, pause, then=paused)
    await cluster.pipeline.run(job)
    assert tokens_of(steps) == answer(PROMPT, 8)
    assert not any(place.job.pause_s for place in cluster.places)
    assert not cluster.decodes[1].decodes


@with_settings(moves=2)
async def test_a_job_moves_at_most_so_many_times(cluster: Cluster) -> None:
    end, (first, second) = asyncio.Event(), cluster.decodes
    for worker in cluster.decodes:
        worker.pause_at(2, Pause(5.0), then=end.wait)
    job, steps = make_job(PROMPT, 30)
    running = cluster.starts(job)
    await until(lambda: len(first.decodes) == 2 and job.call.paused is not None)
    end.set()
    await asyncio.wait_for(running, 20)
    assert tokens_of(steps) == answer(PROMPT, 30)
    assert (job.moves, len(first.decodes), len(second.decodes), job.losses) == (2, 2, 1, [])


async def test_a_lost_instance_after_a_move_costs_one_loss(cluster: Cluster) -> None:
    first, second = cluster.decodes
    first.pause_at(3, Pause(5.0))

    def before(count: int) -> None:
        if count == 3:
            first.before_token = None
            raise EngineFailed("the instance died")

    second.before_token = before
    job = await cluster.completes(12)
    assert (job.moves, [loss.instance_id for loss in job.losses]) == (1, ["d1"])
    assert cluster.places[-1].exclude == ("d1",), "the instance where it was paused is no worse than others now"


def paused_job(steps: list[TokenStep]) -> Job:
    job, _ = make_job(PROMPT, 10_000)
    job.begin_attempt()
    for step in steps:
        job.accept(step)
    job.record_at_engine(Span.DECODE, job.timeline.last_token_s + 1.0, "d0")
    return job


def test_many_pauses_leave_a_timeline_of_bounded_length() -> None:
    job = paused_job([TokenStep([], pause=Pause(1.0)), TokenStep([7])] * (3 * MAX_PAUSES))
    kinds = [span.span for span in job.timeline.spans]
    assert kinds.count(Span.PAUSED) == MAX_PAUSES
    assert len(kinds) <= 2 * MAX_PAUSES + 1


def test_a_timeline_of_pauses_has_no_gap() -> None:
    pause, computing = TokenStep([], pause=Pause(1.0)), TokenStep([], pause=Pause(0.1, computing=True))
    job = paused_job([TokenStep([1]), pause, TokenStep([2]), pause, computing, TokenStep([2])])
    kinds = ["DECODE", "PAUSED", "DECODE", "PAUSED", "RECOMPUTED", "DECODE"]
    assert [span.span.name for span in job.timeline.spans] == kinds
    assert all(one.ended_s == other.started_s for one, other in pairwise(job.timeline.spans))
