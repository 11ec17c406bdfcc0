"""One owner a series: what two services export under one name is counted twice by every dashboard that sums it."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics
from predictor.metrics import Metrics
from predictor.service import Predictor
from predictor.settings import PredictorSettings
from services.cluster_monitor.app import create_app as monitor
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.app import create_app as scheduler
from services.global_scheduler.settings import SchedulerSettings
from services.worker.engines.base import EngineStats
from services.worker.metrics import WorkerMetrics
from shared.domain.instance import InstanceLoad, Role
from shared.domain.job import Phase
from shared.timeline import Span
from tests.ports import free_address
from tests.services.control_plane import running, sqlite, text
from tests.services.fake_worker import make_info
from tests.services.global_scheduler.gateways import make_job

# Each process's own plumbing: any that has a database queue or sockets tells of its own, and a sum over them is one.
PLUMBING = ("process_", "python_", "polyphase_store_", "polyphase_wire_dropped")


def _families(exposition: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(exposition)}


def _worker() -> str:
    registry = CollectorRegistry()
    telemetry = cast(Any, SimpleNamespace(load=InstanceLoad, info=make_info("d0", "tcp://127.0.0.1:1")))
    roles = cast(Any, SimpleNamespace(draining=False, role=Role.DECODE, flips=0))
    server = cast(Any, SimpleNamespace(dropped={}))
    dispatcher = cast(Any, SimpleNamespace(choices={}))
    engine = cast(Any, SimpleNamespace(stats=EngineStats))
    WorkerMetrics(make_info("d0", "tcp://a:1"), telemetry, roles, engine, server, dispatcher, registry)
    return generate_latest(registry).decode()


async def test_no_series_has_two_owners(tmp_path: Path) -> None:
    gateway, predictor = CollectorRegistry(), CollectorRegistry()
    GatewayMetrics("demo", gateway)
    Metrics(predictor, Predictor(PredictorSettings()))
    url = sqlite(tmp_path)
    scheduler_settings = SchedulerSettings(
        rpc_address=free_address(), broadcast_address=free_address(), database_url=url, monitor_url="http://127.0.0.1:9"
    )
    monitor_settings = MonitorSettings(
        heartbeat_address=free_address(), broadcast_address=free_address(), database_url=url
    )
    async with running(scheduler(scheduler_settings)) as one, running(monitor(monitor_settings)) as other:
        owners = {
            "gateway": _families(generate_latest(gateway).decode()),
            "predictor": _families(generate_latest(predictor).decode()),
            "scheduler": _families(await text(one, "/metrics")),
            "monitor": _families(await text(other, "/metrics")),
            "worker": _families(_worker()),
        }
    assert all(len(names) > 4 for names in owners.values()), owners
    counts = Counter(name for names in owners.values() for name in names if not name.startswith(PLUMBING))
    twice = {name: [who for who, names in owners.items() if name in names] for name, n in counts.items() if n > 1}
    assert twice == {}
    of_vllm = {who for who, names in owners.items() if any(name.startswith("vllm:") for name in names)}
    assert of_vllm == {"gateway", "worker"}


@pytest.mark.parametrize(
    ("phase", "outcome", "reason"),
    [
        (Phase.COMPLETED, "stop", "stop"),
        (Phase.COMPLETED, "length", "length"),
        (Phase.COMPLETED, "repetition", "repetition"),
        (Phase.CANCELLED, "cancelled", "abort"),
        (Phase.FAILED, "peer_lost", "error"),
    ],
)
def test_finished_reasons_are_those_of_vllm(phase: Phase, outcome: str, reason: str) -> None:
    registry = CollectorRegistry()
    metrics, job = GatewayMetrics("demo", registry), make_job("j")
    job.phase = phase
    job.record(Span.QUEUE, 1.0, 2.0)
    metrics.ended(job, job.report(outcome))
    said = generate_latest(registry).decode()
    assert f'vllm:request_success_total{{finished_reason="{reason}",model_name="demo"}} 1.0' in said
    assert 'vllm:request_queue_time_seconds_count{model_name="demo"} 1.0' in said
