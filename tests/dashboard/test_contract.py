"""The dashboard decodes what the services themselves produce, field by field."""

import re
import time
from dataclasses import asdict
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from dashboard import answers
from dashboard.answers import (
    ClassLoad,
    DemandAnswer,
    Endpoint,
    History,
    InstanceRow,
    LengthSource,
    PoliciesInForce,
    RequestRow,
    SearchPage,
    Step,
    class_loads,
)
from dashboard.overview_page import PANELS
from gateway.metrics import GatewayMetrics
from predictor.service import Predictor
from predictor.settings import PredictorSettings
from services.cluster_monitor import history
from services.cluster_monitor.edge import DrainIn, FlipIn
from services.cluster_monitor.events import Events
from services.cluster_monitor.policy_book import Followers, PolicyBook
from services.cluster_monitor.registry import Record
from services.cluster_monitor.routes import router as monitor_routes
from services.cluster_monitor.slo import DemandService
from services.cluster_monitor.slo_windows import SloOutcome, SloWindows
from services.global_scheduler.reports import plain
from services.global_scheduler.routes import router as scheduler_routes
from services.worker.app import Details
from shared.domain.demand import DemandSecond, RolesWanted, Shift
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry, Role
from shared.domain.job import Phase
from shared.domain.policies import KINDS
from shared.domain.slo import SloReport
from shared.policy.registry import from_file
from shared.store.reading import SHOWN
from shared.wire.messages import JobReport, StepRecord


def record() -> Record:
    same = Compatibility("f00d", "emulated", "1", 1, KvGeometry(6, 4, 64))
    info = InstanceInfo("p0", 1, "m", same, "H100", "bfloat16", 1, 16, 10, 2048, 512, "tcp://a:1", "http://a:2", ())
    return Record(info, Role.PREFILL, cast(Any, SimpleNamespace(connected=True)), 1.0, 1.0)


def test_instances() -> None:
    row = msgspec.convert(record().describe(), InstanceRow)
    assert (row.instance_id, row.role, row.emulated) == ("p0", Role.PREFILL, True)
    assert row.kv_usage is None  # no load report yet


def test_history() -> None:
    grid = history.Grid.of(60, 12, time.time())
    known = msgspec.json.decode(history._page(grid, [], [], []), type=History)
    assert len(known.time_s) == 12
    assert {name for panel in PANELS for name, *_ in panel.series} <= set(known.series)
    assert {panel.target for panel in PANELS if panel.target} - {"attainment"} <= set(known.targets)


def test_steps() -> None:
    rates = SimpleNamespace(start=None, step=None)
    idle = cast(Any, SimpleNamespace())
    step = Details(idle, cast(Any, rates), idle, idle)._step(StepRecord(7, 5.0, 0.031, 0.02, ((512, 0),), 2, 900))
    known = msgspec.convert(step, Step)
    assert (known.kind, known.seconds, known.prefill_tokens, known.decodes) == ("both", 0.031, 512, 2)


def test_request_search() -> None:
    columns = {column.name for column in SHOWN}
    assert set(RequestRow.__struct_fields__) - {"timeline", "prediction", "asked", "max_tokens", "losses"} <= columns
    row = {**plain(JobReport("job", "gateway-0", Phase.DECODE, 1.0, 10)), "caller": "ann"}
    assert msgspec.convert({"rows": [row], "more": True}, SearchPage).rows[0].caller == "ann"


def test_slo() -> None:
    windows = SloWindows((60.0,), Random(1))
    windows.add(SloOutcome("default", 1.0, 0.1, None, 2.0, 0.2), 1.0)
    report = msgspec.convert(asdict(windows.reports(1.0)[0]), SloReport)
    assert (report.requests, report.attainment, report.ttft_s["p99"]) == (1, 1.0, 0.1)
    assert (report.ttft_target_s, report.tpot_target_s) == (2.0, 0.2)


def test_demand() -> None:
    service = DemandService(Events(cast(Any, SimpleNamespace(put=lambda *_: None))), CollectorRegistry())
    service.take(DemandSecond("s0", int(time.time()) - ago, 10, 5_000.0, per_ttft=5.0) for ago in (3, 2))
    service.step()
    known = msgspec.convert(service.describe(RolesWanted(3, 5, 0.25, 0.01)), DemandAnswer)
    assert [(one.requests, one.prompt_tokens) for one in known.seconds] == [(10, 500.0)] * 2
    assert known.roles == RolesWanted(3, 5, 0.25, 0.01)
    shift = {"at_s": 7.0, **msgspec.to_builtins(Shift("prompts", 100.0, 900.0, 4.0, 6.0))}
    assert msgspec.convert({**service.describe(None), "shifts": [shift]}, DemandAnswer).shifts[0].at_s == 7.0


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


def test_policies() -> None:
    book = PolicyBook(from_file({"split": {"name": "fraction", "fraction": 0.5}}), cast(Any, None), lambda *_: None)
    followers = Followers(cast(Any, SimpleNamespace(all=lambda: [record()])))
    followers.update("s0", 7, "unknown policy")
    known = msgspec.convert({**book.describe(), "followers": followers.describe(book.policies)}, PoliciesInForce)
    assert tuple(known.policies) == KINDS
    assert known.policies["split"].parameters == {"fraction": 0.5}
    assert [(one.name, one.follows, one.trouble) for one in known.followers] == [
        ("s0", False, "unknown policy"),
        ("p0", True, ""),
    ]


def test_predictor() -> None:
    described = Predictor(PredictorSettings()).describe()
    known = msgspec.convert(described, LengthSource, str_keys=True)
    assert (known.source, known.checkpoint.state, known.checkpoint.path) == ("observed", "missing", None)
    assert (known.why, known.fallen_back) == (described.get("why", ""), False)
    assert known.reality.answers == described.get("reality", {}).get("answers", 0)
    assert known.fallbacks == described.get("fallbacks", {})


def test_paths_and_bodies() -> None:
    routers = (monitor_routes, scheduler_routes)
    paths = {route.path for router in routers for route in cast(Any, router.routes)}
    endpoints = [each for each in vars(answers).values() if isinstance(each, Endpoint)]
    used = [each.path for each in endpoints if each.service in ("monitor", "scheduler") and each.path != "/health"]
    assert len(used) > 12
    for path in used:
        assert any(re.sub(r"{\w+}", "{id}", known) == path for known in paths), path
    for what in ("drain", "resume", "flip"):
        assert f"/instances/{{instance_id}}/{what}" in paths
    assert FlipIn(force=False, drain_timeout_s=30.0)
    assert DrainIn(timeout_s=30.0)
