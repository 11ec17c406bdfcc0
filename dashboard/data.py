"""All that the dashboard reads and does, over HTTP. A read never raises: it brings a value or a reason."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from dashboard.dashboard_settings import DashboardSettings
from dashboard.operations import Action, Intent
from dashboard.records import AuditEntry, ClusterSummary, InstanceRow, LengthSource, PoliciesInForce
from shared.errors import PolyphaseError, Unavailable
from shared.timeline import RequestTimeline
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin
from shared.wire.messages import JobReport

WHO = "dashboard"  # stands in the audit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """What came of one read: a value, or the reason why there is none."""

    value: T | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything on the page, read at about one moment. None: a service that is not configured."""

    cluster: Read[ClusterSummary]
    instances: Read[list[InstanceRow]]
    flips: Read[list[AuditEntry]]
    requests: Read[list[JobReport]]
    policies: Read[PoliciesInForce]
    predictor: Read[LengthSource] | None
    gateway: Read[Any] | None

    @property
    def monitor_error(self) -> str:
        """Why something of the monitor is missing; empty when nothing is."""
        return self.cluster.error or self.instances.error or self.flips.error

    @property
    def scheduler_error(self) -> str:
        """Why something of the scheduler is missing; empty when nothing is."""
        return self.requests.error or self.policies.error


class Api:
    """The services' HTTP APIs, for callers in threads. One per process: it keeps nothing but its settings."""

    def __init__(self, settings: DashboardSettings) -> None:
        self.settings = settings
        self._tls = ssl.create_default_context()  # 10 ms each: not once a refresh and service

    def snapshot(self, phase: str = "") -> Snapshot:
        """Read all there is on the page; requests of that phase only, if one is given."""
        return asyncio.run(self._snapshot(phase))

    def timeline(self, job_id: str) -> Read[RequestTimeline]:
        """The timeline of one finished job."""

        async def read() -> Read[RequestTimeline]:
            async with self._scheduler() as scheduler:
                return await self._read(lambda: scheduler.timeline(job_id), RequestTimeline)

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
            cluster = group.create_task(self._read(monitor.cluster, ClusterSummary))
            instances = group.create_task(self._read(monitor.instances, list[InstanceRow]))
            flips = group.create_task(self._read(lambda: monitor.flips(limit=shown.flips_shown), list[AuditEntry]))
            requests = group.create_task(
                self._read(lambda: scheduler.requests(phase=phase, limit=shown.requests_shown), list[JobReport])
            )
            policies = group.create_task(self._read(scheduler.policies, PoliciesInForce))
            predictor = group.create_task(self._optional(shown.predictor_url, "/v1/model", LengthSource))
            gateway = group.create_task(self._optional(shown.gateway_url, "/health", Any))
        return Snapshot(
            cluster.result(), instances.result(), flips.result(), requests.result(), policies.result(),
            predictor.result(), gateway.result(),
        )  # fmt: skip

    async def _optional(self, url: str, path: str, kind: Any) -> Read[Any] | None:
        if not url:
            return None
        async with JsonClient(url, transport=self._transport()) as client:
            return await self._read(lambda: client.call("GET", path), kind)

    async def _read(self, call: Callable[[], Awaitable[Any]], kind: Any) -> Read[Any]:
        try:
            async with asyncio.timeout(self.settings.read_timeout_s):
                return Read(msgspec.convert(await call(), kind))
        except TimeoutError:
            return Read(None, f"no answer within {self.settings.read_timeout_s:g} s")
        except PolyphaseError as error:
            return Read(None, error.message)
        except ValueError as error:  # not JSON, or not of the kind: msgspec.ValidationError is one too
            return Read(None, f"its answer was not understood: {error}")

    def _monitor(self) -> MonitorClient:
        return MonitorClient(self.settings.monitor_url, transport=self._transport())

    def _scheduler(self) -> SchedulerAdmin:
        return SchedulerAdmin(self.settings.scheduler_url, transport=self._transport())

    def _transport(self) -> httpx.AsyncHTTPTransport:
        """Of our own, so that no proxy of the environment comes between us and the cluster."""
        return httpx.AsyncHTTPTransport(verify=self._tls)
