"""Whom Prometheus is to scrape of what this host runs: for the monitor to tell, and as a file."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings, ScrapeTarget
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.spec import ProcessSpec
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings

NAME = "prometheus.json"
SERVICES: dict[type[object], str] = {
    GatewaySettings: "gateway",
    SchedulerSettings: "scheduler",
    MonitorSettings: "monitor",
    PredictorSettings: "predictor",
    PlannerSettings: "planner",
    WorkerSettings: "worker",
}


def targets_of(processes: Iterable[ProcessSpec]) -> tuple[ScrapeTarget, ...]:
    """Each process that has metrics, under its own port."""
    return tuple(
        ScrapeTarget(service=service, process=one.name, url=one.health_url.removesuffix("/health"))
        for one in processes
        if (service := SERVICES.get(type(one.settings)))
    )


def write(data_dir: Path, processes: Iterable[ProcessSpec]) -> None:
    """The file for Prometheus' `file_sd_configs`, replaced in one step; labels as the monitor gives them."""
    groups = [_group(each) for each in targets_of(processes)]
    fresh = data_dir / f"{NAME}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(groups), indent=1))
    fresh.replace(data_dir / NAME)


def remove(data_dir: Path) -> None:
    """The suite is over: nobody is to miss it."""
    (data_dir / NAME).unlink(missing_ok=True)


def _group(each: ScrapeTarget) -> dict[str, Any]:
    instance = {"instance_id": each.process} if each.service == "worker" else {}
    labels = {"service": each.service, "process": each.process, **instance}
    return {"targets": [urlsplit(each.url).netloc], "labels": labels}
