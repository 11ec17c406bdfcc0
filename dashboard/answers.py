"""What the dashboard reads: the endpoints of the services with their answers, and the load of each SLO class, which it
sums up from the gateway's metrics.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shared.domain.verdict import Verdict
from shared.errors import Busy, Overloaded
from shared.timeline import RequestTimeline
from shared.wire.api import Event, Operation
from shared.wire.api.monitor import ClusterSummary, DemandAnswer, History, InstanceHistory, InstanceRow, PoliciesInForce
from shared.wire.api.planner import Fleet, PlanSearch, Proposal
from shared.wire.api.predictor import LengthSource
from shared.wire.api.scheduler import Predictions, RequestPage, RequestRow
from shared.wire.api.worker import LogLines, MonitoredDetails

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[T]):
    """A GET request of a service and the type of its answer. path: may contain `{id}`."""

    service: str
    path: str
    answer: type[T]


VERDICT = Endpoint("monitor", "/verdict", Verdict)
CLUSTER = Endpoint("monitor", "/cluster", ClusterSummary)
INSTANCES = Endpoint("monitor", "/instances", list[InstanceRow])
HISTORY = Endpoint("monitor", "/history", History)
INSTANCE_HISTORY = Endpoint("monitor", "/history/instances", InstanceHistory)
DETAILS = Endpoint("monitor", "/instances/{id}/details", MonitoredDetails)
LOG = Endpoint("monitor", "/instances/{id}/log", LogLines)
OPERATIONS = Endpoint("monitor", "/flips", list[Operation])
OPERATION = Endpoint("monitor", "/operations/{id}", Operation)
EVENTS = Endpoint("monitor", "/events", list[Event])
POLICIES = Endpoint("monitor", "/policies", PoliciesInForce)
DEMAND = Endpoint("monitor", "/demand", DemandAnswer)
REQUEST_SEARCH = Endpoint("scheduler", "/requests/search", RequestPage)
PREDICTIONS = Endpoint("scheduler", "/predictions", Predictions)
RECENT_REQUESTS = Endpoint("scheduler", "/requests", list[RequestRow])
REQUEST = Endpoint("scheduler", "/requests/{id}", RequestRow)
TIMELINE = Endpoint("scheduler", "/requests/{id}/timeline", RequestTimeline)
SCHEDULER_HEALTH: Endpoint[Any] = Endpoint("scheduler", "/health", Any)
GATEWAY_HEALTH: Endpoint[Any] = Endpoint("gateway", "/health", Any)
LENGTH_SOURCE = Endpoint("predictor", "/v1/model", LengthSource)
FLEET = Endpoint("planner", "/fleet", Fleet)
PROPOSALS = Endpoint("planner", "/proposals", list[Proposal])
PLAN_SEARCHES = Endpoint("planner", "/plans", list[PlanSearch])
PLAN_SEARCH = Endpoint("planner", "/plans/{id}", PlanSearch)

_WAITING, _DELAYED, _REFUSED = "polyphase_gateway_delayed_jobs", "polyphase_delayed_total", "polyphase_refused_total"
_OVERLOAD = (Busy.code, Overloaded.code)


class ClassLoad(msgspec.Struct, frozen=True):
    """One SLO class at the gateway: requests that wait for those of heavier classes; since its processes started, the
    requests that had to wait and those refused because of overload.
    """

    slo: str
    waiting: int = 0
    delayed: int = 0
    refused: int = 0


def class_loads(*metrics: str) -> list[ClassLoad]:
    """The sums over the texts of `GET /metrics` of all gateway processes, for classes with any count."""
    names = (_WAITING, _DELAYED, _REFUSED)
    lines = (line for text in metrics for line in text.splitlines() if line.startswith(names))
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(names, 0))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name != _REFUSED or sample.labels["cause"] in _OVERLOAD:
                counts[sample.labels["slo"]][sample.name] += int(sample.value)
    return [ClassLoad(slo, *counts[slo].values()) for slo in sorted(counts)]
