"""All that the page of the cluster reads and does, over HTTP."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from dashboard.dashboard_settings import DashboardSettings
from dashboard.gateway_classes import ClassLoad, class_loads
from dashboard.operations import Action, Intent
from dashboard.reads import Read, Reader
from dashboard.records import (
    AuditEntry,
    ClusterSummary,
    DemandSeen,
    EventRow,
    InstanceRow,
    LengthSource,
    PoliciesInForce,
)
from shared.errors import Unavailable
from shared.timeline import RequestTimeline
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin
from shared.wire.messages import JobReport

WHO = "dashboard"  # stands in the audit


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything on the page, read at about one moment. None: a service that is not configured."""

    cluster: Read[ClusterSummary]
    instances: Read[list[InstanceRow]]
    flips: Read[list[AuditEntry]]
    events: Read[list[EventRow]]
    requests: Read[list[JobReport]]
    policies: Read[PoliciesInForce]
    demand: Read[DemandSeen]
    classes: Read[list[ClassLoad]] | None
    predictor: Read[LengthSource] | None
    gateway: Read[Any] | None

    @property
    def monitor_error(self) -> str:
        """Why something of the monitor is missing; empty when nothing is."""
        return next((read.error for read in self._of_monitor if read.error), "")

    @property
    def scheduler_error(self) -> str:
        """Why something of the scheduler is missing; empty when nothing is."""
        return self.requests.error

    @property
    def monitor_known_s(self) -> float | None:
        """From when the oldest thing is that is shown of the monitor; None when nothing of it is known."""
        return min((read.read_s for read in self._of_monitor if read.value is not None), default=None)

    @property
    def _of_monitor(self) -> tuple[Read[Any], ...]:
        return self.cluster, self.instances, self.flips, self.events, self.policies, self.demand


class Api:
    """The services' HTTP APIs, for callers in threads. One per process; it remembers what each read brought last."""

    def __init__(self, settings: DashboardSettings) -> None:
        self.settings = settings
        self._reader = Reader(settings.read_timeout_s)

    def snapshot(self, phase: str = "") -> Snapshot:
        """Read all there is on the page; requests of that phase only, if one is given."""
        return asyncio.run(self._snapshot(phase))

    def timeline(self, job_id: str) -> Read[RequestTimeline]:
        """The timeline of one finished job."""

        async def read() -> Read[RequestTimeline]:
            async with self._scheduler() as scheduler:
                return await self._reader.read("", lambda: scheduler.timeline(job_id), RequestTimeline)

        return asyncio.run(read())

    def operate(self, intent: Intent) -> AuditEntry:
        """Drain, resume or flip, and wait for the end. Raises what the monitor refuses or fails with."""
        try:
            return msgspec.convert(asyncio.run(self._operate(intent)), AuditEntry)
        except ValueError as error:  # not JSON, or not an entry of the audit
            raise Unavailable(f"the monitor's answer was not understood: {error}") from error

    async def _operate(self, intent: Intent) -> dict[str, Any]:
        timeout_s, target = self.settings.drain_timeout_s, intent.instance_id
        async with self._monitor() as monitor:
            match intent.action:
                case Action.DRAIN:
                    return await monitor.drain(target, force=intent.force, timeout_s=timeout_s, who=WHO)
                case Action.RESUME:
                    return await monitor.resume(target, who=WHO)
                case Action.FLIP:
                    return await monitor.flip(target, force=intent.force, drain_timeout_s=timeout_s, who=WHO)

    async def _snapshot(self, phase: str) -> Snapshot:
        shown = self.settings
        async with self._monitor() as monitor, self._scheduler() as scheduler, asyncio.TaskGroup() as group:
            cluster = group.create_task(self._reader.read("cluster", monitor.cluster, ClusterSummary))
            instances = group.create_task(self._reader.read("instances", monitor.instances, list[InstanceRow]))
            flips = group.create_task(
                self._reader.read("flips", lambda: monitor.flips(limit=shown.flips_shown), list[AuditEntry])
            )
            happened = partial(monitor.events, limit=shown.events_shown)
            events = group.create_task(self._reader.read("events", happened, list[EventRow]))
            wanted = partial(scheduler.requests, phase=phase, limit=shown.requests_shown)
            requests = group.create_task(self._reader.read(f"requests {phase}", wanted, list[JobReport]))
            policies = group.create_task(self._reader.read("policies", monitor.policies, PoliciesInForce))
            demand = group.create_task(self._reader.read("demand", monitor.demand, DemandSeen))
            classes = group.create_task(self._classes())
            predictor = group.create_task(self._optional(shown.predictor_url, "/v1/model", LengthSource))
            gateway = group.create_task(self._optional(shown.gateway_url, "/health", Any))
        return Snapshot(
            cluster.result(),
            instances.result(),
            flips.result(),
            events.result(),
            requests.result(),
            policies.result(),
            demand.result(),
            classes.result(),
            predictor.result(),
            gateway.result(),
        )

    async def _optional(self, url: str, path: str, kind: Any) -> Read[Any] | None:
        if not url:
            return None
        async with JsonClient(url, transport=self._reader.transport()) as client:
            return await self._reader.read(path, lambda: client.call("GET", path), kind)

    async def _classes(self) -> Read[list[ClassLoad]] | None:
        if not self.settings.gateway_url:
            return None
        urls = self.settings.gateway_urls or (self.settings.gateway_url,)

        async def counted() -> list[ClassLoad]:
            return class_loads(*await asyncio.gather(*map(self._metrics, urls)))

        return await self._reader.read("classes", counted, list[ClassLoad])

    async def _metrics(self, url: str) -> str:
        async with JsonClient(url, transport=self._reader.transport()) as client:
            return await client.text("/metrics")

    def _monitor(self) -> MonitorClient:
        return MonitorClient(self.settings.monitor_url, transport=self._reader.transport())

    def _scheduler(self) -> SchedulerAdmin:
        return SchedulerAdmin(self.settings.scheduler_url, transport=self._reader.transport())
