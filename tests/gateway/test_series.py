"""What the gateway counts under vLLM's names while answers are under way, and of HTTP at its edge."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from gateway.job import GAP_BOUNDS_S, Gaps
from gateway.metrics import GatewayMetrics
from shared.domain.job import Phase
from shared.wire.messages import TokenStep
from tests.gateway.test_edge import App, edge
from tests.services.global_scheduler.gateways import make_job

VLLM = {"model_name": "m", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_gaps_are_counted_at_their_bound() -> None:
    gaps = Gaps()
    for gap_s in (0.0, 0.01, 0.0100001, 80.0, 81.0, -1.0):
        gaps.add(gap_s)
    found = dict(gaps.cumulative())
    assert (found["0.01"], found["0.025"], found["80.0"], found["+Inf"]) == (3, 4, 5, 6)
    assert len(found) == len(GAP_BOUNDS_S) + 1


def test_tokens_count_when_they_come_and_once_at_the_end(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, job, waiting = GatewayMetrics("m", registry), make_job("j"), make_job("k")
    job.gaps = metrics.requests.gaps
    metrics.requests.open = lambda: [job, waiting]

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {**VLLM, **labels})

    def figures() -> tuple[float | None, ...]:
        gaps = "vllm:inter_token_latency_seconds"
        counts = [read(f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
        return (*counts, read(f"{gaps}_count"), read(f"{gaps}_sum"))

    assert figures() == (0, 0, 0, 0)
    for now, tokens in ((100.0, [1]), (100.5, [2, 3]), (100.75, [4])):
        monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda now=now: now))
        job.accept(TokenStep(tokens))
    assert figures() == (100, 4, 2, 0.75)
    job.phase = Phase.COMPLETED
    metrics.requests.open = lambda: [waiting]
    metrics.ended(job, job.report("stop"))
    assert figures() == (100, 4, 2, 0.75)
    assert read("vllm:inter_token_latency_seconds_bucket", le="0.3") == 1
    assert read("vllm:request_decode_time_seconds_sum") == 0.75
    assert read("vllm:request_generation_tokens_sum") == 4
    slo = {"slo": "default"}
    assert registry.get_sample_value("polyphase_longest_gap_seconds_sum", slo) == 0.5
    assert registry.get_sample_value("polyphase_slo_missed_total", {**slo, "target": "itl"}) == 1


def test_gaps_between_deliveries_are_counted_against_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("j")
    for now, tokens in ((100.0, [1]), (100.125, [2, 3]), (100.625, [4]), (100.75, [5]), (101.125, [6])):
        monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda now=now: now))
        job.accept(TokenStep(tokens))
    timeline = job.timeline
    assert (timeline.itl_s, timeline.gaps, timeline.gaps_over) == (0.25, 4, 2)
    assert (timeline.longest_gap_s, timeline.longest_gap_at_s, timeline.longest_gap_after) == (0.5, 100.625, 3)
    job.finish_reason = "stop"
    job.ended("stop")
    report = job.report("stop")
    assert (report.longest_gap_s, report.gaps, report.gaps_over, report.slo_met) == (0.5, 4, 2, False)


def test_tokens_that_wait_for_an_event_share_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("j")
    job.streamed = True
    for now, leaves in ((100.0, 1), (100.125, 0), (100.25, 2), (100.75, 1)):
        monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda now=now: now))
        job.accept(TokenStep([1]))
        if leaves:
            job.delivered(leaves)
    assert (job.timeline.gaps, job.timeline.gaps_over) == (2, 1)
    assert (job.timeline.longest_gap_s, job.timeline.longest_gap_after) == (0.5, 3)


def test_of_several_answers_the_longest_is_counted_when_all_have_ended(registry: CollectorRegistry) -> None:
    class Parent:
        n = 3

    metrics, parent, name = GatewayMetrics("m", registry), Parent(), "vllm:request_max_num_generation_tokens"
    for tokens, counted in ((5, 0), (9, 0), (2, 1)):
        job = make_job(str(tokens))
        job.siblings, job.phase = parent, Phase.COMPLETED
        job.accept(TokenStep([1] * tokens, "stop"))
        metrics.ended(job, job.report("stop"))
        assert registry.get_sample_value(f"{name}_count", VLLM) == counted
    assert registry.get_sample_value(f"{name}_sum", VLLM) == 9
    assert registry.get_sample_value("vllm:request_params_n_sum", VLLM) == 3
    assert registry.get_sample_value("vllm:request_generation_tokens_count", VLLM) == 3


def test_what_a_job_missed_is_told_by_target(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics("m", registry)
    metrics.begin_classes(["default"])
    late, slow, fine, failed = (make_job(name) for name in ("late", "slow", "fine", "failed"))
    for job, first_s, last_s in ((late, 3.0, 3.1), (slow, 1.0, 9.0), (fine, 1.0, 1.1), (failed, 1.0, 1.1)):
        job.tokens = [1, 2]
        job.timeline.first_token_s = job.timeline.arrived_s + first_s
        job.timeline.last_token_s = job.timeline.arrived_s + last_s
        job.phase = Phase.FAILED if job is failed else Phase.COMPLETED
        metrics.ended(job, job.report("peer_lost" if job is failed else "stop"))
    missed = {
        target: registry.get_sample_value("polyphase_slo_missed_total", {"slo": "default", "target": target})
        for target in ("ttft", "tpot", "answer")
    }
    assert missed == {"ttft": 1, "tpot": 1, "answer": 1}
    met = [
        registry.get_sample_value("polyphase_slo_requests_total", {"slo": "default", "met": m}) for m in ("yes", "no")
    ]
    assert met == [1, 3]


async def test_every_answer_is_counted_at_the_edge_refusals_too(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics("m", registry)
    async with edge(App(), metrics=metrics) as client:
        await client.post("/v1/completions", content=b"x")
        await client.post("/v1/completions", content=b"x" * 5000)
        await client.get("/v1/completions/../../etc/passwd")
        await client.request("BREW", "/v1/models")
        await client.get("/health")

    def count(method: str, status: str, handler: str) -> float | None:
        return registry.get_sample_value(
            "http_requests_total", {"method": method, "status": status, "handler": handler}
        )

    assert count("POST", "2xx", "/v1/completions") == count("POST", "4xx", "/v1/completions") == 1
    assert count("GET", "2xx", "none") == count("other", "2xx", "/v1/models") == 1
    assert registry.get_sample_value("http_request_duration_highr_seconds_count") == 4
