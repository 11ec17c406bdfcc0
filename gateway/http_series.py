"""HTTP as vLLM's server counts it, counted at the edge: most streams never reach the application's middleware."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.runtime.metrics import Bound

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
_FINE = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60),)
_COARSE = (0.1, 0.5, 1)


class HttpSeries:
    """The names and labels of prometheus-fastapi-instrumentator; a handler that is not served is `none`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Bound(
            Counter(
                "http_requests",
                "Answers by method, status and handler.",
                ["method", "status", "handler"],
                registry=registry,
            )
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds",
            "Time to the end of an answer, in many buckets.",
            buckets=_FINE,
            registry=registry,
        )
        self._coarse = Bound(
            Histogram(
                "http_request_duration_seconds",
                "Time to the end of an answer.",
                ["method", "handler"],
                buckets=_COARSE,
                registry=registry,
            )
        )

    def answered(self, scope: Any, served: bool, status: int, took_s: float) -> None:
        """Count an answer. `served`: its path is one of the API."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        handler = scope["path"] if served else "none"
        self._requests.of(method, f"{status // 100}xx", handler).inc()
        self._fine.observe(took_s)
        self._coarse.of(method, handler).observe(took_s)
