"""The gateway's Prometheus metrics: its own series, vLLM's series of requests, and the HTTP series of vLLM's server.

The series under vLLM's names have vLLM's labels, buckets and meanings, so that its dashboards can read this gateway. A
job is observed once, at its end; token counters and gaps are read from the open jobs at each scrape, so that the
metrics cost a token nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway.job import GAP_BOUNDS_S, Gaps, Job
from shared.domain.job import Phase, itl_met
from shared.errors import Busy, Overloaded
from shared.runtime.metrics import Bound
from shared.timeline import RequestTimeline, Span
from shared.wire.messages import JobReport

_GAP_S = (0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0)
_TARGETS = ("ttft", "tpot", "itl", "answer")
_SPAN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
# Of a completed request the reason is the engine's own: stop, length or repetition (vllm.v1.engine.FinishReason).
_REFUSED = (Busy.code, Overloaded.code)
_REASONS = {Phase.CANCELLED: "abort", Phase.FAILED: "error"}


class GatewayMetrics:
    def __init__(self, model: str, registry: CollectorRegistry, max_model_len: int = 2048) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = RequestSeries(model, max_model_len, registry)
        self.http = HttpSeries(registry)
        self._jobs = Bound(counter("polyphase_jobs", "Answers requested, by how they ended.", ["slo", "outcome"]))
        text = "Answers by whether they met their targets; without cancelled ones."
        self._slo = Bound(counter("polyphase_slo_requests", text, ["slo", "met"]))
        text = "Answers that missed a target, by target: ttft, tpot, itl; answer for those that failed."
        self._missed = Bound(counter("polyphase_slo_missed", text, ["slo", "target"]))
        text = "The longest gap between two deliveries of tokens of each completed answer."
        self._longest = Bound(histogram("polyphase_longest_gap_seconds", text, ["slo"], buckets=_GAP_S))
        self._resumes = counter("polyphase_resumes", "Further attempts after a failure.")
        text = "Streams that were paused for want of KV blocks and went on elsewhere."
        self._moves = counter("polyphase_moves", text)
        text = "Decodes that began to go on elsewhere with their KV, by why and by how that ended."
        self._migrations = counter("polyphase_migrations", text, ["cause", "outcome"])
        text = "Hints that the next turn of a session comes, by outcome."
        self.warms = counter("polyphase_session_warms", text, ["outcome"])
        self.sessions = gauge("polyphase_gateway_sessions", "Sessions whose last turn is remembered.")
        self.session_bytes = gauge("polyphase_gateway_session_bytes", "Bytes of these turns.")
        self.queued = gauge("polyphase_gateway_queued_jobs", "Jobs that do not decode yet.")
        text = "Final reports that no scheduler accepted in time."
        self.reports_dropped = counter("polyphase_gateway_reports_dropped", text)
        self.predictions = counter("polyphase_predictions", "Length predictions, by outcome.", ["outcome"])
        text = "Time of each stretch of a request."
        spans = histogram("polyphase_request_span_seconds", text, ["span"], buckets=_SPAN_S)
        self._spans = {span: spans.labels(span=span.value) for span in Span}
        text = "Requests refused on arrival and answers refused later, by cause and SLO class."
        self.refused = counter("polyphase_refused", text, ["cause", "slo"])
        text = "Answers that a scheduler delayed, for lack of room, for long queues or for heavier classes."
        self._delayed = counter("polyphase_delayed", text, ["slo"])
        self.waiting = gauge("polyphase_gateway_delayed_jobs", "Jobs that wait for their turn or for room.", ["slo"])
        text = "Lengths of answers for training, by outcome."
        self.records = counter("polyphase_gateway_records", text, ["outcome"])
        text = "Attempts to write such records that failed."
        self.record_failures = counter("polyphase_gateway_record_failures", text)

    def begin_classes(self, names: Iterable[str]) -> None:
        """Create the series of each SLO class with the value 0: a rate misses the value that a series begins with."""
        for name in names:
            for met in ("yes", "no"):
                self._slo.labels(name, met)
            self._longest.labels(name)
            for target in _TARGETS:
                self._missed.labels(name, target)

    def ended(self, job: Job, report: JobReport) -> None:
        """Observe a job that is over, with its final report."""
        if report.outcome in _REFUSED:
            self.refused.labels(cause=report.outcome, slo=report.slo).inc()
        else:
            self.requests.ended(job, _REASONS.get(report.phase, report.outcome))
        if job.delays:
            self._delayed.labels(slo=report.slo).inc()
        self._jobs.labels(report.slo, report.outcome).inc()
        if report.phase is not Phase.CANCELLED:
            self._slo.labels(report.slo, "yes" if report.slo_met else "no").inc()
            for target in _missed(job, report):
                self._missed.labels(report.slo, target).inc()
        if report.phase is Phase.COMPLETED and report.longest_gap_s is not None:
            self._longest.labels(report.slo).observe(report.longest_gap_s)
        for span in job.timeline.spans:
            self._spans[span.span].observe(span.ended_s - span.started_s)
        if job.attempt > 1:
            # An attempt may have failed as the job was about to move.
            self._resumes.inc(max(0, job.attempt - 1 - job.moves))
        if job.moves:
            self._moves.inc(job.moves)
        for (cause, outcome), count in job.migrated_by.items():
            self._migrations.labels(cause=cause, outcome=outcome).inc(count)


def _missed(job: Job, report: JobReport) -> list[str]:
    """The values of the label `target` for the targets that a job missed.

    A job that failed counts once, as `answer`, and not under `ttft`, `tpot` and `itl`: it has no complete times.
    """
    if report.phase is not Phase.COMPLETED:
        return ["answer"]
    slo = job.spec.slo
    late = {"ttft": report.ttft_s is None or report.ttft_s > slo.ttft_s}
    late["tpot"] = report.tpot_s is not None and report.tpot_s > slo.tpot_s
    late["itl"] = not itl_met(report.gaps, report.gaps_over)
    return [target for target, missed in late.items() if missed]


LABELS = ("model_name", "engine")
ENGINE = "0"  # a gateway looks like a server with one engine
# Seconds, as in vllm.v1.metrics.buckets, with which a test compares them.
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
    "vllm:request_time_per_output_token_seconds": ("Mean time of an answer's tokens after its first.", GAP_BOUNDS_S),
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
    """vLLM's series of requests, for one model."""

    def __init__(self, model: str, max_model_len: int, registry: CollectorRegistry) -> None:
        self._model = model
        self.gaps = Gaps()
        self.open: Callable[[], Iterable[Job]] = tuple  # jobs that have not ended
        self.ended_tokens, self.ended_prompt_tokens, self.ended_gaps_s = 0, 0, 0.0
        self._siblings: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # by ParentRequest: ended, longest
        ended = Counter(
            "vllm:request_success", "Answers by how they ended.", [*LABELS, "finished_reason"], registry=registry
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
        registry.register(_TokenSeries(self))

    def ended(self, job: Job, reason: str) -> None:
        self._ended.labels(self._model, ENGINE, reason).inc()
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
        """Observe what counts once for all `n` answers of a request, when the last of them has ended."""
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
        return self._model, ENGINE


class _TokenSeries(Collector):
    """The series that grow with each token, from ended and open jobs."""

    def __init__(self, series: RequestSeries) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
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


def token_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, … up to `limit`, as vLLM counts tokens."""
    found, at = [], 1
    while at <= limit:
        found += [at * factor for factor in (1, 2, 5) if at * factor <= limit]
        at *= 10
    return tuple(found)


def _times(timeline: RequestTimeline) -> dict[str, float]:
    """Seconds, of a request with a token. Where the decode instance prefills, its queue counts as prefill."""
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


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
_FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
_COARSE = (0.1, 0.5, 1)


class HttpSeries:
    """HTTP series with the names and labels of prometheus-fastapi-instrumentator; the handler of other paths is `none`.

    Counted at the edge, because plain streams do not reach the application's middleware.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, registry=registry)
        text, labels = "Responses by method, status and handler.", ["method", "status", "handler"]
        self._requests = Bound(Counter("http_requests", text, labels, registry=registry))
        text = "Time to the end of a response, in many buckets."
        self._fine = histogram("http_request_duration_highr_seconds", text, buckets=_FINE)
        text, labels = "Time to the end of a response.", ["method", "handler"]
        self._coarse = Bound(histogram("http_request_duration_seconds", text, labels, buckets=_COARSE))

    def answered(self, scope: Any, served: bool, status: int, took_s: float) -> None:
        """Count a response. served: its path is one of the API."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        handler = scope["path"] if served else "none"
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._fine.observe(took_s)
        self._coarse.labels(method, handler).observe(took_s)
