"""The predictor's metrics."""

from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from predictor.query import Query
from predictor.service import SOURCE, Predictor
from shared.domain.job import LengthPrediction

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counters that routes feed, and gauges that read the service when scraped."""

    def __init__(self, registry: CollectorRegistry, predictor: Predictor) -> None:
        self.latency_s = Histogram(
            "polyphase_predictor_latency_seconds",
            "Time to answer a prediction, by source.",
            ["source"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        Gauge(
            "polyphase_predictor_pending", "Predictions that wait or run in the classifier.", registry=registry
        ).set_function(lambda: predictor.batcher.pending)
        registry.register(_Judged(predictor))
        Gauge("polyphase_predictor_observations", "Finished answers learnt from.", registry=registry).set_function(
            lambda: predictor.observed.observations
        )
        Gauge(
            "polyphase_predictor_classifier_answers", "1 while the classifier is believed.", registry=registry
        ).set_function(lambda: predictor.source == SOURCE)


class _Judged(Collector):
    """What is known of the classifier now."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def collect(self) -> Iterator[Metric]:
        """Read the service."""
        fallbacks = CounterMetricFamily(
            "polyphase_predictor_fallbacks", "Answers of observed lengths in the classifier's place.", labels=["cause"]
        )
        for cause, count in self._predictor.fallbacks.items():
            fallbacks.add_metric([cause], count)
        yield fallbacks
        judged = GaugeMetricFamily(
            "polyphase_predictor_accuracy", "Share of the last answers that each was right about.", labels=["of"]
        )
        reality = self._predictor.reality
        for name, share in (reality.accuracy if reality else {}).items():
            if share is not None:
                judged.add_metric([name], share)
        yield judged


async def timed(predictor: Predictor, metrics: Metrics, query: Query) -> tuple[LengthPrediction, float]:
    """A prediction and the seconds that it took, counted."""
    started_s = perf_counter()
    found = await predictor.predict(query)
    latency_s = perf_counter() - started_s
    metrics.latency_s.labels(found.source).observe(latency_s)
    return found, latency_s
