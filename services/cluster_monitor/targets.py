"""Whom Prometheus is to scrape: every process that this monitor knows, or was told of."""

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request

from services.cluster_monitor.record import Record
from services.cluster_monitor.routes import Monitor
from services.cluster_monitor.settings import ScrapeTarget

SERVICE, PROCESS, INSTANCE = "service", "process", "instance_id"  # labels; none of them ever changes for a process


def targets_router(told: Iterable[ScrapeTarget]) -> APIRouter:
    """The route that Prometheus' `http_sd_configs` ask."""
    router = APIRouter()

    @router.get("/sd/prometheus")
    async def prometheus(monitor: Monitor, request: Request) -> list[dict[str, Any]]:
        """Every process of the cluster that has metrics, with its service, its name and its instance id.

        503 from a monitor that stands by: Prometheus goes on with what it was told last.
        """
        return targets(told, monitor.registry.all(), request.url.netloc)

    return router


def targets(told: Iterable[ScrapeTarget], records: Iterable[Record], own_address: str) -> list[dict[str, Any]]:
    """As Prometheus' HTTP service discovery reads it.

    Dead instances are in it until they return or are forgotten: nobody is to miss that they are down. `own_address`:
    where the monitor was reached; it speaks for itself unless it was told of monitors.
    """
    known = list(told)
    if not any(each.service == "monitor" for each in known):
        known.append(ScrapeTarget(service="monitor", process="monitor", url=f"http://{own_address}"))
    return [*_of_told(known), *_of_instances(records)]


def _of_told(known: Iterable[ScrapeTarget]) -> Iterator[dict[str, Any]]:
    for each in known:
        yield _group(each.url, {SERVICE: each.service, PROCESS: each.process})


def _of_instances(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    for record in sorted(records, key=lambda each: each.instance_id):
        name = record.instance_id
        yield _group(record.info.http, {SERVICE: "worker", PROCESS: name, INSTANCE: name})


def _group(url: str, labels: dict[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    scheme = {"__scheme__": parts.scheme} if parts.scheme != "http" else {}
    return {"targets": [parts.netloc], "labels": {**labels, **scheme}}
