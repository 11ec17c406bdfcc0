"""vLLM's own series of requests: its names, labels, buckets and meanings, so that its dashboards read this gateway.

`engine` is 0: to such a dashboard a gateway is a server with one engine. Token counters and gaps are read from the jobs
under way at each scrape, and cost a token nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway.gaps import BOUNDS, Gaps
from gateway.job import Job
from shared.runtime.metrics import Bound
from shared.timeline import RequestTimeline, Span

LABELS = ("model_name", "engine")
ENGINE = "0"
# vllm.v1.metrics.buckets; a test holds them equal. Seconds.
TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
PARAMS_N = (1, 2, 5, 10, 20)
_TIMES = {
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", TTFT),
    "vllm:request_time_per_output_token_seconds": ("Mean time of an answer's tokens after its first.", BOUNDS),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token.", LATENCY),
    "vllm:request_queue_time_seconds": ("Waiting in the queue of a prefill instance.", LATENCY),
    "vllm:request_prefill_time_seconds": ("From there to the first token.", LATENCY),
    "vllm:request_decode_time_seconds": ("First token to last.", LATENCY),
    "vllm:request_inference_time_seconds": ("Prefill and decode.", LATENCY),
}
_TOKENS = {
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_generation_tokens": "Tokens of an answer.",
    "vllm:request_max_num_generation_tokens": "Tokens of the longest answer of a request.",
    "vllm:request_params_max_tokens": "The most tokens that a request allows.",
}


class RequestSeries:
    """Of one model. Observed once a job, at its end."""

    def __init__(self, model: str, max_model_len: int, registry: CollectorRegistry) -> None:
        self._model = model
        self.gaps = Gaps()
        self.open: Callable[[], Iterable[Job]] = tuple  # jobs that have not ended
        self.ended_tokens, self.ended_prompt_tokens, self.ended_gaps_s = 0, 0, 0.0
        self._siblings: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # how many ended, the longest
        ended = Counter(
            "vllm:request_success", "Requests by how they ended.", [*LABELS, "finished_reason"], registry=registry
        )
        self._ended = Bound(ended)
        lengths = token_buckets(max_model_len)
        bounds = {name: (text, buckets) for name, (text, buckets) in _TIMES.items()}
        bounds |= {name: (text, lengths) for name, text in _TOKENS.items()}
        bounds["vllm:request_params_n"] = ("Answers that a request wants.", PARAMS_N)
        self._histograms = {
            name: Histogram(name, text, LABELS, buckets=buckets, registry=registry).labels(model, ENGINE)
            for name, (text, buckets) in bounds.items()
        }
        registry.register(_UnderWay(self))

    def ended(self, job: Job, reason: str) -> None:
        """Take in a job that is over."""
        self._ended.of(self._model, ENGINE, reason).inc()
        timeline, tokens = job.timeline, len(job.tokens)
        self._observe("vllm:request_params_max_tokens", job.spec.max_tokens)
        if not timeline.first_token_s:
            return
        self.ended_tokens += tokens
        self.ended_prompt_tokens += timeline.prompt_tokens
        self.ended_gaps_s += timeline.last_token_s - timeline.first_token_s
        self._observe("vllm:request_prompt_tokens", timeline.prompt_tokens)
        self._observe("vllm:request_generation_tokens", tokens)
        for name, value in _times(timeline).items():
            self._observe(name, value)
        self._of_request(job.siblings, tokens)

    def _of_request(self, siblings: Any, tokens: int) -> None:
        """What is counted once for all `n` answers of a request, when the last of them has ended."""
        wanted = 1
        if siblings is not None:
            wanted = siblings.n
            known = self._siblings.setdefault(siblings, [0, 0])
            known[0], known[1] = known[0] + 1, max(known[1], tokens)
            if known[0] < wanted:
                return
            tokens = known[1]
        self._observe("vllm:request_max_num_generation_tokens", tokens)
        self._observe("vllm:request_params_n", wanted)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    @property
    def labels(self) -> tuple[str, str]:
        """Their values, of all series."""
        return self._model, ENGINE


class _UnderWay(Collector):
    """What grows with each token: what ended, and what is under way."""

    def __init__(self, series: RequestSeries) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        series = self._series
        begun = [job for job in series.open() if job.timeline.first_token_s]
        tokens = series.ended_tokens + sum(len(job.tokens) for job in begun)
        prompts = series.ended_prompt_tokens + sum(job.timeline.prompt_tokens for job in begun)
        gaps_s = sum((j.timeline.last_token_s - j.timeline.first_token_s for j in begun), series.ended_gaps_s)
        for name, text, value in (
            ("vllm:generation_tokens", "Tokens generated.", tokens),
            ("vllm:prompt_tokens", "Tokens of prompts that have been prefilled.", prompts),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(series.labels, value)
            yield counter
        gaps = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Gaps between tokens.", labels=LABELS)
        gaps.add_metric(series.labels, series.gaps.cumulative(), gaps_s)
        yield gaps


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, … up to `most`, as vLLM counts tokens."""
    found, at = [], 1
    while at <= most:
        found += [at * factor for factor in (1, 2, 5) if at * factor <= most]
        at *= 10
    return tuple(found)


def _times(timeline: RequestTimeline) -> dict[str, float]:
    """Seconds, of a request that has a token. Where the decode instance prefills, its queue counts as prefill."""
    took_s = timeline.last_token_s - timeline.first_token_s
    queued_s = sum(each.ended_s - each.started_s for each in timeline.spans if each.span is Span.QUEUE)
    began_s = min(
        (each.started_s for each in timeline.spans if each.span in (Span.PREFILL, Span.DECODE_QUEUE)),
        default=timeline.first_token_s,
    )
    prefill_s = max(0.0, timeline.first_token_s - began_s)
    return {
        "vllm:time_to_first_token_seconds": timeline.first_token_s - timeline.arrived_s,
        "vllm:request_time_per_output_token_seconds": timeline.tpot_s or 0.0,
        "vllm:e2e_request_latency_seconds": timeline.last_token_s - timeline.arrived_s,
        "vllm:request_queue_time_seconds": queued_s,
        "vllm:request_prefill_time_seconds": prefill_s,
        "vllm:request_decode_time_seconds": took_s,
        "vllm:request_inference_time_seconds": prefill_s + took_s,
    }
