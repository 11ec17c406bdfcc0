"""A collector of spans for benches and tests: OTLP over HTTP, as protobuf, in memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A received span. Times are unix seconds. state: its `tracestate`. events: when each was, by name."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    began_s: float
    ended_s: float
    error: bool
    state: str
    attributes: dict[str, Any]
    events: dict[str, float]


@dataclass
class Collector:
    """Received bodies of requests. status: HTTP status of the answers."""

    url: str = ""
    status: int = 200
    bodies: list[bytes] = field(default_factory=list)

    def by_trace(self) -> dict[str, list[ReceivedSpan]]:
        """The spans of each trace, in the order of their beginnings."""
        found: dict[str, list[ReceivedSpan]] = {}
        for body in list(self.bodies):
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _values(group.resource.attributes)
                for span in (span for scope in group.scope_spans for span in scope.spans):
                    found.setdefault(span.trace_id.hex(), []).append(_span(span, resource))
        return {trace_id: sorted(spans, key=lambda span: span.began_s) for trace_id, spans in found.items()}

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return self.by_trace().get(trace_id, [])


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own, in threads."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.status == 200:
                collector.bodies.append(body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")  # an empty message is an answer without faults
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _span(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        resource.get("service.name", ""),
        resource.get("service.instance.id", ""),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        KINDS.get(span.kind, ""),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.status.code == 2,
        span.trace_state,
        _values(span.attributes),
        {event.name: event.time_unix_nano / 1e9 for event in span.events},
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
