"""The dashboard's panels, endpoints and sums fit what the services produce; the types of answers are shared."""

import re
import time
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from dashboard import answers
from dashboard.answers import ClassLoad, Endpoint, class_loads
from dashboard.overview_page import PANELS
from gateway.metrics import GatewayMetrics
from services.cluster_monitor import history
from services.cluster_monitor.routes import router as monitor_routes
from services.global_scheduler.routes import router as scheduler_routes
from services.planner.routes import router as planner_routes
from shared.wire.api.monitor import History


def test_history() -> None:
    grid = history.Grid.up_to(time.time(), 60, 12)
    known = msgspec.json.decode(history._page(grid, [], [], []), type=History)
    assert len(known.time_s) == 12
    assert {name for panel in PANELS for name, *_ in panel.series} <= set(known.series)
    assert {panel.target for panel in PANELS if panel.target} - {"attainment"} <= set(known.targets)


def test_class_loads() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics("demo", registry)
    for cause in ("busy", "busy", "overloaded", "invalid_request"):
        metrics.refused.labels(cause=cause, slo="chat").inc()
    metrics.waiting.labels(slo="batch").set(7)
    metrics._delayed.labels(slo="batch").inc(9)
    assert class_loads(generate_latest(registry).decode()) == [
        ClassLoad("batch", waiting=7, delayed=9),
        ClassLoad("chat", refused=3),
    ]
    other = GatewayMetrics("demo", elsewhere := CollectorRegistry())
    other.refused.labels(cause="busy", slo="chat").inc()
    assert class_loads(*(generate_latest(each).decode() for each in (registry, elsewhere))) == [
        ClassLoad("batch", waiting=7, delayed=9),
        ClassLoad("chat", refused=4),
    ]


def test_paths() -> None:
    routers = {"monitor": monitor_routes, "scheduler": scheduler_routes, "planner": planner_routes}
    endpoints = [each for each in vars(answers).values() if isinstance(each, Endpoint) and each.service in routers]
    assert len(endpoints) > 12
    for each in endpoints:
        paths = [re.sub(r"{\w+}", "{id}", route.path) for route in cast(Any, routers[each.service]).routes]
        assert each.path in paths or each.path == "/health", each.path
