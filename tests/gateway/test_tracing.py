"""The gateway's spans of a job: one tree whatever happens to it, and of the HTTP request around it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from gateway.job import Job
from gateway.settings import GatewaySettings
from gateway.tracing import TRACE, RequestTrace, TracedRequests
from lab.bench.trace_collector import Collector, Seen, collecting
from services.worker.settings import WorkerSettings
from shared.errors import EngineFailed, PolyphaseError
from shared.runtime.otlp import Tracer
from shared.runtime.settings import Tracing
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


def below(spans: list[Seen], parent: str, which: int = 0) -> list[str]:
    """Names of the children of the span of that name, in order."""
    found = [span for span in spans if span.name == parent][which]
    return [span.name for span in spans if span.parent_id == found.span_id]


def named(spans: list[Seen], name: str) -> Seen:
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
    assert collector.spans == []


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
