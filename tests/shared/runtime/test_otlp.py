"""Spans reach a collector, and one that is away, slow or refuses costs nothing but spans."""

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from benchmarks.traces import Collector, collecting
from shared.runtime.otlp import CLOSE_S, Tracer
from shared.runtime.settings import Tracing
from shared.runtime.tracing import tracing
from tests.ports import free_port

ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def make(url: str, sample: float = 1.0, queue_spans: int = 512) -> tuple[Tracer, CollectorRegistry]:
    registry = CollectorRegistry()
    settings = Tracing(endpoint=url, sample=sample, queue_spans=queue_spans)
    return Tracer(settings, "test", "test-0", registry), registry


def counted(registry: CollectorRegistry) -> dict[str, int]:
    found = {o: registry.get_sample_value("polyphase_trace_spans_total", {"outcome": o}) for o in _OUTCOMES}
    return {outcome: int(count) for outcome, count in found.items() if count is not None}


_OUTCOMES = ("exported", "failed", "dropped")


@pytest.mark.parametrize("headers", ["authorization planted", "authorization: Bearer planted"])
async def test_a_header_that_cannot_be_sent_is_told_and_not_repeated(
    collector: Collector, headers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    tracer, _ = make(collector.url)
    await tracer.close()
    assert "OTEL_EXPORTER_OTLP_HEADERS: a header of it is no NAME=VALUE" in caplog.text
    assert "planted" not in caplog.text


async def test_a_collector_that_is_away_is_named_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    tracer, registry = make(f"http://user:planted@127.0.0.1:{free_port()}")
    root = tracer.root("", "", "POST /x", 10.0, {})
    assert root is not None
    root.end(11.0)
    await tracer.close()
    assert counted(registry)["exported"] == 0
    assert "planted" not in caplog.text


async def test_a_clients_trace_goes_on_in_two_processes(collector: Collector) -> None:
    gateway, registry = make(collector.url)
    worker, _ = make(collector.url)
    root = gateway.root(
        f"00-{ID}-{PARENT}-01", "vendor=one,other=two", "POST /x", 10.0, {"http.request.method": "POST"}
    )
    assert root is not None
    there = worker.remote(root.wire)
    assert there is not None
    there.add("prefill", 10.1, 10.2, {"polyphase.chunks": 2}, error="engine_failed")
    root.end(11.0)
    await gateway.close()
    await worker.close()
    first, second = collector.of(ID)
    assert (first.name, first.parent_id, first.kind, first.error) == ("POST /x", PARENT, "server", False)
    assert (second.name, second.parent_id, second.error) == ("prefill", first.span_id, True)
    assert {span.state for span in (first, second)} == {"vendor=one,other=two"}
    assert (second.began_s, second.ended_s) == pytest.approx((10.1, 10.2))
    assert second.attributes == {"polyphase.chunks": 2, "error.type": "engine_failed"}
    assert (first.service, first.instance) == ("polyphase-test", "test-0")
    assert counted(registry) == {"exported": 1, "failed": 0, "dropped": 0}


@pytest.mark.parametrize(
    ("traceparent", "sample", "kept"),
    [
        ("", 1.0, True),
        ("", 0.0, False),
        (f"00-{ID}-{PARENT}-00", 1.0, False),
        (f"00-{ID}-{PARENT}-01", 0.0, True),
        ("garbage", 1.0, True),
        (f"00-{'0' * 32}-{PARENT}-01", 0.0, False),
    ],
)
async def test_the_client_decides_and_without_one_the_share(traceparent: str, sample: float, kept: bool) -> None:
    tracer, _ = make("http://127.0.0.1:9", sample)
    root = tracer.root(traceparent, "", "x", 1.0, {})
    assert (root is not None) is kept
    await tracer.close()


async def test_a_tenth_is_about_a_tenth() -> None:
    tracer, _ = make("http://127.0.0.1:9", 0.1)
    kept = sum(tracer.root("", "", "x", 1.0, {}) is not None for _ in range(3000))
    assert 200 < kept < 400
    await tracer.close()


@pytest.mark.parametrize("wire", ["", "garbage", f"00-{ID}", "00-00-00-00"])
async def test_what_is_no_trace_is_none(wire: str) -> None:
    tracer, _ = make("http://127.0.0.1:9")
    assert tracer.remote(wire) is None
    await tracer.close()


async def test_a_collector_that_takes_nothing_costs_spans_and_no_time() -> None:
    """It accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer, registry = make(f"http://127.0.0.1:{silent.getsockname()[1]}")
        root = tracer.root("", "", "x", 1.0, {})
        assert root is not None
        began = time.perf_counter()
        for _ in range(3000):
            root.add("y", 1.0, 2.0)
        assert time.perf_counter() - began < 20.0
        assert counted(registry) == {"exported": 0, "failed": 0, "dropped": 3000 - 512}
        loop = asyncio.get_running_loop()
        began = loop.time()
        await tracer.close()
        assert loop.time() - began < CLOSE_S + 2.5


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_nobody_there_ends_soon(scheme: str) -> None:
    tracer, registry = make(f"{scheme}://127.0.0.1:{free_port()}")
    root = tracer.root("", "", "x", 1.0, {})
    assert root is not None
    root.end(2.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await tracer.close()
    assert loop.time() - began < CLOSE_S + 2.5
    assert counted(registry)["exported"] == 0


async def test_what_a_collector_refuses_is_counted(collector: Collector) -> None:
    collector.status = 400
    tracer, registry = make(collector.url)
    root = tracer.root("", "", "x", 1.0, {})
    assert root is not None
    root.end(2.0)
    await tracer.close()
    assert counted(registry) == {"exported": 0, "failed": 1, "dropped": 0}


async def test_ids_are_unlike_where_engines_have_seeded_alike(collector: Collector) -> None:
    for _ in range(2):
        tracer, _ = make(collector.url)
        random.seed(0)
        root = tracer.root("", "", "x", 1.0, {})
        assert root is not None
        root.end(2.0)
        await tracer.close()
    traces = collector.by_trace()
    assert len(traces) == len({span.span_id for spans in traces.values() for span in spans}) == 2


async def test_by_grpc() -> None:
    came: list[Any] = []

    class Service(TraceServiceServicer):
        def Export(self, request: Any, _: Any) -> ExportTraceServiceResponse:
            came.extend(span for group in request.resource_spans for one in group.scope_spans for span in one.spans)
            return ExportTraceServiceResponse()

    server, port = grpc.server(ThreadPoolExecutor(1)), free_port()
    add_TraceServiceServicer_to_server(Service(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    tracer, registry = make(f"grpc://127.0.0.1:{port}")
    root = tracer.root(f"00-{ID}-{PARENT}-01", "", "x", 1.0, {})
    assert root is not None
    root.end(2.0)
    await tracer.close()
    server.stop(0).wait()
    assert [(span.name, span.trace_id.hex()) for span in came] == [("x", ID)]
    assert counted(registry)["exported"] == 1


async def test_the_loop_goes_on_while_it_closes() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer, _ = make(f"http://127.0.0.1:{silent.getsockname()[1]}")
        root = tracer.root("", "", "x", 1.0, {})
        assert root is not None
        root.end(2.0)
        async with asyncio.TaskGroup() as group:
            turning = group.create_task(turn())
            await tracer.close()
            turning.cancel()
    assert turns > 50


async def test_off_is_none() -> None:
    async with tracing(None, "test", "test-0", CollectorRegistry()) as tracer:
        assert tracer is None


def test_off_imports_nothing_of_it() -> None:
    """In a scheduler, in an instance that is emulated, and by what is ours of a gateway."""
    code = (
        "import sys, gateway.edge, gateway.pipeline, gateway.tracing\n"
        "import services.global_scheduler.app, services.worker.app, services.worker.engines.emulated\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'grpc'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "bad", [{"endpoint": "collector:4318"}, {"endpoint": "http://a:1", "sample": 2}, {"endpoint": ""}]
)
def test_bad_settings(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Tracing.model_validate(bad)
