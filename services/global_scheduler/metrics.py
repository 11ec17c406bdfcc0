"""What the scheduler counts. Names are vLLM's where it has one for the same thing."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.domain.job import Phase
from shared.domain.route import Route
from shared.timeline import RequestTimeline, Span
from shared.wire.messages import JobReport

_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 0.1)
_LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 3.5, 5.0, 10.0, 20.0, 60.0)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_SPANS = {
    Span.QUEUE: "vllm:request_queue_time_seconds",
    Span.PREFILL: "vllm:request_prefill_time_seconds",
    Span.DECODE: "vllm:request_decode_time_seconds",
    Span.PLACEMENT: "polyphase:request_placement_time_seconds",
    Span.TRANSFER: "polyphase:request_kv_transfer_time_seconds",
    Span.DECODE_QUEUE: "polyphase:request_decode_queue_time_seconds",
}


class SchedulerMetrics:
    """Prometheus metrics of placements and of finished requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Histogram(
            "polyphase_scheduler_decision_seconds",
            "Time of one placement",
            buckets=_DECISION_S,
            registry=registry,
        )
        self._placements = Counter(
            "polyphase_scheduler_placements", "Placements", ["prefill", "decode", "kind"], registry=registry
        )
        self.refused = Counter(
            "polyphase_scheduler_refused", "Placements refused, by error code", ["code"], registry=registry
        )
        self._finished = Counter(
            "vllm:request_success", "Requests that ended, by reason", ["finished_reason"], registry=registry
        )
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of ended requests", registry=registry)
        self._output = Counter("vllm:generation_tokens", "Output tokens of ended requests", registry=registry)
        self._ttft = _histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _LATENCY_S, registry)
        self._tpot = _histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of a request's tokens", _TOKEN_S, registry
        )
        self._jct = _histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _LATENCY_S, registry)
        self._slo = Counter("polyphase_slo_requests", "Requests by SLO", ["slo", "met"], registry=registry)
        self._spans = {
            span: _histogram(name, f"Time of a request in {span.value}", _LATENCY_S, registry)
            for span, name in _SPANS.items()
        }

    def placed(self, route: Route, duration_s: float) -> None:
        """Count one decision."""
        self._decisions.observe(duration_s)
        kind = "local" if route.prefill is None else "partial" if route.decode is not None else "full"
        prefill = route.prefill.instance_id if route.prefill else ""
        decode = route.decode.instance_id if route.decode else ""
        self._placements.labels(prefill, decode, kind).inc()

    def ended(self, report: JobReport) -> None:
        """Count one request in its final phase."""
        reason = report.outcome or report.phase.value
        self._finished.labels(reason).inc()
        self._prompt.inc(report.prompt_tokens)
        self._output.inc(report.output_tokens)
        if report.ttft_s is not None:
            self._ttft.observe(report.ttft_s)
        if report.tpot_s is not None:
            self._tpot.observe(report.tpot_s)
        if report.slo_met is not None and report.phase is not Phase.CANCELLED:
            self._slo.labels(report.slo, "yes" if report.slo_met else "no").inc()
        if report.timeline is not None:
            self._timeline(report.timeline)

    def _timeline(self, timeline: RequestTimeline) -> None:
        if timeline.jct_s is not None:
            self._jct.observe(timeline.jct_s)
        for record in timeline.spans:
            self._spans[record.span].observe(max(0.0, record.ended_s - record.started_s))


def _histogram(name: str, what: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, what, buckets=buckets, registry=registry)
