"""The spans of a job: in its timeline, and as exported traces."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from benchmarks.traces import Collector, ReceivedSpan, collecting
from gateway.job import Job
from gateway.settings import GatewaySettings
from gateway.tracing import TRACE, RequestTrace, TracedRequests
from services.worker.settings import WorkerSettings
from shared.domain.kv import TransferOutcome, TransferReport
from shared.errors import EngineFailed, PolyphaseError
from shared.explain import explain
from shared.runtime.otlp import Tracer
from shared.runtime.settings import Tracing
from shared.timeline import RequestTimeline, Span, SpanRecord, clock_shift_s
from shared.wire.messages import DecodeReply, PrefillReply, TokenStep
from tests.gateway.api import Api
from tests.gateway.cluster import Cluster, make_job, running_cluster

ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = f"00-{ID}-{PARENT}-01"


@asynccontextmanager
async def collected() -> AsyncIterator[tuple[Tracer, Collector]]:
    """A tracer; at the end of the block all its spans have come."""
    with collecting() as collector:
        tracer = Tracer(Tracing(endpoint=collector.url), "gateway", "gateway-0", CollectorRegistry())
        try:
            yield tracer, collector
        finally:
            await tracer.close()


def traced_job(tracer: Tracer, *, carry: bool = True) -> tuple[Job, RequestTrace]:
    job, _ = make_job([5, 6, 7, 8, 9], 6, carry=carry)
    root = tracer.root(CLIENT, "", "POST /v1/chat/completions", job.spec.arrived_s - 0.01, {})
    assert root is not None
    request = RequestTrace(root, "demo", "/v1/chat/completions", job.spec.arrived_s - 0.01)
    job.trace = request.open(job.spec.job_id, job.spec.arrived_s, 5, 6, "default", "uuid/\ud800" + "x" * 400)
    return job, request


def below(spans: list[ReceivedSpan], parent: str, which: int = 0) -> list[str]:
    """Names of the children of the span of that name, in order."""
    found = [span for span in spans if span.name == parent][which]
    return [span.name for span in spans if span.parent_id == found.span_id]


def named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


async def test_a_job_is_a_tree() -> None:
    async with collected() as (tracer, collector), running_cluster() as cluster:
        job, request = traced_job(tracer)
        await cluster.pipeline.run(job)
        request.root.end(job.timeline.ended_s)
    spans = collector.of(ID)
    assert below(spans, "POST /v1/chat/completions") == ["receive", "chat demo"]
    assert below(spans, "chat demo") == ["intake", "attempt"]
    assert below(spans, "attempt") == ["placement", "handover", "reply", "handover"]
    attempt, placement = named(spans, "attempt"), named(spans, "placement")
    for request_ in (*cluster.prefill.prefills, *cluster.decodes[0].decodes):
        assert request_.trace == f"00-{ID}-{attempt.span_id}-01"
    assert [place.trace for place in cluster.places] == [f"00-{ID}-{placement.span_id}-01"]
    chat = named(spans, "chat demo")
    assert chat.attributes["polyphase.request.id"] == "uuid/?" + "x" * 250
    assert chat.attributes["gen_ai.usage.input_tokens"] == 5
    assert chat.attributes["gen_ai.usage.output_tokens"] == 6
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert chat.events["first_token"] == pytest.approx(job.timeline.first_token_s, abs=1e-6)
    assert not any(span.error for span in spans)


async def test_a_lost_attempt_and_the_next_one() -> None:
    async with collected() as (tracer, collector), running_cluster() as cluster:
        prefill = cluster.prefill

        def fail(_: int) -> None:
            prefill.before_token = None
            raise EngineFailed("a bug that quotes the prompt")

        prefill.before_token = fail
        job, request = traced_job(tracer)
        await cluster.pipeline.run(job)
        request.root.end(job.timeline.ended_s)
    spans = collector.of(ID)
    assert below(spans, "chat demo") == ["intake", "attempt", "attempt"]
    assert below(spans, "attempt", 0) == ["placement", "lost"]
    assert below(spans, "attempt", 1) == ["placement", "handover", "reply", "handover"]
    lost = named(spans, "lost")
    assert lost.error
    assert lost.attributes == {"polyphase.instance.id": "p0", "error.type": EngineFailed.code}
    assert [span.error for span in spans if span.name == "attempt"] == [True, False]
    assert not named(spans, "chat demo").error
    assert named(spans, "chat demo").attributes["polyphase.attempts"] == 2
    assert not any(b"quotes the prompt" in body for body in collector.bodies)


async def test_no_place_is_an_error_of_all_above_it() -> None:
    async with collected() as (tracer, collector), running_cluster(patience_s=0.3) as cluster:
        cluster.decodes.clear()
        job, request = traced_job(tracer)
        with pytest.raises(PolyphaseError):
            await cluster.pipeline.run(job)
        request.root.end(job.timeline.ended_s, error=request.error)
    spans = collector.of(ID)
    assert len(cluster.places) > 1
    assert below(spans, "attempt") == ["placement"]
    errors = {span.name for span in spans if span.error}
    assert errors == {"POST /v1/chat/completions", "chat demo", "attempt", "placement"}


async def test_a_client_that_leaves_is_no_error() -> None:
    async with collected() as (tracer, collector), running_cluster() as cluster:
        cluster.prefill.before_token = lambda _: asyncio.Event().wait()
        job, request = traced_job(tracer)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await _until_prefill(cluster)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        request.root.end(job.timeline.ended_s, error=request.error)
    spans = collector.of(ID)
    assert named(spans, "chat demo").attributes["polyphase.outcome"] == "cancelled"
    assert not any(span.error for span in spans)


async def _until_prefill(cluster: Cluster) -> None:
    async with asyncio.timeout(5):
        while not cluster.prefill.prefills:
            await asyncio.sleep(0.005)


async def serve(tracer: Tracer, path: str, status: int, traceparent: str = CLIENT) -> dict[str, Any]:
    """One request, and the scope that the application saw."""
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(_: Any) -> None:
        """Nothing."""

    headers = [(b"traceparent", traceparent.encode()), (b"tracestate", b"a=b"), (b"x-other", b"1")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "scheme": "http"}
    await TracedRequests(tracer, "demo", {"/v1/models"}).serve(app, scope, send, send)  # type: ignore[arg-type]
    return seen


async def test_http_requests() -> None:
    async with collected() as (tracer, collector):
        seen = await asyncio.create_task(serve(tracer, "/v1/models", 200))
        await asyncio.create_task(serve(tracer, "/of/some/client", 404))
        await asyncio.create_task(serve(tracer, "/v1/models", 503))
    assert seen["headers"] == [(b"x-other", b"1")]
    first, second, third = collector.of(ID)
    assert (first.name, first.parent_id, first.state, first.error) == ("POST /v1/models", PARENT, "a=b", False)
    assert first.attributes["http.response.status_code"] == 200
    assert (second.name, second.error) == ("POST", False)
    assert "url.path" not in second.attributes
    assert (third.error, third.attributes["error.type"]) == (True, "503")


async def test_what_is_not_sampled_passes_untouched() -> None:
    async with collected() as (tracer, collector):
        seen = await asyncio.create_task(serve(tracer, "/v1/models", 200, f"00-{ID}-{PARENT}-00"))
    assert TRACE not in seen
    assert len(seen["headers"]) == 3
    assert collector.bodies == []


def test_traces_of_vllm_beside_ours_are_refused() -> None:
    with pytest.raises(ValidationError, match="use `tracing`"):
        GatewaySettings(schedulers=("tcp://a:1",), model="m", vllm_args={"otlp-traces-endpoint": "http://a:1"})
    ports = {"rpc_port": 1, "http_port": 2, "kv_port": 3}
    urls = {"monitor_url": "http://a", "heartbeat_address": "tcp://a:1", "broadcast_address": "tcp://a:2"}
    with pytest.raises(ValidationError, match="use `tracing`"):
        WorkerSettings(instance_id="p", model="m", engine_args={"otlp_traces_endpoint": "x"}, **ports, **urls)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_the_api_says_its_warnings(api: Api) -> None:
    """vLLM's imports have the root logger say nothing below an error."""
    assert logging.getLogger().level <= logging.WARNING


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
