"""Metrics of every process: its build, its use of resources, its restarts; and a fast lookup of a metric's children."""

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

RESTARTS = "POLYPHASE_RESTARTS"  # set by the process that restarts this one; absent without such a process


def describe_process(registry: CollectorRegistry) -> None:
    """Add the metrics of the process to its registry. Creation times of series are left out: they double a scrape."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    build = {
        "version": _version("polyphase"),
        "vllm_version": _version("vllm"),
        "python_version": platform.python_version(),
    }
    info = Gauge("polyphase_build_info", "What runs here; always 1.", list(build), registry=registry)
    info.labels(**build).set(1)
    if RESTARTS in os.environ:
        text = "Times that the launcher has started it again since its own start."
        restarts = Counter("polyphase_process_restarts", text, registry=registry)
        restarts.inc(int(os.environ[RESTARTS]))


def _version(package: str) -> str:
    """The installed version; empty without one, since only workers and gateways need the engine."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Bound(Generic[Metric]):
    """The children of a Prometheus metric by their labels; the metric's own lookup costs as much as an observation."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def __len__(self) -> int:
        return len(self._children)

    def keep(self, wanted: Callable[[tuple[str, ...]], bool]) -> None:
        """Remove the children whose labels are not wanted, here and from the metric."""
        for labels in [labels for labels in self._children if not wanted(labels)]:
            del self._children[labels]
            self._metric.remove(*labels)

    def labels(self, *labels: str) -> Metric:
        """The child with these labels, in the order of their names."""
        found = self._children.get(labels)
        if found is None:
            found = self._children[labels] = self._metric.labels(*labels)
        return found
