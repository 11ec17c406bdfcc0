"""What the scheduler counts: placements. Series of requests are the gateway's, who sees all of each."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.domain.instance import Role
from shared.domain.route import Route
from shared.errors import Overloaded, PolyphaseError
from shared.runtime.bound import Bound

GONE_SERIES = 1_000  # of instances that are gone: beyond so many all of theirs are removed
_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 0.1)


class SchedulerMetrics:
    """Prometheus metrics of placements, and of the jobs whose end nobody told."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Histogram(
            "polyphase_scheduler_decision_seconds", "Time of one placement", buckets=_DECISION_S, registry=registry
        )
        self._placements = Bound(Counter("polyphase_scheduler_placements", "Placements", ["kind"], registry=registry))
        chosen = Counter(
            "polyphase_scheduler_chosen",
            "Placements that named an instance, for prefill or for decode",
            ["instance_id", "role"],
            registry=registry,
        )
        self._chosen = Bound(chosen)
        self._refused = Counter(
            "polyphase_scheduler_refused",
            "Placements refused or delayed, by error code, SLO class, and what was full",
            ["code", "slo", "cause"],
            registry=registry,
        )
        self.lost = Counter("polyphase_scheduler_jobs_lost", "Open jobs whose gateway is gone", registry=registry)

    def refusal(self, slo: str, error: PolyphaseError) -> None:
        """Count one question that got no route."""
        self._refused.labels(error.code, slo, error.cause if isinstance(error, Overloaded) else "").inc()

    def keep(self, instance_ids: Collection[str]) -> None:
        """These instances are there. New ones come under new names without end, each with series of its own."""
        if len(self._chosen) > GONE_SERIES + len(Role) * len(instance_ids):
            self._chosen.keep(lambda labels: labels[0] in instance_ids)

    def placed(self, route: Route, duration_s: float) -> None:
        """Count one decision."""
        self._decisions.observe(duration_s)
        kind = "local" if route.prefill is None else "partial" if route.decode is not None else "full"
        self._placements.of(kind).inc()
        for role, instance in ((Role.PREFILL, route.prefill), (Role.DECODE, route.decode)):
            if instance is not None:
                self._chosen.of(instance.instance_id, role.value).inc()
