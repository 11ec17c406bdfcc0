"""`polyphase bench traces`: completeness and cost of traces.

Two suites that differ only in tracing take the same load in turns. A collector in this process receives the spans (OTLP
over HTTP, as protobuf); each trace must form one tree, and the time to first token that no span covers is reported.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster_files import emulated
from benchmarks.measuring import cpu_s, port_of
from benchmarks.results import Result, at_most, in_turns, result
from benchmarks.suite import started
from services.launcher.up import RunningSuite
from tools.client import CHAT, Json, chat_body, run_load

HOST = "127.0.0.1"
REQUESTS, BLOCK, STREAMS, WARM = 5000, 250, 4, 64
TOKENS = 8
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
QUEUE_SPANS = 8192
AIM_UNEXPLAINED, AIM_CPU_RATIO = 0.03, 1.3
SETTLE_S, QUIET_S = 30.0, 7.0  # of the collector, after the load
PARENTS = ("attempt", "chat ", "text_completion ", "POST ")  # spans that contain others and explain nothing
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
    attributes: Json
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


def _span(span: Any, resource: Json) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=resource.get("service.name", ""),
        instance=resource.get("service.instance.id", ""),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=KINDS.get(span.kind, ""),
        began_s=span.start_time_unix_nano / 1e9,
        ended_s=span.end_time_unix_nano / 1e9,
        error=span.status.code == 2,
        state=span.trace_state,
        attributes=_values(span.attributes),
        events={event.name: event.time_unix_nano / 1e9 for event in span.events},
    )


def _values(pairs: Any) -> Json:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


@dataclass(frozen=True, slots=True)
class Wait:
    """TTFT of a request since its first byte, and the part of it that no span explains, in seconds."""

    ttft_s: float
    unexplained_s: float


def faults(spans: Sequence[ReceivedSpan], client: str = "") -> list[str]:
    """Why the spans are not one tree below the span `client`; empty if they are."""
    ids = Counter(span.span_id for span in spans)
    found = [f"{count} spans are {span_id}" for span_id, count in ids.items() if count > 1]
    if len({span.trace_id for span in spans}) != 1:
        found.append("more than one trace")
    roots = [span.name for span in spans if span.parent_id == client]
    if len(roots) != 1:
        found.append(f"roots: {roots}")
    orphans = [span.name for span in spans if span.parent_id not in ids and span.parent_id != client]
    return found + [f"{name} has no parent" for name in orphans]


def wait(spans: Sequence[ReceivedSpan]) -> Wait | None:
    """The wait of a request with one job; None if it has no first token."""
    first_token_s = next((span.events["first_token"] for span in spans if "first_token" in span.events), 0.0)
    if not first_token_s:
        return None
    began_s = min(span.began_s for span in spans if span.kind == "server" and span.service.endswith("gateway"))
    unexplained_s, at_s = 0.0, began_s
    for span in sorted(spans, key=lambda span: span.began_s):
        if span.name.startswith(PARENTS) or span.began_s >= first_token_s:
            continue
        unexplained_s += max(0.0, span.began_s - at_s)
        at_s = max(at_s, span.ended_s)
    return Wait(first_token_s - began_s, unexplained_s + max(0.0, first_token_s - at_s))


def run_traces_bench(requests: int = REQUESTS) -> Result:
    return asyncio.run(_bench(requests))


async def _bench(requests: int) -> Result:
    with collecting() as collector:
        async with started(_cluster(collector.url)) as on, started(_cluster("")) as off:
            for running in (on, off):
                await run_load(HOST, port_of(running), _bodies(WARM), STREAMS, CHAT)
            began_s = time.time()
            suites = {"on": on, "off": off}
            blocks = await in_turns(suites, -(-requests // BLOCK), lambda _, name: _cpu_ms(suites[name]))
            await _all_exported(collector)
            counts = await _span_counts(on)
    traces = [
        spans
        for spans in collector.by_trace().values()
        if any(span.name == f"POST {CHAT}" and span.began_s > began_s for span in spans)
    ]
    on_ms, off_ms = (median(block[name] for block in blocks) for name in suites)
    return _result(on_ms, off_ms, traces, counts, len(blocks) * BLOCK)


def _cluster(endpoint: str) -> Json:
    return emulated(
        "traces",
        [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode", "emulated_link_gbps": 25}],
        {"kv_cache_bytes": 64 << 30},
        tracing={"endpoint": endpoint, "queue_spans": QUEUE_SPANS} if endpoint else None,
        policies={"placement": "least_load", "split": "full", "dispatch": "power_of_two"},
    )


def _bodies(count: int) -> list[dict[str, object]]:
    return [chat_body(f"{time.time_ns()} {number} {PROMPT}", TOKENS) for number in range(count)]


async def _cpu_ms(running: RunningSuite) -> float:
    """CPU time of all processes per request."""
    pids = [process.pid for process in running.suite.state.processes if process.name != "fork-server"]
    before_s = cpu_s(pids)
    await run_load(HOST, port_of(running), _bodies(BLOCK), STREAMS, CHAT)
    return (cpu_s(pids) - before_s) * 1e3 / BLOCK


async def _all_exported(collector: Collector) -> None:
    """Wait until no more spans arrive; a trace that is incomplete then counts as a fault."""
    deadline, known, since = time.monotonic() + SETTLE_S, -1, time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < QUIET_S:
        if len(collector.bodies) != known:
            known, since = len(collector.bodies), time.monotonic()
        await asyncio.sleep(0.2)


async def _span_counts(running: RunningSuite) -> Counter[str]:
    """Spans of all processes by outcome."""
    instances = await running.suite.instances()
    urls = [running.plan.api_url, *running.plan.scheduler_urls, *(one.info.http for one in instances.values())]
    counts: Counter[str] = Counter()
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        for url in urls:
            for family in text_string_to_metric_families((await http.get(f"{url}/metrics")).text):
                for sample in family.samples:
                    if sample.name == "polyphase_trace_spans_total":
                        counts[sample.labels["outcome"]] += int(sample.value)
    return counts


def _result(on_ms: float, off_ms: float, traces: list[list[ReceivedSpan]], counts: Counter[str], sent: int) -> Result:
    """on_ms, off_ms: CPU time of a request with tracing and without."""
    waits = [found for spans in traces if (found := wait(spans)) is not None]
    broken = [fault for spans in traces for fault in faults(spans)[:1]]
    total_s = sum(each.ttft_s for each in waits)
    share = sum(each.unexplained_s for each in waits) / total_s if total_s else 1.0
    lost = counts["dropped"] + counts["failed"]
    figures = {
        "requests": sent,
        "traces": len(traces),
        "ttft_in_no_span": round(share, 4),
        "spans_exported": counts["exported"],
        "spans_dropped": lost,
        "cpu_ms_a_request_on": round(on_ms, 3),
        "cpu_ms_a_request_off": round(off_ms, 3),
        "cpu_ratio": round(on_ms / off_ms, 3),
    }
    aims = {
        "all requests have a trace that is one tree": at_most(0, sent - len(traces) + len(broken)),
        "ttft_in_no_span": at_most(AIM_UNEXPLAINED, share, 4),
        "spans_dropped": at_most(0, lost),
        "cpu_ratio": at_most(AIM_CPU_RATIO, on_ms / off_ms, 4),
    }
    return result(figures, aims, broken[:3])
