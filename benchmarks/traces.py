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

from benchmarks.measuring import Figures, cpu_s, emulated, in_turns, medians, port_of
from benchmarks.results import Result, at_most, result
from benchmarks.suite import started
from gateway.job import Job, JobSpec
from services.launcher.up import RunningSuite
from shared.domain.job import Generation, Slo
from tools.client import CHAT, Json, chat_body, run_load

HOST = "127.0.0.1"
REQUESTS, BLOCK, STREAMS, WARM = 5000, 250, 4, 64
TOKENS = 8
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
QUEUE_SPANS = 8192
AIM_UNEXPLAINED, AIM_CPU_RATIO, AIM_OFF_US = 0.03, 1.3, 5.0
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
            blocks = await in_turns({"on": on, "off": off}, -(-requests // BLOCK), _block)
            await _all_exported(collector)
            counts = await _span_counts(on)
    traces = [
        spans
        for spans in collector.by_trace().values()
        if any(span.name == f"POST {CHAT}" and span.began_s > began_s for span in spans)
    ]
    on_figures, off_figures = (medians(block[name] for block in blocks) for name in ("on", "off"))
    return _result(on_figures, off_figures, traces, counts, len(blocks) * BLOCK)


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


async def _block(running: RunningSuite, _: int) -> Figures:
    """CPU time of all processes per request, and the median TTFT."""
    pids = [process.pid for process in running.suite.state.processes if process.name != "fork-server"]
    before_s = cpu_s(pids)
    results = await run_load(HOST, port_of(running), _bodies(BLOCK), STREAMS, CHAT)
    used_s = cpu_s(pids) - before_s
    return {"cpu_ms": used_s * 1e3 / BLOCK, "ttft_ms": median(seen.ttft_s for seen in results) * 1e3}


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


def _result(on: Figures, off: Figures, traces: list[list[ReceivedSpan]], counts: Counter[str], sent: int) -> Result:
    waits = [found for spans in traces if (found := wait(spans)) is not None]
    broken = [fault for spans in traces for fault in faults(spans)[:1]]
    shares = sorted(each.unexplained_s / each.ttft_s for each in waits) or [1.0]
    total_s = sum(each.ttft_s for each in waits)
    share = sum(each.unexplained_s for each in waits) / total_s if total_s else 1.0
    ratio = on["cpu_ms"] / off["cpu_ms"]
    off_us = off_cost_us()
    lost = counts["dropped"] + counts["failed"]
    figures = {
        "requests": sent,
        "traces": len(traces),
        "spans_a_request": round(sum(map(len, traces)) / max(1, len(traces)), 2),
        "ttft_in_no_span": round(share, 4),
        "ttft_in_no_span_p99": round(shares[len(shares) * 99 // 100], 4),
        "spans_exported": counts["exported"],
        "spans_dropped": lost,
        "cpu_ms_a_request_on": round(on["cpu_ms"], 3),
        "cpu_ms_a_request_off": round(off["cpu_ms"], 3),
        "cpu_ratio": round(ratio, 3),
        "ttft_p50_ms_on": round(on["ttft_ms"], 2),
        "ttft_p50_ms_off": round(off["ttft_ms"], 2),
        "off_us_a_request": round(off_us, 2),
        "faults": broken[:3],
    }
    aims = {
        "all requests have a trace that is one tree": at_most(0, sent - len(traces) + len(broken)),
        "ttft_in_no_span": at_most(AIM_UNEXPLAINED, share, 4),
        "spans_dropped": at_most(0, lost),
        "cpu_ratio": at_most(AIM_CPU_RATIO, ratio, 4),
        "off_us_a_request": at_most(AIM_OFF_US, off_us, 4),
    }
    return result(figures, aims)


def off_cost_us(rounds: int = 20_000) -> float:
    """Cost of a request in its gateway while tracing is off: each place that would report checks a flag."""
    spec = JobSpec("j", [1], Generation(b"", 0.0), 1, True, False, Slo())
    job = Job(spec, lambda _: None, "g", 0.0)
    began_s = time.process_time()
    for _ in range(rounds):
        if job.placement_trace or job.wire_trace or job.wire_trace or job.trace is not None:
            raise AssertionError("tracing is off")
    return (time.process_time() - began_s) / rounds * 1e6
