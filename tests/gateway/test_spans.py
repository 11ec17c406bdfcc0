"""Where a request's time went: from its arrival to its first token no moment is in no stretch, and none in two."""

import asyncio
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.job import Job
from shared.domain.kv import TransferOutcome, TransferReport
from shared.errors import EngineFailed
from shared.explain import explain
from shared.timeline import RequestTimeline, Span, SpanRecord, clock_shift_s
from shared.wire.messages import DecodeReply, PrefillReply, TokenStep
from tests.gateway.api import Api
from tests.gateway.cluster import Cluster, make_job, running_cluster

PROMPT = [5, 6, 7, 8, 9]
CARRIED = [Span.INTAKE, Span.PLACEMENT, Span.HANDOVER, Span.QUEUE, Span.PREFILL, Span.REPLY]


def until_first_token(timeline: RequestTimeline) -> list[SpanRecord]:
    """The stretches in which the first token was waited for, in order. Fails where they leave a gap or overlap."""
    found = [span for span in timeline.spans if span.started_s < timeline.first_token_s]
    assert found[0].started_s == timeline.arrived_s
    for one, other in pairwise(found):
        assert one.ended_s == other.started_s, (one, other)
    assert found[-1].ended_s == pytest.approx(timeline.first_token_s, abs=1e-3)
    return found


async def run(cluster: Cluster, *, carry: bool = True, arrived_before_s: float = 0.0) -> Job:
    job, _ = make_job(PROMPT, 6, carry=carry)
    job.timeline.arrived_s -= arrived_before_s
    job.mark_s -= arrived_before_s
    await cluster.pipeline.run(job)
    return job


async def test_a_carried_job() -> None:
    async with running_cluster() as cluster:
        job = await run(cluster, arrived_before_s=0.5)
        found = until_first_token(job.timeline)
        assert [span.span for span in found] == CARRIED
        assert found[0].ended_s - found[0].started_s >= 0.5
        rest = [span.span for span in job.timeline.spans[len(found) :]]
        assert rest == [Span.HANDOVER, Span.DECODE_QUEUE, Span.DECODE]


@pytest.mark.parametrize("split", [None, 3])
async def test_a_job_whose_first_token_comes_from_decode(split: int | None) -> None:
    async with running_cluster() as cluster:
        cluster.split = lambda _: split
        job = await run(cluster, carry=False)
        assert [span.span for span in until_first_token(job.timeline)] == [
            *CARRIED,
            Span.HANDOVER,
            Span.DECODE_QUEUE,
            Span.REPLY,
        ]


async def test_a_job_without_prefill_instance() -> None:
    async with running_cluster() as cluster:
        cluster.split = lambda _: 0
        job = await run(cluster)
        assert [span.span for span in until_first_token(job.timeline)] == [
            Span.INTAKE,
            Span.PLACEMENT,
            Span.HANDOVER,
            Span.DECODE_QUEUE,
            Span.REPLY,
        ]


