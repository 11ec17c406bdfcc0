"""The predictor's metrics."""

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from predictor.service import SOURCE, Predictor, Query
from shared.domain.job import LengthPrediction
from shared.errors import PolyphaseError

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counters that routes feed, and gauges that read the service when scraped."""

    def __init__(self, registry: CollectorRegistry, predictor: Predictor) -> None:
        ProcessCollector(registry=registry)
        self.latency_s = Histogram(
            "polyphase_predictor_latency_seconds",
            "Time to answer a prediction, by source.",
            ["source"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.refused = Counter(
            "polyphase_predictor_refused", "Predictions not given, by error code.", ["code"], registry=registry
        )
        Gauge(
            "polyphase_predictor_pending", "Predictions that wait or run in the classifier.", registry=registry
        ).set_function(lambda: predictor.lane.pending)
        Gauge("polyphase_predictor_observations", "Finished answers learnt from.", registry=registry).set_function(
            lambda: predictor.observed.observations
        )
        Gauge(
            "polyphase_predictor_classifier_loaded", "1 while the classifier answers.", registry=registry
        ).set_function(lambda: predictor.source == SOURCE)


async def timed(predictor: Predictor, metrics: Metrics, query: Query) -> tuple[LengthPrediction, float]:
    """A prediction and the seconds that it took, counted. Raises Busy, DeadlineExceeded."""
    started_s = perf_counter()
    try:
        found = await predictor.predict(query)
    except PolyphaseError as error:
        metrics.refused.labels(error.code).inc()
        raise
    latency_s = perf_counter() - started_s
    metrics.latency_s.labels(found.source).observe(latency_s)
    return found, latency_s
