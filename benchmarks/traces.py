"""`polyphase bench traces`: completeness and cost of traces.

Two suites that differ only in tracing take the same load in turns. The spans go to `trace_collector`; each trace must
form one tree, and the time to first token that no span covers is reported.
"""

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.overhead import cpu_s
from benchmarks.results import at_most
from benchmarks.suite import on_free_ports
from benchmarks.trace_collector import Collector, Seen, collecting
from gateway.job import Job, JobSpec
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import Generation, Slo
from tools.client import run_load

AROUND = ("attempt", "chat ", "text_completion ", "POST ")  # hold others and explain nothing


@dataclass(frozen=True, slots=True)
class Wait:
    """For the first token, since the request's first byte: all of it, and what no span explains, in seconds."""

    ttft_s: float
    missing_s: float


def faults(spans: Sequence[Seen], client: str = "") -> list[str]:
    """Why these are not one tree below the span `client`; nothing if they are."""
    ids = Counter(span.span_id for span in spans)
    found = [f"{count} spans are {one}" for one, count in ids.items() if count > 1]
    if len({span.trace_id for span in spans}) != 1:
        found.append("more than one trace")
    roots = [span.name for span in spans if span.parent_id == client]
    if len(roots) != 1:
        found.append(f"roots: {roots}")
    found += [
        f"{span.name} hangs in the air" for span in spans if span.parent_id not in ids and span.parent_id != client
    ]
    return found


def wait(spans: Sequence[Seen]) -> Wait | None:
    """Of a request with one job; None where it has no first token."""
    first_token_s = next((span.events["first_token"] for span in spans if "first_token" in span.events), 0.0)
    if not first_token_s:
        return None
    began_s = min(span.began_s for span in spans if span.kind == "server" and span.service.endswith("gateway"))
    missing_s, at_s = 0.0, began_s
    for span in sorted(spans, key=lambda span: span.began_s):
        if span.name.startswith(AROUND) or span.began_s >= first_token_s:
            continue
        missing_s += max(0.0, span.began_s - at_s)
        at_s = max(at_s, span.ended_s)
    return Wait(first_token_s - began_s, missing_s + max(0.0, first_token_s - at_s))


REQUESTS, BLOCK, STREAMS, WARM = 5000, 250, 4, 64
TOKENS = 8
CHAT, HOST = "/v1/chat/completions", "127.0.0.1"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
QUEUE_SPANS = 8192
AIM_MISSING, AIM_CPU_RATIO, AIM_OFF_US = 0.03, 1.3, 5.0
_SETTLE_S, _QUIET_S = 30.0, 7.0


@dataclass
class _Target:
    port: int
    suite: RunningSuite
    cpu_ms: list[float] = field(default_factory=list)  # a request, of each block
    ttft_ms: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        return sum(cpu_s(process.pid) for process in self.suite.suite.state.processes if process.name != "fork-server")


def run_traces_bench(requests: int = REQUESTS) -> dict[str, Any]:
    return asyncio.run(_bench(requests))


async def _bench(requests: int) -> dict[str, Any]:
    with collecting() as collector, tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        async with _suite(Path(folder) / "on", collector.url) as on, _suite(Path(folder) / "off", "") as off:
            for target in (on, off):
                await run_load(HOST, target.port, _bodies(WARM), STREAMS, CHAT)
            began_s = time.time()
            for number in range(0, requests, BLOCK):
                for target in (on, off) if number // BLOCK % 2 else (off, on):
                    await _block(target, min(BLOCK, requests - number))
            await _all_exported(collector)
            counts = await _span_counts(on)
    traces = [spans for spans in collector.by_trace().values() if _is_chat(spans, began_s)]
    return _result(on, off, traces, counts, requests)


def _is_chat(spans: list[Seen], since_s: float) -> bool:
    return any(span.name == f"POST {CHAT}" and span.began_s > since_s for span in spans)


@asynccontextmanager
async def _suite(folder: Path, endpoint: str) -> AsyncIterator[_Target]:
    cluster = on_free_ports(_cluster(endpoint))
    async with running_suite(cluster, folder, Console(stderr=True)) as running:
        yield _Target(cluster.gateway.port, running)


def _cluster(endpoint: str) -> Cluster:
    instance = {"engine": "emulated", "accelerator": "A100-SXM-80", "kv_cache_bytes": 64 << 30}
    content: dict[str, Any] = {
        "name": "traces bench (emulated instances)",
        "model": str(PROJECT / "models" / "demo"),
        "served_model_name": "demo",
        "tracing": {"endpoint": endpoint, "queue_spans": QUEUE_SPANS} if endpoint else None,
        "policies": {"placement": "least_load", "split": "full", "dispatch": "power_of_two"},
        **{name: {"enabled": False} for name in ("predictor", "planner", "dashboard")},
        "instances": [
            {"id": "p0", "role": "prefill", **instance},
            {"id": "d0", "role": "decode", "emulated_link_gbps": 25, **instance},
        ],
    }
    return Cluster.model_validate(content)


