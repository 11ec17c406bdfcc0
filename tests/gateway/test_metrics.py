"""The metrics of jobs: tokens, gaps, answers, and the targets that they missed."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from gateway.job import GAP_BOUNDS_S, Gaps, Job
from gateway.metrics import GatewayMetrics
from shared.domain.job import Phase
from shared.wire.messages import TokenStep
from tests.gateway.cluster import make_job


class Metrics:
    """A gateway's metrics, with a clock for jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = CollectorRegistry()
        self.metrics = GatewayMetrics("m", self.registry)
        self.monkeypatch = monkeypatch

    def vllm(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "0", **labels})

    def slo(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"polyphase_{name}", {"slo": "default", **labels})

    def step(self, job: Job, now_s: float, count: int) -> None:
        """The job gets so many tokens at that time."""
        self.monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda: now_s))
        job.accept(TokenStep([1] * count))

    def end(self, job: Job, outcome: str = "stop") -> None:
        job.phase = Phase.COMPLETED if outcome == "stop" else Phase.FAILED
        self.metrics.ended(job, job.report(outcome))


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    return Metrics(monkeypatch)


def new_job() -> Job:
    return make_job([1] * 100, 50)[0]


def test_a_gap_is_counted_in_the_first_bucket_that_holds_it() -> None:
    gaps = Gaps()
    for gap_s in (0.0, 0.01, 0.0100001, 80.0, 81.0, -1.0):
        gaps.add(gap_s)
    buckets = dict(gaps.cumulative())
    assert (buckets["0.01"], buckets["0.025"], buckets["80.0"], buckets["+Inf"]) == (3, 4, 5, 6)
    assert len(buckets) == len(GAP_BOUNDS_S) + 1


def test_tokens_count_when_they_arrive_and_once_at_the_end(metrics: Metrics) -> None:
    job, waiting, requests = new_job(), new_job(), metrics.metrics.requests
    job.gaps, requests.open = requests.gaps, lambda: [job, waiting]

    def figures() -> tuple[float | None, ...]:
        names = ("prompt_tokens_total", "generation_tokens_total")
        gaps = ("inter_token_latency_seconds_count", "inter_token_latency_seconds_sum")
        return tuple(metrics.vllm(name) for name in (*names, *gaps))

    assert figures() == (0, 0, 0, 0)
    for now_s, count in ((100.0, 1), (100.5, 2), (100.75, 1)):
        metrics.step(job, now_s, count)
    assert figures() == (100, 4, 2, 0.75)
    requests.open = lambda: [waiting]
    metrics.end(job)
    assert figures() == (100, 4, 2, 0.75)
    assert metrics.vllm("inter_token_latency_seconds_bucket", le="0.3") == 1
    assert metrics.vllm("request_decode_time_seconds_sum") == 0.75
    assert metrics.vllm("request_generation_tokens_sum") == 4
    assert metrics.slo("longest_gap_seconds_sum") == 0.5
    assert metrics.slo("slo_missed_total", target="itl") == 1


def test_gaps_between_deliveries_are_compared_with_the_target(metrics: Metrics) -> None:
    job = new_job()
    for now_s, count in ((100.0, 1), (100.125, 2), (100.625, 1), (100.75, 1), (101.125, 1)):
        metrics.step(job, now_s, count)
    timeline = job.timeline
    assert (timeline.itl_s, timeline.gaps, timeline.gaps_over) == (0.25, 4, 2)
    assert (timeline.longest_gap_s, timeline.longest_gap_at_s, timeline.longest_gap_after) == (0.5, 100.625, 3)
    job.finish_reason = "stop"
    job.ended("stop")
    report = job.report("stop")
    assert (report.longest_gap_s, report.gaps, report.gaps_over, report.slo_met) == (0.5, 4, 2, False)
    streamed = new_job()
    streamed.streamed = True
    for now_s, leaving in ((100.0, 1), (100.125, 0), (100.25, 2), (100.75, 1)):
        metrics.step(streamed, now_s, 1)
        if leaving:
            streamed.delivered(leaving)
    assert (streamed.timeline.gaps, streamed.timeline.gaps_over) == (2, 1), "tokens of one event share its gap"
    assert (streamed.timeline.longest_gap_s, streamed.timeline.longest_gap_after) == (0.5, 3)


def test_of_several_answers_the_longest_is_counted_when_all_have_ended(metrics: Metrics) -> None:
    class Parent:
        n = 3

    parent = Parent()
    for tokens, counted in ((5, 0), (9, 0), (2, 1)):
        job = new_job()
        job.siblings = parent
        job.accept(TokenStep([1] * tokens, "stop"))
        metrics.end(job)
        assert metrics.vllm("request_max_num_generation_tokens_count") == counted
    assert metrics.vllm("request_max_num_generation_tokens_sum") == 9
    assert metrics.vllm("request_params_n_sum") == metrics.vllm("request_generation_tokens_count") == 3


def test_missed_targets_are_counted_apart(metrics: Metrics) -> None:
    metrics.metrics.begin_classes(["default"])
    for first_s, last_s, outcome in ((3.0, 3.1, "stop"), (1.0, 9.0, "stop"), (1.0, 1.1, "stop"), (1.0, 1.1, "lost")):
        job = new_job()
        job.tokens = [1, 2]
        job.timeline.first_token_s = job.timeline.arrived_s + first_s
        job.timeline.last_token_s = job.timeline.arrived_s + last_s
        metrics.end(job, outcome)
    assert [metrics.slo("slo_missed_total", target=target) for target in ("ttft", "tpot", "answer")] == [1, 1, 1]
    assert [metrics.slo("slo_requests_total", met=met) for met in ("yes", "no")] == [1, 3]
