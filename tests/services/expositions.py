"""What each kind of process answers to `GET /metrics`, with no request behind it but one job and one import."""

import time
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from gateway.metrics import GatewayMetrics
from predictor.app import build_app as predictor
from predictor.settings import PredictorSettings
from services.cluster_monitor.app import create_app as monitor
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.app import create_app as scheduler
from services.global_scheduler.settings import SchedulerSettings
from services.planner.app import create_app as planner
from services.planner.settings import PlannerSettings
from services.worker import app as worker
from services.worker.settings import WorkerSettings
from shared.domain.instance import Role
from shared.domain.job import Phase
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.errors import Overloaded
from shared.runtime.metrics import describe_process
from shared.timeline import Span
from tests.ports import free_address, free_port
from tests.services.control_plane import running, sqlite, text
from tests.services.global_scheduler.gateways import make_job


async def expositions(folder: Path) -> dict[str, str]:
    """By service. The gateway's series are those of its own registry; its process adds nothing else."""
    nobody, url = "http://127.0.0.1:9", sqlite(folder)
    scheduler_settings = SchedulerSettings(
        rpc_address=free_address(), broadcast_address=free_address(), database_url=url, monitor_url=nobody
    )
    monitor_settings = MonitorSettings(
        heartbeat_address=free_address(), broadcast_address=free_address(), database_url=url
    )
    planner_settings = PlannerSettings(monitor_url=nobody, broadcast_address=free_address(), database_url=url)
    apps = {
        "scheduler": scheduler(scheduler_settings),
        "monitor": monitor(monitor_settings),
        "planner": planner(planner_settings),
        "predictor": predictor(PredictorSettings(rpc_address=free_address())),
    }
    found = {"gateway": gateway(), "worker": await _worker()}
    for name, app in apps.items():
        async with running(app) as transport:
            found[name] = await text(transport, "/metrics")
    return found


def gateway() -> str:
    """After a job that failed and one that is refused."""
    registry = CollectorRegistry()
    describe_process(registry)
    metrics = GatewayMetrics("m", registry)
    metrics.begin_classes(["default"])
    for outcome in ("peer_lost", Overloaded.code):
        job = make_job("j")
        job.phase, job.delays, job.attempt = Phase.FAILED, 1, 2
        job.record(Span.QUEUE, time.time(), time.time())
        metrics.ended(job, job.report(outcome))
    metrics.waiting.labels(slo="batch").set(0)
    metrics.predictions.labels("ok").inc()
    metrics.records.labels("kept").inc()
    metrics.http.answered({"method": "POST", "path": "/v1/completions"}, True, 200, 0.1)
    return generate_latest(registry).decode()


async def _worker() -> str:
    settings = WorkerSettings(
        instance_id="d0",
        role=Role.DECODE,
        model="m",
        engine="emulated",
        accelerator="A100-SXM-80",
        monitor_url="http://127.0.0.1:9",
        heartbeat_address=free_address(),
        broadcast_address=free_address(),
        rpc_port=free_port(),
        http_port=free_port(),
        kv_port=free_port(),
        kv_cache_bytes=1 << 30,
    )
    registry = CollectorRegistry()
    describe_process(registry)
    async with worker.running(settings, registry) as instance:
        handle = KvHandle("t", "p0", 1, "f", (), 8, "bfloat16")
        instance.transfers.ended(handle, TransferReport(TransferOutcome.PULLED, 8, 64, 1.0, 1.5, transport="tcp"))
        return generate_latest(registry).decode()
