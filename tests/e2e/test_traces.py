"""One trace of a disaggregated chat through a real suite: spans of every process, which explain the whole time."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from rich.console import Console

from benchmarks.suite import on_free_ports
from benchmarks.traces import Collector, ReceivedSpan, collecting, faults, wait
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite, running_suite
from tests.patient_clusters import patient
from tests.services.control_plane import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
PARENT = "00f067aa0ba902b7"
SECRET = "xylophone"
# A busy machine may pause a process between two spans, in some traces; a stretch without a span would be in all.
EXPLAINED, PAUSED = 0.05, 5
ORDER = ["receive", "intake", "placement", "place", "handover", "queue", "prefill", "reply", "handover", "decode_queue"]
SERVICES = {
    "polyphase-gateway": {"receive", "intake", "placement", "handover", "reply", "attempt", "chat demo"},
    "polyphase-scheduler": {"place"},
    "polyphase-worker": {"queue", "prefill", "transfer", "decode_queue", "decode"},
}
_INSTANCE = {"engine": "emulated", "accelerator": "A100-SXM-80", "kv_cache_bytes": 64 << 30, "chunk_size": 128}


@dataclass
class Suite:
    http: httpx.AsyncClient
    collector: Collector
    folder: Path
    running: RunningSuite

    async def ask(self, trace_id: str, **body: object) -> httpx.Response:
        return await self.http.post(**_request(trace_id, **body))

    @asynccontextmanager
    async def stream(self, trace_id: str, **body: object) -> AsyncIterator[AsyncIterator[str]]:
        """The events of a streamed answer, as they come."""
        async with self.http.stream("POST", **_request(trace_id, stream=True, **body)) as answer:
            assert answer.status_code == 200
            yield (line async for line in answer.aiter_lines() if line)

    async def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """All of it: a moment after the last span that is due. Each process exports its spans every five seconds."""
        names = {name for of_service in SERVICES.values() for name in of_service}
        await until(lambda: names <= {span.name for span in self.collector.of(trace_id)}, "all spans", timeout_s=60)
        await until(lambda: not faults(self.collector.of(trace_id), PARENT), "one tree", timeout_s=60)
        return self.collector.of(trace_id)


def _request(trace_id: str, **body: object) -> dict[str, Any]:
    text = f"{SECRET} " * 120
    content = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 6, **body}
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "tracestate": "vendor=one"}
    return {"url": "/v1/chat/completions", "json": content, "headers": headers}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    folder = tmp_path_factory.mktemp("traces")
    with collecting() as collector:
        content = {
            "name": "traces",
            "model": str(PROJECT / "models" / "demo"),
            "served_model_name": "demo",
            "tracing": {"endpoint": collector.url},
            "gateway": {"patience_s": 120.0},  # for the restart of an instance on a busy machine
            "policies": {"placement": "least_load", "split": "full", "dispatch": "power_of_two"},
            **{name: {"enabled": False} for name in ("predictor", "planner", "dashboard")},
            "instances": [
                {"id": "p0", "role": "prefill", **_INSTANCE},
                {"id": "d0", "role": "decode", "emulated_link_gbps": 10, "emulated_step_s": 0.02, **_INSTANCE},
            ],
        }
        cluster = on_free_ports(Cluster.model_validate(patient(content)))
        async with running_suite(cluster, folder, Console(stderr=True)) as running:
            url = f"http://127.0.0.1:{cluster.gateway.port}"
            async with httpx.AsyncClient(base_url=url, timeout=180, trust_env=False) as http:
                yield Suite(http, collector, folder, running)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_disaggregated_chat_is_one_trace(suite: Suite, stream: bool) -> None:
    trace_id = f"{'ab' * 15}{stream:02x}"
    assert (await suite.ask(trace_id)).status_code == 200  # what is slow the first time, is slow before
    trace_id = f"{'cd' * 15}{stream:02x}"
    answer = await suite.ask(trace_id, stream=stream)
    assert answer.status_code == 200
    spans = await suite.trace(trace_id)
    assert faults(spans, PARENT) == []
    assert {span.state for span in spans} == {"vendor=one"}
    for service, names in SERVICES.items():
        assert {span.name for span in spans if span.service == service} >= names
    attempt = next(span for span in spans if span.name == "attempt")
    assert {span.instance for span in spans if span.parent_id == attempt.span_id} == {"gateway-0", "p0", "d0"}
    assert [span.name for span in spans if span.name in ORDER] == ORDER
    shares = [unexplained_share(spans)]
    for number in range(PAUSED):
        if min(shares) > EXPLAINED:
            trace_id = f"{'bc' * 14}{stream:02x}{number:02x}"
            assert (await suite.ask(trace_id, stream=stream)).status_code == 200
            shares.append(unexplained_share(await suite.trace(trace_id)))
    assert min(shares) <= EXPLAINED, shares


def unexplained_share(spans: list[ReceivedSpan]) -> float:
    """Of the time to the first token, the share that no span explains."""
    found = wait(spans)
    assert found is not None
    return found.unexplained_s / found.ttft_s


async def test_spans_have_places_and_reasons_and_no_prompt(suite: Suite) -> None:
    trace_id = "ef" * 16
    answer = (await suite.ask(trace_id)).json()
    spans = {span.name: span for span in await suite.trace(trace_id)}
    assert spans["place"].attributes["polyphase.prefill.instance.id"] == "p0"
    assert any("least_load" in reason for reason in spans["place"].attributes["polyphase.reasons"])
    assert spans["prefill"].attributes["polyphase.chunks"] > 1
    transfer = spans["transfer"].attributes
    assert transfer["polyphase.transfer.bytes"] > 0
    assert (transfer["polyphase.transfer.codec"], transfer["polyphase.transfer.from"]) == ("raw", "p0")
    chat = spans["chat demo"].attributes
    assert chat["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert chat["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    text = answer["choices"][0]["message"]["content"]
    for body in suite.collector.bodies:
        assert SECRET.encode() not in body
        assert not text or text.encode() not in body


async def test_a_body_with_several_jobs_is_one_tree(suite: Suite) -> None:
    trace_id = "12" * 16
    assert (await suite.ask(trace_id, n=2)).status_code == 200
    spans = await suite.trace(trace_id)
    assert [span.name for span in spans].count("chat demo") == 2
    assert faults(spans, PARENT) == []


async def test_metrics_count_exported_and_lost_spans(suite: Suite) -> None:
    async def exported() -> bool:
        text = (await suite.http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("polyphase_trace_spans_total")]
        counts = {line.split('"')[1]: float(line.split()[-1]) for line in lines}
        assert counts["failed"] == counts["dropped"] == 0
        return counts["exported"] > 0

    await until(exported, "spans were exported", timeout_s=60)


async def test_a_lost_instance_is_an_attempt_in_the_trace_and_a_line_in_the_log(suite: Suite) -> None:
    trace_id = "56" * 16
    async with suite.stream(trace_id, max_tokens=400) as lines:  # for eight seconds
        chunks = [await anext(lines) for _ in range(5)]  # it decodes: the prefill instance gives one token alone
        suite.running.suite.kill("d0")
        chunks += [line async for line in lines]
    assert chunks[-1] == "data: [DONE]"
    spans = await suite.trace(trace_id)
    assert faults(spans, PARENT) == []
    attempts = [span for span in spans if span.name == "attempt"]
    assert [span.error for span in attempts] == [True, False]
    assert [span.parent_id for span in spans if span.name == "lost"] == [attempts[0].span_id]
    lines = [line for file in suite.folder.rglob("*.log") for line in _json_lines(file)]
    logged = [json.loads(line) for line in lines if trace_id in line]
    assert {(line["event"], line["service"]) for line in logged} >= {
        ("attempt failed", "gateway"),
        ("no placement", "global_scheduler"),
    }
    assert not any(SECRET in line for line in lines)


def _json_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith("{")]
