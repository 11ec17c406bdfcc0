"""A stream whose KV blocks were taken back: it goes on elsewhere where that is clearly sooner, with each token once."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from gateway.job import MAX_PAUSES, Job
from shared.domain.job import Phase
from shared.domain.prompt import unpacked
from shared.errors import Stays
from shared.explain import explain
from shared.timeline import Span
from shared.wire.messages import Pause, TokenStep
from tests.gateway.api import until
from tests.gateway.cluster import make_job, running_cluster, tokens_of
from tests.gateway.worker import Worker, answer

PROMPT = [5, 6, 7, 8, 9]


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
