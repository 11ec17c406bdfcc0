"""A collector of spans: OTLP over HTTP, as protobuf, in memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True, slots=True)
class Seen:
    """A received span. Times are unix seconds."""

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
    """Received spans; bodies are parsed on first use. status: HTTP status of its answers."""

    url: str = ""
    status: int = 200
    bodies: list[bytes] = field(default_factory=list)
    _spans: list[Seen] = field(default_factory=list)
    _read: int = 0  # bodies

    @property
    def spans(self) -> list[Seen]:
        while self._read < len(self.bodies):
            self._spans += _spans_of(self.bodies[self._read])
            self._read += 1
        return self._spans

    def by_trace(self) -> dict[str, list[Seen]]:
        """Spans by the id of their trace."""
        found: dict[str, list[Seen]] = {}
        for span in self.spans:
            found.setdefault(span.trace_id, []).append(span)
        return found

    def of(self, trace_id: str) -> list[Seen]:
        """Spans of one trace, as they began."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.began_s)


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
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

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


def _spans_of(body: bytes) -> Iterator[Seen]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = _values(group.resource.attributes)
        for scope in group.scope_spans:
            yield from (_seen(span, about) for span in scope.spans)


def _seen(span: Any, about: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        about.get("service.name", ""),
        about.get("service.instance.id", ""),
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
