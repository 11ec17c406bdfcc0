"""Spans by OpenTelemetry's SDK, exported by OTLP in a thread. Import this module only while tracing is on.

The provider is not the global one, so that libraries that look for a tracer find none.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.runtime.logs import get_log
from shared.runtime.settings import Tracing

log = get_log(__name__)


def _without_header(record: logging.LogRecord) -> bool:
    """Replace the SDK's message about a malformed header: it repeats the header, whose value is usually a secret."""
    record.msg, record.args = "OTEL_EXPORTER_OTLP_HEADERS: a header of it is no NAME=VALUE, and is not sent", ()
    return True


logging.getLogger("opentelemetry.util.re").addFilter(_without_header)
EXPORT_S = 5.0  # of a batch, retries included; then it is lost
PERIOD_S = 5.0  # between two batches, unless one is full before
BATCH_SPANS = 512
CLOSE_S = 2.0  # for the queued spans at the end
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
Kind = Literal["internal", "server", "client"]
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_NOTHING = Context()
_w3c = TraceContextTextMapPropagator()


class Trace:
    """A span that has begun, in this or another process, and the parent of further spans. Times are unix seconds."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: "Tracer", span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, _NOTHING)

    @property
    def trace_id(self) -> str:
        return format(self._span.get_span_context().trace_id, "032x")

    @property
    def wire(self) -> str:
        """The span for another process: a `traceparent`, and, if there is one, a space and the `tracestate`."""
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, self._context)
        return " ".join(carrier.values())

    def child(
        self, name: str, began_s: float, attributes: Attributes | None = None, kind: Kind = "internal"
    ) -> "Trace":
        return Trace(self._tracer, self._tracer.start(name, self._context, began_s, attributes, kind))

    def add(
        self,
        name: str,
        began_s: float,
        ended_s: float,
        attributes: Attributes | None = None,
        *,
        error: str = "",
        kind: Kind = "internal",
    ) -> None:
        """Add a finished child span. error: an error code, empty without an error."""
        span = self.child(name, began_s, attributes, kind)
        span.end(max(began_s, ended_s), error=error)

    def event(self, name: str, time_s: float, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, attributes, _ns(time_s))

    def end(self, ended_s: float, attributes: Attributes | None = None, *, error: str = "") -> None:
        """End the span. error: as in `add`."""
        if attributes:
            self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_ns(ended_s))


class Tracer:
    """Creates spans without waiting: they are queued, exported by a thread, and dropped when the queue is full.
    Failures of the collector raise no errors here.
    """

    def __init__(self, settings: Tracing, service: str, name: str, registry: CollectorRegistry) -> None:
        self._exporter = _Exporter(_otlp(settings.endpoint), settings.queue_spans)
        about = {
            "service.namespace": "polyphase",
            "service.name": f"polyphase-{service}",
            "service.instance.id": name,
            "service.version": version("polyphase"),
        }
        sampler = ParentBased(TraceIdRatioBased(settings.sample))
        self._provider = TracerProvider(sampler, Resource.create(about), shutdown_on_exit=False, id_generator=_Ids())
        self._provider.add_span_processor(
            _Processor(
                self._exporter,
                max_queue_size=settings.queue_spans,
                schedule_delay_millis=PERIOD_S * 1e3,
                max_export_batch_size=min(BATCH_SPANS, settings.queue_spans),
            )
        )
        self._tracer = self._provider.get_tracer("polyphase")
        self.counts = self._exporter.counts
        registry.register(_Counts(self.counts))

    def root(
        self, traceparent: str, tracestate: str, name: str, began_s: float, attributes: Attributes
    ) -> Trace | None:
        """Begin a request's first span here, a child of its client's span; None if it is not sampled."""
        span = self.start(name, _parsed(traceparent, tracestate), began_s, attributes, "server")
        return Trace(self, span) if span.is_recording() else None

    def remote(self, wire: str) -> Trace | None:
        """A span of another process, by its `Trace.wire`; None for other text."""
        traceparent, _, tracestate = wire.partition(" ")
        span = get_current_span(_parsed(traceparent, tracestate))
        return Trace(self, span) if span.get_span_context().is_valid else None

    def start(self, name: str, parent: Context, began_s: float, attributes: Attributes | None, kind: Kind) -> Span:
        return self._tracer.start_span(name, parent, _KINDS[kind], attributes, start_time=_ns(began_s))

    async def close(self) -> None:
        """Export the queued spans, for at most `CLOSE_S`."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down() -> None:  # in a thread of its own: a collector that does not read blocks it
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, daemon=True, name="last spans").start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await done.wait()
        except TimeoutError:
            self._exporter.give_up()
        if self._exporter.waiting:
            log.warning("spans are lost: the collector did not accept them in time", spans=self._exporter.waiting)


class _Ids(IdGenerator):
    """Ids from a generator of their own: engines seed the interpreter's generator, all with the same seed."""

    def __init__(self) -> None:
        self._random = random.Random()

    def generate_span_id(self) -> int:
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self._random.getrandbits(128) or 1


class _Exporter(SpanExporter):
    """Exports by another exporter, and counts the outcomes of spans.

    `counts` has one writer for each key: the loop's thread for "dropped", the exporting one for "exported" and
    "failed".
    """

    def __init__(self, inner: SpanExporter, most: int) -> None:
        self._inner = inner
        self._most = most
        self._taken = 0
        self._given_up = False
        self.counts = {"exported": 0, "failed": 0, "dropped": 0}

    @property
    def waiting(self) -> int:
        return self._taken - self.counts["exported"] - self.counts["failed"]

    def has_room(self) -> bool:
        """Whether one more span may be queued; otherwise it is counted as dropped."""
        if self.waiting >= self._most:
            self.counts["dropped"] += 1
            return False
        self._taken += 1
        return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        done = SpanExportResult.FAILURE if self._given_up else self._inner.export(spans)
        self.counts["exported" if done is SpanExportResult.SUCCESS else "failed"] += len(spans)
        return done

    def give_up(self) -> None:
        self._given_up = True
        self._inner.shutdown()

    def shutdown(self) -> None:
        if not self._given_up:
            self._inner.shutdown()


class _Processor(BatchSpanProcessor):
    """A processor whose queue does not overflow: the SDK would drop the oldest spans without counting them."""

    def __init__(
        self, exporter: _Exporter, *, max_queue_size: int, schedule_delay_millis: float, max_export_batch_size: int
    ) -> None:
        super().__init__(exporter, max_queue_size, schedule_delay_millis, max_export_batch_size)
        self._counted = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled and self._counted.has_room():
            super().on_end(span)


class _Counts(Collector):
    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "Spans of requests by what became of them; dropped: too many waited."
        family = CounterMetricFamily("polyphase_trace_spans", text, labels=["outcome"])
        for outcome, count in self._counts.items():
            family.add_metric([outcome], float(count))
        yield family


def _otlp(endpoint: str) -> SpanExporter:
    scheme, where = endpoint.split("://", 1)
    if scheme.startswith("grpc"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=where, insecure=scheme == "grpc", timeout=EXPORT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    path = "" if urlsplit(endpoint).path.strip("/") else "/v1/traces"
    return Http(endpoint=endpoint.rstrip("/") + path, timeout=EXPORT_S)


def _parsed(traceparent: str, tracestate: str) -> Context:
    return _w3c.extract({"traceparent": traceparent, "tracestate": tracestate}, _NOTHING)


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)
