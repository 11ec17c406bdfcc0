"""Children of a Prometheus metric by their labels: looking one up costs as much as observing it."""

from collections.abc import Callable
from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Bound(Generic[Metric]):
    """The same ones that the metric has, which keeps each of them anyhow."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def __len__(self) -> int:
        """Children."""
        return len(self._children)

    def keep(self, wanted: Callable[[tuple[str, ...]], bool]) -> None:
        """Remove the children whose labels are not wanted, here and from the metric."""
        for labels in [labels for labels in self._children if not wanted(labels)]:
            del self._children[labels]
            self._metric.remove(*labels)

    def of(self, *labels: str) -> Metric:
        """That of these labels, in the order of their names."""
        found = self._children.get(labels)
        if found is None:
            found = self._children[labels] = self._metric.labels(*labels)
        return found
