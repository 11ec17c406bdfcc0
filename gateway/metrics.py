"""The gateway's metrics: what only it sees of requests. Those under vLLM's names are in `gateway.vllm_series`."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.http_series import HttpSeries
from gateway.job import Job
from gateway.vllm_series import RequestSeries
from shared.domain.job import Phase, itl_met
from shared.errors import Busy, Overloaded
from shared.runtime.metrics import Bound
from shared.timeline import Span
from shared.wire.messages import JobReport

_GAP_S = (0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0)
_TARGETS = ("ttft", "tpot", "itl", "answer")
_SPAN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
# Of a completed request the reason is the engine's own: stop, length or repetition (vllm.v1.engine.FinishReason).
_REFUSED = (Busy.code, Overloaded.code)
_REASONS = {Phase.CANCELLED: "abort", Phase.FAILED: "error"}


class GatewayMetrics:
    """Observed once a job, at its end: nothing here is on the way of a token."""

    def __init__(self, model: str, registry: CollectorRegistry, max_model_len: int = 2048) -> None:
        self.requests = RequestSeries(model, max_model_len, registry)
        self.http = HttpSeries(registry)
        self._jobs = Bound(
            Counter("polyphase_jobs", "Answers asked for, by how they ended.", ["slo", "outcome"], registry=registry)
        )
        slo = Counter(
            "polyphase_slo_requests",
            "Requests by whether they met their targets; cancelled ones are none.",
            ["slo", "met"],
            registry=registry,
        )
        missed = Counter(
            "polyphase_slo_missed",
            "Requests that did not meet their targets, by what they missed: ttft, tpot, itl, several, or any answer.",
            ["slo", "target"],
            registry=registry,
        )
        self._slo, self._missed = Bound(slo), Bound(missed)
        self._longest = Bound(
            Histogram(
                "polyphase_longest_gap_seconds",
                "The longest gap between two deliveries of tokens of each completed answer.",
                ["slo"],
                buckets=_GAP_S,
                registry=registry,
            )
        )
        self._resumes = Counter("polyphase_resumes", "Further attempts after a failure.", registry=registry)
        self._moves = Counter(
            "polyphase_moves",
            "Streams that were paused for want of KV blocks and went on elsewhere.",
            registry=registry,
        )
        self.queued = Gauge("polyphase_gateway_queued_jobs", "Jobs that do not decode yet.", registry=registry)
        self.reports_dropped = Counter(
            "polyphase_gateway_reports_dropped", "Final reports that no scheduler took in time.", registry=registry
        )
        self.predictions = Counter(
            "polyphase_predictions", "Length predictions, by outcome.", ["outcome"], registry=registry
        )
        spans = Histogram(
            "polyphase_request_span_seconds",
            "Time of each stretch of a request.",
            ["span"],
            buckets=_SPAN_S,
            registry=registry,
        )
        self._spans = {span: spans.labels(span=span.value) for span in Span}
        self._open_refusals(registry)
        self._open_records(registry)

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

    def begin_classes(self, names: Iterable[str]) -> None:
        """Show what counts by SLO class from nothing on: a rate misses what a series begins with."""
        for name in names:
            for met in ("yes", "no"):
                self._slo.of(name, met)
            self._longest.of(name)
            for target in _TARGETS:
                self._missed.of(name, target)

    def ended(self, job: Job, report: JobReport) -> None:
        """Take in a job that is over, with its final report."""
        if report.outcome in _REFUSED:
            self.refused.labels(cause=report.outcome, slo=report.slo).inc()
        else:
            self.requests.ended(job, _REASONS.get(report.phase, report.outcome))
        if job.delays:
            self._delayed.labels(slo=report.slo).inc()
        self._jobs.of(report.slo, report.outcome).inc()
        if report.phase is not Phase.CANCELLED:
            self._slo.of(report.slo, "yes" if report.slo_met else "no").inc()
            for target in _missed(job, report):
                self._missed.of(report.slo, target).inc()
        if report.phase is Phase.COMPLETED and report.longest_gap_s is not None:
            self._longest.of(report.slo).observe(report.longest_gap_s)
        for span in job.timeline.spans:
            self._spans[span.span].observe(span.ended_s - span.started_s)
        if job.attempt > 1:
            self._resumes.inc(max(0, job.attempt - 1 - job.moves))  # one may have failed as it was about to move
        if job.moves:
            self._moves.inc(job.moves)


def _missed(job: Job, report: JobReport) -> list[str]:
    """Which targets a job did not meet. One that failed has met none, whatever it had by then."""
    if report.phase is not Phase.COMPLETED:
        return ["answer"]
    slo = job.spec.slo
    late = {"ttft": report.ttft_s is None or report.ttft_s > slo.ttft_s}
    late["tpot"] = report.tpot_s is not None and report.tpot_s > slo.tpot_s
    late["itl"] = not itl_met(report.gaps, report.gaps_over)
    return [target for target, missed in late.items() if missed]
