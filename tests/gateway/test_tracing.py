"""The spans of a job: in its timeline, and as exported traces."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from benchmarks.traces import Collector, ReceivedSpan, collecting
from gateway.job import Job
from gateway.settings import GatewaySettings
from gateway.tracing import TRACE, RequestTrace, TracedRequests
from services.worker.settings import WorkerSettings
from shared.domain.kv import TransferOutcome, TransferReport
from shared.errors import EngineFailed, PolyphaseError, Unavailable
from shared.explain import explain
from shared.runtime.otlp import Tracer
from shared.runtime.settings import Tracing
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.messages import DecodeReply, PrefillReply, TokenStep
from tests.gateway.api import Api
from tests.gateway.cluster import PROMPT, Cluster, make_job, until

ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = f"00-{ID}-{PARENT}-01"
ROOT = "POST /v1/chat/completions"


class Traces:
    """A tracer, and the spans that it has exported."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.tracer = Tracer(Tracing(endpoint=collector.url), "gateway", "gateway-0", CollectorRegistry())

    def job(self) -> tuple[Job, RequestTrace]:
        job, _ = make_job(PROMPT, 6)
        root = self.tracer.root(CLIENT, "", ROOT, job.spec.arrived_s - 0.01, {})
        assert root is not None
        request = RequestTrace(root, "demo", "/v1/chat/completions", job.spec.arrived_s - 0.01)
        job.trace = request.open(job.spec.job_id, job.spec.arrived_s, 5, 6, "default", "uuid/\ud800" + "x" * 400)
        return job, request

    async def ended(self, job: Job, request: RequestTrace) -> None:
        request.root.end(job.timeline.ended_s, error=request.error)
        await self.tracer.close()

    @property
    def spans(self) -> list[ReceivedSpan]:
        return self.collector.of(ID)

    def below(self, parent: str, which: int = 0) -> list[str]:
        """Names of the children of the span of that name, in order."""
        span = [span for span in self.spans if span.name == parent][which]
        return [each.name for each in self.spans if each.parent_id == span.span_id]

    def named(self, name: str) -> ReceivedSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
async def traces() -> AsyncIterator[Traces]:
    with collecting() as collector:
        traces = Traces(collector)
        yield traces
        await traces.tracer.close()


async def test_the_spans_of_a_job_are_a_tree(cluster: Cluster, traces: Traces) -> None:
    job, request = traces.job()
    await cluster.pipeline.run(job)
    await traces.ended(job, request)
    assert traces.below(ROOT) == ["receive", "chat demo"]
    assert traces.below("chat demo") == ["intake", "attempt"]
    assert traces.below("attempt") == ["placement", "handover", "reply", "handover"]
    attempt, placement = traces.named("attempt"), traces.named("placement")
    sent = [each.trace for each in (*cluster.prefill.prefills, *cluster.decodes[0].decodes)]
    assert sent == [f"00-{ID}-{attempt.span_id}-01"] * 2
    assert [place.trace for place in cluster.places] == [f"00-{ID}-{placement.span_id}-01"]
    chat = traces.named("chat demo")
    attributes = {"usage.input_tokens": 5, "usage.output_tokens": 6, "response.finish_reasons": ["length"]}
    expected = {"polyphase.request.id": "uuid/?" + "x" * 250, **{f"gen_ai.{k}": v for k, v in attributes.items()}}
    assert expected.items() <= chat.attributes.items()
    assert chat.events["first_token"] == pytest.approx(job.timeline.first_token_s, abs=1e-6)
    assert not any(span.error for span in traces.spans)


async def test_a_lost_attempt_is_an_error_and_the_job_is_not(cluster: Cluster, traces: Traces) -> None:
    cluster.prefill.fail_once(EngineFailed("a bug that quotes the prompt"))
    job, request = traces.job()
    await cluster.pipeline.run(job)
    await traces.ended(job, request)
    assert traces.below("chat demo") == ["intake", "attempt", "attempt"]
    assert traces.below("attempt", 0) == ["placement", "lost"]
    assert traces.below("attempt", 1) == ["placement", "handover", "reply", "handover"]
    lost, chat = traces.named("lost"), traces.named("chat demo")
    assert lost.attributes == {"polyphase.instance.id": "p0", "error.type": EngineFailed.code}
    assert [span.error for span in (lost, *(s for s in traces.spans if s.name == "attempt"))] == [True, True, False]
    assert (chat.error, chat.attributes["polyphase.attempts"]) == (False, 2)
    assert not any(b"quotes the prompt" in body for body in traces.collector.bodies)


@pytest.mark.parametrize("cluster", [{"patience_s": 0.3}], indirect=True)
async def test_a_job_without_a_place_is_an_error_of_all_spans_above(cluster: Cluster, traces: Traces) -> None:
    cluster.decodes.clear()
    job, request = traces.job()
    with pytest.raises(PolyphaseError):
        await cluster.pipeline.run(job)
    await traces.ended(job, request)
    assert len(cluster.places) > 1
    assert traces.below("attempt") == ["placement"]
    assert {span.name for span in traces.spans if span.error} == {ROOT, "chat demo", "attempt", "placement"}