async def test_waits_and_lost_attempts_are_in_it() -> None:
    async with running_cluster() as cluster:
        decodes, prefill = list(cluster.decodes), cluster.prefill
        cluster.decodes.clear()

        def fail(_: int) -> None:
            prefill.before_token = None
            raise EngineFailed("a bug")

        prefill.before_token = fail
        job, _ = make_job(PROMPT, 6)
        task = asyncio.create_task(cluster.pipeline.run(job))
        async with asyncio.timeout(5):
            while len(cluster.places) < 2:
                await asyncio.sleep(0.005)
        cluster.decodes += decodes
        await task
        found = until_first_token(job.timeline)
        assert [span.span for span in found] == [Span.INTAKE, Span.PLACEMENT, Span.LOST, *CARRIED[1:]]
        assert found[1].ended_s - found[1].started_s > 0.09
        assert [span.attempt for span in found] == [1, 1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("carry", [True, False])
async def test_a_stop_string_leaves_the_same_stretches(carry: bool) -> None:
    async with running_cluster() as cluster:
        decode = cluster.decodes[0]
        decode.before_token = lambda count: asyncio.sleep(0) if count < 3 else asyncio.Event().wait()
        job, steps = make_job(PROMPT, 20, carry=carry)
        task = asyncio.create_task(cluster.pipeline.run(job))
        async with asyncio.timeout(5):
            while len(steps) < 3 + carry:
                await asyncio.sleep(0.005)
        job.stop()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until_first_token(job.timeline)
        assert [span.span for span in job.timeline.spans[-2:]] == [Span.DECODE_QUEUE, Span.DECODE]


@pytest.mark.parametrize("apart_s", [0.0, -3600.0, 0.004, 3600.0])
@pytest.mark.parametrize("carry", [True, False])
async def test_hosts_whose_clocks_disagree(apart_s: float, carry: bool) -> None:
    """The instances' times by another clock: the same lengths, no gap, nothing outside the call."""
    job, _ = make_job(PROMPT, 6, carry=carry)
    job.attempt = 1
    began_s = job.spec.arrived_s
    job.record_until(Span.INTAKE, began_s)
    await asyncio.sleep(0.02)
    theirs_s = began_s + apart_s
    prefilled = PrefillReply(
        [], None, None, queued_s=theirs_s + 0.002, started_s=theirs_s + 0.007, ended_s=theirs_s + 0.015
    )
    job.record_prefill("p0", prefilled)
    called_s = job.mark_s
    await asyncio.sleep(0.02)
    job.accept(TokenStep([1], ""))
    await asyncio.sleep(0.02)
    theirs_s = called_s + apart_s
    transfer = TransferReport(TransferOutcome.PULLED, 5, 100, theirs_s + 0.004, theirs_s + 0.009)
    job.record_decode("d0", DecodeReply(transfer, theirs_s + 0.001, theirs_s + 0.015, theirs_s + 0.035))
    of_decode = [span.span for span in job.timeline.spans if span.instance_id == "d0" and span.span is not Span.REPLY]
    assert of_decode == [Span.HANDOVER, Span.DECODE_QUEUE, Span.TRANSFER, Span.DECODE_QUEUE, Span.DECODE]
    length = {span.span: span.ended_s - span.started_s for span in job.timeline.spans if span.instance_id}
    assert length[Span.QUEUE] == pytest.approx(0.005, abs=1e-5)
    assert length[Span.PREFILL] == pytest.approx(0.008, abs=1e-5)
    assert length[Span.TRANSFER] == pytest.approx(0.005, abs=1e-5)
    for_room = next(span for span in job.timeline.spans if span.span is Span.DECODE_QUEUE)
    assert for_room.ended_s - for_room.started_s == pytest.approx(0.003, abs=1e-5)
    for one, other in pairwise(job.timeline.spans):
        assert one.ended_s == other.started_s
    assert job.timeline.spans[0].started_s == began_s
    assert job.timeline.spans[-1].ended_s <= time.time()
    assert job.timeline.transfers[0].ended_s - job.timeline.transfers[0].started_s == pytest.approx(0.005, abs=1e-5)


async def test_a_transfer_that_began_during_prefill_runs_beside_it() -> None:
    job, _ = make_job(PROMPT, 6)
    start_s = job.mark_s
    job.record_until(Span.PREFILL, start_s + 0.05)
    await asyncio.sleep(0.1)
    transfer = TransferReport(TransferOutcome.PULLED, 5, 100, start_s + 0.02, start_s + 0.04)
    job.record_decode("d0", DecodeReply(transfer, start_s + 0.06, start_s + 0.07, start_s + 0.09))
    kinds = [span.span for span in job.timeline.spans]
    assert kinds == [Span.PREFILL, Span.HANDOVER, Span.TRANSFER, Span.DECODE_QUEUE, Span.DECODE]
    assert job.timeline.spans[2].started_s == start_s + 0.02
    others = [span for span in job.timeline.spans if span.span is not Span.TRANSFER]
    assert all(one.ended_s == other.started_s for one, other in pairwise(others))


async def test_a_wait_for_room_is_no_transfer() -> None:
    """A link that takes no time, and an instance that computes prompts for 0.7 s before it takes the KV in."""
    job, _ = make_job(PROMPT, 6)
    start_s = job.mark_s - 1.0
    job.timeline.arrived_s = job.mark_s = start_s
    job.record_until(Span.PREFILL, start_s + 0.05)
    transfer = TransferReport(TransferOutcome.PULLED, 5, 100, start_s + 0.76, start_s + 0.76)
    job.record_decode("d0", DecodeReply(transfer, start_s + 0.06, start_s + 0.84, start_s + 0.9))
    assert [(span.span, round(span.ended_s - span.started_s, 6)) for span in job.timeline.spans] == [
        (Span.PREFILL, 0.05),
        (Span.HANDOVER, 0.01),
        (Span.DECODE_QUEUE, 0.7),
        (Span.TRANSFER, 0.0),
        (Span.DECODE_QUEUE, 0.08),
        (Span.DECODE, 0.06),
    ]
    told = [sentence.text for sentence in explain(job.timeline).steps]
    assert "It waited 0.7 s for room for its KV on d0." in told
    assert "It waited 80 ms for its first step on d0." in told
    assert not any("came to d0 within" in text for text in told)


times = st.floats(0, 1e6, allow_nan=False)


@given(called_s=times, took_s=times, first_s=times, length_s=times)
def test_a_shift_is_the_least_that_helps(called_s: float, took_s: float, first_s: float, length_s: float) -> None:
    replied_s, last_s = called_s + took_s, first_s + length_s
    shift_s = clock_shift_s(first_s, last_s, called_s, replied_s)
    assert first_s + shift_s >= called_s - 1e-6
    if length_s <= took_s:
        assert last_s + shift_s <= replied_s + 1e-6
    if called_s <= first_s and last_s <= replied_s:
        assert shift_s == 0.0


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_through_the_api_nothing_is_unaccounted_for(api: Api) -> None:
    before_s = time.time()
    for ask in (api.complete, api.chat):
        for _ in range(10):
            assert (await ask(max_tokens=3)).status_code == 200
    missing = total = 0.0
    for report in await api.final_reports(20):
        assert report.timeline is not None
        assert report.ttft_s is not None
        assert report.arrived_s >= before_s
        found = until_first_token(report.timeline)
        total += report.ttft_s
        missing += report.ttft_s - sum(span.ended_s - span.started_s for span in found)
    assert abs(missing) < 0.02 * total
