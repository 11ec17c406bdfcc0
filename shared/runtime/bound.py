"""Children of a Prometheus metric by their labels: looking one up costs as much as observing it."""

from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Bound(Generic[Metric]):
    """The same ones that the metric has, which keeps each of them anyhow."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def of(self, *labels: str) -> Metric:
        """That of these labels, in the order of their names."""
        found = self._children.get(labels)
        if found is None:
            found = self._children[labels] = self._metric.labels(*labels)
        return found