def _bodies(count: int) -> list[dict[str, object]]:
    usual = {"model": "demo", "max_tokens": TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    prompts = [f"{time.time_ns()} {number} {PROMPT}" for number in range(count)]
    return [{**usual, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]


async def _block(target: _Target, requests: int) -> None:
    before = target.cpu_s()
    results = await run_load(HOST, target.port, _bodies(requests), STREAMS, CHAT)
    target.cpu_ms.append((target.cpu_s() - before) * 1e3 / requests)
    target.ttft_ms += [result.ttft_s * 1e3 for result in results]


async def _all_exported(collector: Collector) -> None:
    """Wait until no more comes; a trace that is not whole then is a fault, and counted."""
    deadline, known, since = time.monotonic() + _SETTLE_S, -1, time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < _QUIET_S:
        if len(collector.bodies) != known:
            known, since = len(collector.bodies), time.monotonic()
        await asyncio.sleep(0.2)


async def _span_counts(target: _Target) -> dict[str, int]:
    """Spans of all processes by outcome."""
    counts: dict[str, int] = {}
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        for url in await _metric_urls(target):
            families = text_string_to_metric_families((await http.get(url)).text)
            for family in families:
                for sample in family.samples if family.name == "polyphase_trace_spans" else ():
                    if sample.name.endswith("_total"):
                        outcome = sample.labels["outcome"]
                        counts[outcome] = counts.get(outcome, 0) + int(sample.value)
    return counts


async def _metric_urls(target: _Target) -> list[str]:
    instances = await target.suite.suite.instances()
    plan = target.suite.plan
    roots = [plan.api_url, *plan.scheduler_urls, *(entry["info"]["http"] for entry in instances.values())]
    return [f"{root}/metrics" for root in roots]


def _result(on: _Target, off: _Target, traces: list[list[Seen]], counts: dict[str, int], sent: int) -> dict[str, Any]:
    waits = [found for spans in traces if (found := wait(spans)) is not None]
    broken = [fault for spans in traces for fault in faults(spans)[:1]]
    share = _share(waits)
    ratio = statistics.median(on.cpu_ms) / statistics.median(off.cpu_ms)
    off_us = off_cost_us()
    lost = counts.get("dropped", 0) + counts.get("failed", 0)
    figures = {
        "requests": sent,
        "traces": len(traces),
        "spans_a_request": round(sum(map(len, traces)) / max(1, len(traces)), 2),
        "ttft_in_no_span": round(share, 4),
        "ttft_in_no_span_p99": round(_worst(waits), 4),
        "spans_exported": counts.get("exported", 0),
        "spans_dropped": lost,
        "cpu_ms_a_request_on": round(statistics.median(on.cpu_ms), 3),
        "cpu_ms_a_request_off": round(statistics.median(off.cpu_ms), 3),
        "cpu_ratio": round(ratio, 3),
        "ttft_p50_ms_on": round(statistics.median(on.ttft_ms), 2),
        "ttft_p50_ms_off": round(statistics.median(off.ttft_ms), 2),
        "off_us_a_request": round(off_us, 2),
        "faults": broken[:3],
    }
    aims = {
        "all requests have a trace that is one tree": at_most(0, sent - len(traces) + len(broken)),
        "ttft_in_no_span": at_most(AIM_MISSING, share, 4),
        "spans_dropped": at_most(0, lost),
        "cpu_ratio": at_most(AIM_CPU_RATIO, ratio, 4),
        "off_us_a_request": at_most(AIM_OFF_US, off_us, 4),
    }
    return {"figures": figures, "aims": aims}


def _share(waits: list[Wait]) -> float:
    total = sum(each.ttft_s for each in waits)
    return sum(each.missing_s for each in waits) / total if total else 1.0


def _worst(waits: list[Wait]) -> float:
    shares = sorted(each.missing_s / each.ttft_s for each in waits)
    return shares[len(shares) * 99 // 100] if shares else 1.0


def off_cost_us(rounds: int = 20_000) -> float:
    """Cost of a request in its gateway while tracing is off: each place that would report checks a flag."""
    spec = JobSpec("j", [1], Generation(b"", 0.0), 1, True, False, Slo())
    job = Job(spec, lambda _: None, "g", 0.0)
    began_s = time.process_time()
    for _ in range(rounds):
        if job.placement_trace or job.wire_trace or job.wire_trace or job.trace is not None:
            raise AssertionError("it is off")
    return (time.process_time() - began_s) / rounds * 1e6