async def test_a_client_that_leaves_is_no_error(cluster: Cluster, traces: Traces) -> None:
    reached = cluster.prefill.hang_at(0)
    job, request = traces.job()
    running = cluster.starts(job)
    await asyncio.wait_for(reached.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await traces.ended(job, request)
    assert traces.named("chat demo").attributes["polyphase.outcome"] == "cancelled"
    assert not any(span.error for span in traces.spans)


async def serve(tracer: Tracer, path: str, status: int, sampled: str = "01") -> dict[str, Any]:
    """The scope that the application sees of a request."""
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(_: Any) -> None: ...

    traceparent = f"00-{ID}-{PARENT}-{sampled}".encode()
    headers = [(b"traceparent", traceparent), (b"tracestate", b"a=b"), (b"x-other", b"1")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "scheme": "http"}
    requests = TracedRequests(tracer, "demo", {"/v1/models"})
    await asyncio.create_task(requests.serve(app, scope, send, send))
    return seen


async def test_a_sampled_http_request_is_a_span(traces: Traces) -> None:
    unsampled = await serve(traces.tracer, "/v1/models", 200, "00")
    assert (TRACE in unsampled, len(unsampled["headers"])) == (False, 3)
    seen = await serve(traces.tracer, "/v1/models", 200)
    await serve(traces.tracer, "/of/some/client", 404)
    await serve(traces.tracer, "/v1/models", 503)
    await traces.tracer.close()
    assert seen["headers"] == [(b"x-other", b"1")]
    first, second, third = traces.spans
    assert (first.name, first.parent_id, first.state, first.error) == ("POST /v1/models", PARENT, "a=b", False)
    assert first.attributes["http.response.status_code"] == 200
    assert (second.name, second.error, "url.path" in second.attributes) == ("POST", False, False)
    assert (third.error, third.attributes["error.type"]) == (True, "503")


def test_traces_of_vllm_are_refused() -> None:
    with pytest.raises(ValidationError, match="use `tracing`"):
        GatewaySettings(schedulers=("tcp://a:1",), model="m", vllm_args={"otlp-traces-endpoint": "http://a:1"})
    required: dict[str, Any] = {"rpc_port": 1, "http_port": 2, "kv_port": 3, "monitor_url": "http://a"}
    required |= {"heartbeat_address": "tcp://a:1", "broadcast_address": "tcp://a:2", "instance_id": "p", "model": "m"}
    with pytest.raises(ValidationError, match="use `tracing`"):
        WorkerSettings(engine_args={"otlp_traces_endpoint": "x"}, **required)


# Timelines

TO_DECODE = "INTAKE PLACEMENT HANDOVER DECODE_QUEUE REPLY"
TO_PREFILL = "INTAKE PLACEMENT HANDOVER QUEUE PREFILL REPLY"


def names(spans: list[SpanRecord]) -> str:
    return " ".join(span.span.name for span in spans)


def until_first_token(timeline: RequestTimeline) -> list[SpanRecord]:
    """The spans before the first token. They leave no gap and do not overlap."""
    spans = [span for span in timeline.spans if span.started_s < timeline.first_token_s]
    assert spans[0].started_s == timeline.arrived_s
    assert all(one.ended_s == other.started_s for one, other in pairwise(spans))
    assert spans[-1].ended_s == pytest.approx(timeline.first_token_s, abs=1e-3)
    return spans


@pytest.mark.parametrize(
    ("carry", "split", "expected"),
    [
        (True, None, TO_PREFILL),
        (False, None, f"{TO_PREFILL} HANDOVER DECODE_QUEUE REPLY"),
        (False, 3, f"{TO_PREFILL} HANDOVER DECODE_QUEUE REPLY"),
        (True, 0, TO_DECODE),
    ],
)
async def test_spans_lead_from_arrival_to_the_first_token(
    cluster: Cluster, carry: bool, split: int | None, expected: str
) -> None:
    cluster.split = split
    job, _ = make_job(PROMPT, 6, carry=carry)
    job.timeline.arrived_s -= 0.5
    job.mark_s -= 0.5
    await cluster.pipeline.run(job)
    spans = until_first_token(job.timeline)
    assert names(spans) == expected
    assert spans[0].ended_s - spans[0].started_s >= 0.5
    if carry and split is None:
        assert names(job.timeline.spans[len(spans) :]) == "HANDOVER DECODE_QUEUE DECODE"


async def test_waits_and_lost_attempts_are_spans(cluster: Cluster) -> None:
    errors = [Unavailable("none")]
    cluster.no_room = lambda _: errors.pop() if errors else None
    cluster.prefill.fail_once(EngineFailed("a bug"))
    spans = until_first_token((await cluster.completes()).timeline)
    assert names(spans) == "INTAKE PLACEMENT LOST PLACEMENT HANDOVER QUEUE PREFILL REPLY"
    assert spans[1].ended_s - spans[1].started_s > 0.09
    assert [span.attempt for span in spans] == [1, 1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("carry", [True, False])
async def test_a_stop_string_leaves_the_same_spans(cluster: Cluster, carry: bool) -> None:
    cluster.decodes[0].hang_at(3)
    job, steps = make_job(PROMPT, 20, carry=carry)
    running = cluster.starts(job)
    await until(lambda: len(steps) >= 3 + carry)
    job.stop()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    until_first_token(job.timeline)
    assert names(job.timeline.spans[-2:]) == "DECODE_QUEUE DECODE"


@pytest.mark.parametrize("apart_s", [0.0, -3600.0, 0.004, 3600.0])
@pytest.mark.parametrize("carry", [True, False])
async def test_clocks_of_hosts_may_disagree(apart_s: float, carry: bool) -> None:
    """The instances' times by another clock: the same lengths, no gap, nothing outside the call."""
    job, _ = make_job(PROMPT, 6, carry=carry)
    job.attempt = 1
    began_s = job.spec.arrived_s
    job.record_until(Span.INTAKE, began_s)
    await asyncio.sleep(0.02)
    at = began_s + apart_s
    reply = PrefillReply([], None, None, queued_s=at + 0.002, started_s=at + 0.007, ended_s=at + 0.015)
    job.record_prefill("p0", reply)
    at = job.mark_s + apart_s
    await asyncio.sleep(0.02)
    job.accept(TokenStep([1], ""))
    await asyncio.sleep(0.02)
    transfer = TransferReport(TransferOutcome.PULLED, 5, 100, at + 0.004, at + 0.009)
    job.record_decode("d0", DecodeReply(transfer, at + 0.001, at + 0.015, at + 0.035))
    spans = job.timeline.spans
    of_decode = [span for span in spans if span.instance_id == "d0" and span.span is not Span.REPLY]
    assert names(of_decode) == "HANDOVER DECODE_QUEUE TRANSFER DECODE_QUEUE DECODE"
    length = {span.span: span.ended_s - span.started_s for span in reversed(spans) if span.instance_id}
    expected = {Span.QUEUE: 0.005, Span.PREFILL: 0.008, Span.TRANSFER: 0.005, Span.DECODE_QUEUE: 0.003}
    assert {span: length[span] for span in expected} == pytest.approx(expected, abs=1e-5)
    assert all(one.ended_s == other.started_s for one, other in pairwise(spans))
    assert spans[0].started_s == began_s
    assert spans[-1].ended_s <= time.time()
    (recorded,) = job.timeline.transfers
    assert recorded.ended_s - recorded.started_s == pytest.approx(0.005, abs=1e-5)


async def test_a_transfer_that_began_during_prefill_is_a_span_beside_it() -> None:
    job, _ = make_job(PROMPT, 6)
    start_s = job.mark_s = job.mark_s - 1.0
    job.record_until(Span.PREFILL, start_s + 0.05)
    transfer = TransferReport(TransferOutcome.PULLED, 5, 100, start_s + 0.02, start_s + 0.04)
    job.record_decode("d0", DecodeReply(transfer, start_s + 0.06, start_s + 0.07, start_s + 0.09))
    spans = job.timeline.spans
    assert names(spans) == "PREFILL HANDOVER TRANSFER DECODE_QUEUE DECODE"
    assert spans[2].started_s == start_s + 0.02
    others = [span for span in spans if span.span is not Span.TRANSFER]
    assert all(one.ended_s == other.started_s for one, other in pairwise(others))


async def test_a_wait_for_room_is_no_transfer() -> None:
    """The link takes no time, and the instance computes prompts for 0.7 s before it imports the KV."""
    job, _ = make_job(PROMPT, 6)
    start_s = job.timeline.arrived_s = job.mark_s = job.mark_s - 1.0
    job.record_until(Span.PREFILL, start_s + 0.05)
    transfer = TransferReport(TransferOutcome.PULLED, 5, 100, start_s + 0.76, start_s + 0.76)
    job.record_decode("d0", DecodeReply(transfer, start_s + 0.06, start_s + 0.84, start_s + 0.9))
    assert names(job.timeline.spans) == "PREFILL HANDOVER DECODE_QUEUE TRANSFER DECODE_QUEUE DECODE"
    lengths = [round(span.ended_s - span.started_s, 6) for span in job.timeline.spans]
    assert lengths == [0.05, 0.01, 0.7, 0.0, 0.08, 0.06]
    steps = [sentence.text for sentence in explain(job.timeline).steps]
    assert {"It waited 0.7 s for room for its KV on d0.", "It waited 80 ms for its first step on d0."} <= {*steps}
    assert not any("came to d0 within" in text for text in steps)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_spans_account_for_the_ttft_of_requests_to_the_api(api: Api) -> None:
    assert logging.getLogger().level <= logging.WARNING, "vLLM's imports have silenced our warnings"
    before_s = time.time()
    for request in (api.complete, api.chat):
        for _ in range(10):
            assert (await request(max_tokens=3)).status_code == 200
    missing = total = 0.0
    for report in await api.final_reports(20):
        assert report.ttft_s is not None
        assert report.arrived_s >= before_s
        total += report.ttft_s
        spans = until_first_token(report.timeline())
        missing += report.ttft_s - sum(span.ended_s - span.started_s for span in spans)
    assert abs(missing) < 0.02 * total
