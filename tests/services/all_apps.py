"""Every service's application, not started, as its process makes it."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI

from predictor.app import build_app as predictor
from predictor.settings import PredictorSettings
from services.cluster_monitor.app import create_app as monitor
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.app import create_app as scheduler
from services.global_scheduler.settings import SchedulerSettings
from services.planner.app import create_app as planner
from services.planner.settings import PlannerSettings
from services.worker.app import create_app as worker
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
NAMES = ("monitor", "scheduler", "planner", "worker", "predictor")


def all_apps(**settings: Any) -> dict[str, FastAPI]:
    """By name, with these settings of them all."""
    instance = WorkerSettings(
        instance_id="d0",
        model="demo",
        rpc_port=1,
        http_port=2,
        kv_port=3,
        monitor_url="http://127.0.0.1:9",
        heartbeat_address="tcp://127.0.0.1:9",
        broadcast_address="tcp://127.0.0.1:9",
        engine="emulated",
        **settings,
    )
    return {
        "monitor": monitor(MonitorSettings(**settings)),
        "scheduler": scheduler(SchedulerSettings(**settings)),
        "planner": planner(PlannerSettings(**settings)),
        "worker": worker(instance),
        "predictor": predictor(PredictorSettings(**settings)),
    }
