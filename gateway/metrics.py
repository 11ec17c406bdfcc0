"""The gateway's metrics, under the names that dashboards of vLLM already read."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from gateway.job import Job
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome
from shared.errors import Busy, Overloaded
from shared.timeline import Span
from shared.wire.messages import JobReport

_TTFT = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
_TPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_E2E = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_STAGES = {
    Span.QUEUE: ("vllm:request_queue_time_seconds", "Waiting for prefill."),
    Span.PREFILL: ("vllm:request_prefill_time_seconds", "In prefill."),
    Span.DECODE: ("vllm:request_decode_time_seconds", "In decode."),
}
# Of a completed request the reason is the engine's own: stop, length or repetition (vllm.v1.engine.FinishReason).
_REFUSED = (Busy.code, Overloaded.code)
_REASONS = {Phase.CANCELLED: "abort", Phase.FAILED: "error"}


class GatewayMetrics:
    """Observed once a job, at its end: nothing here is on the way of a token."""

    def __init__(self, model: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._ended = Counter(
            "vllm:request_success", "Requests by how they ended.", ["model_name", "finished_reason"], registry=registry
        )
        self._slo = Counter(
            "polyphase_slo_requests",
            "Requests by whether they met their targets; cancelled ones are none.",
            ["slo", "met"],
            registry=registry,
        )
        tokens = Counter("vllm:generation_tokens", "Tokens generated.", ["model_name"], registry=registry)
        self._tokens = tokens.labels(model_name=model)
        prompts = Counter("vllm:prompt_tokens", "Prompt tokens.", ["model_name"], registry=registry)
        self._prompts = prompts.labels(model_name=model)
        self._transfers = Counter("polyphase_kv_transfers", "KV imports by outcome.", ["outcome"], registry=registry)
        self._resumes = Counter("polyphase_resumes", "Further attempts after a failure.", registry=registry)
        self.queued = Gauge("polyphase_gateway_queued_jobs", "Jobs that do not decode yet.", registry=registry)
        self.reports_dropped = Counter(
            "polyphase_gateway_reports_dropped", "Final reports that no scheduler took in time.", registry=registry
        )
        self.predictions = Counter(
            "polyphase_predictions", "Length predictions, by outcome.", ["outcome"], registry=registry
        )
        self._model = model
        self._open_latencies(registry)
        self._open_refusals(registry)
        self._open_records(registry)

    def _open_latencies(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)
            return metric.labels(model_name=self._model)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean gap between tokens.", _TPOT)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _E2E)
        self._stages = {span: histogram(name, text, _E2E) for span, (name, text) in _STAGES.items()}
        spans = Histogram(
            "polyphase_request_span_seconds",
            "Time of each stretch of a request.",
            ["span"],
            buckets=_TTFT,
            registry=registry,
        )
        # Looking up a child by its labels costs as much as observing it.
        self._spans = {span: spans.labels(span=span.value) for span in Span}

    def _open_refusals(self, registry: CollectorRegistry) -> None:
        self.refused = Counter(
            "polyphase_refused", "Requests refused, by cause and SLO class.", ["cause", "slo"], registry=registry
        )
        self._delayed = Counter(
            "polyphase_delayed", "Jobs that had to wait for heavier classes.", ["slo"], registry=registry
        )
        self.waiting = Gauge(
            "polyphase_gateway_delayed_jobs", "Jobs that wait for their turn or for room.", ["slo"], registry=registry
        )

    def _open_records(self, registry: CollectorRegistry) -> None:
        self.records = Counter(
            "polyphase_gateway_records", "Lengths of answers for training, by outcome.", ["outcome"], registry=registry
        )
        self.record_failures = Counter(
            "polyphase_gateway_record_failures", "Attempts to write such records that failed.", registry=registry
        )

    def ended(self, job: Job, report: JobReport) -> None:
        """Take in a job that is over, with its final report."""
        timeline = job.timeline
        if report.outcome in _REFUSED:
            self.refused.labels(cause=report.outcome, slo=report.slo).inc()
        if job.delays:
            self._delayed.labels(slo=report.slo).inc()
        reason = _REASONS.get(report.phase, report.outcome)
        self._ended.labels(model_name=self._model, finished_reason=reason).inc()
        if report.phase is not Phase.CANCELLED:
            self._slo.labels(slo=report.slo, met="yes" if report.slo_met else "no").inc()
        self._prompts.inc(timeline.prompt_tokens)
        self._tokens.inc(len(job.tokens))
        times = ((self._ttft, timeline.ttft_s), (self._tpot, timeline.tpot_s), (self._e2e, timeline.jct_s))
        for metric, value in times:
            if value is not None:
                metric.observe(value)
        for span in timeline.spans:
            took_s = span.ended_s - span.started_s
            self._spans[span.span].observe(took_s)
            if stage := self._stages.get(span.span):
                stage.observe(took_s)
        for transfer in timeline.transfers:
            if transfer.outcome is not TransferOutcome.LOCAL:
                self._transfers.labels(outcome=transfer.outcome.value).inc()
        if job.attempt > 1:
            self._resumes.inc(job.attempt - 1)
