"""All that the pages of the cluster read and do, over HTTP."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from dashboard.accounts import Account, KeyFile
from dashboard.dashboard_settings import DashboardSettings
from dashboard.operations import Action, Intent
from dashboard.reads import Hub, Read
from dashboard.records import (
    AuditEntry,
    ClassLoad,
    ClusterSummary,
    DemandSeen,
    EventRow,
    Found,
    History,
    InstanceHistory,
    InstanceRow,
    LengthSource,
    LogTail,
    PoliciesInForce,
    class_loads,
)
from shared.domain.route import PolicySpec
from shared.domain.verdict import Verdict
from shared.errors import Unavailable
from shared.timeline import RequestTimeline
from shared.wire.messages import JobReport

FRESH = 0.9  # of a refresh's period: what is younger is not read anew
RECENT = 500
Params = Mapping[str, str | int | float]


class Api:
    """The services' HTTP APIs, for callers in threads. One per process; it remembers what each read brought last.

    Each read is on its way when it is returned: ask for all that a page needs, then wait.
    """

    def __init__(self, settings: DashboardSettings) -> None:
        self.settings = settings
        self.hub = Hub(settings, settings.read_timeout_s)
        self.keys = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
        self._monitor, self._scheduler = self.hub.clients.monitor, self.hub.clients.scheduler

    @property
    def fresh_s(self) -> float:
        """What is younger is not read anew."""
        return FRESH * self.settings.refresh_s

    def verdict(self) -> "Future[Read[Verdict]]":
        """How the cluster does."""
        return self._of_monitor("/verdict", Verdict)

    def cluster(self) -> "Future[Read[ClusterSummary]]":
        """Counts, totals and SLO attainment."""
        return self._of_monitor("/cluster", ClusterSummary)

    def instances(self) -> "Future[Read[list[InstanceRow]]]":
        """All of them, dead ones included."""
        return self._of_monitor("/instances", list[InstanceRow])

    def history(self, minutes: int, points: int) -> "Future[Read[History]]":
        """The cluster's last minutes; a step of it passes between two reads."""
        return self._of_monitor("/history", History, {"minutes": minutes, "points": points}, minutes * 60.0 / points)

    def instance_history(self, minutes: int, points: int, instance_id: str = "") -> "Future[Read[InstanceHistory]]":
        """Of one instance, or of all."""
        chosen = {"instance": instance_id} if instance_id else {}
        params: Params = {"minutes": minutes, "points": points, **chosen}
        return self._of_monitor("/history/instances", InstanceHistory, params, minutes * 60.0 / points)

    def details(self, instance_id: str) -> "Future[Read[dict[str, Any]]]":
        """What an instance tells of itself."""
        return self._of_monitor(f"/instances/{instance_id}/details", dict[str, Any])

    def log(self, instance_id: str) -> "Future[Read[LogTail]]":
        """The end of an instance's log."""
        return self._of_monitor(f"/instances/{instance_id}/log", LogTail, {"lines": self.settings.log_lines})

    def flips(self) -> "Future[Read[list[AuditEntry]]]":
        """Flips, drains and resumes, newest first."""
        return self._of_monitor("/flips", list[AuditEntry], {"limit": self.settings.flips_shown})

    def events(self, **filters: str | float) -> "Future[Read[list[EventRow]]]":
        """What happened, newest first; by `kind`, `instance`, `since` and `before`."""
        chosen = {name: value for name, value in filters.items() if value}
        return self._of_monitor("/events", list[EventRow], {"limit": self.settings.events_shown, **chosen})

    def operation(self, operation_id: str) -> "Future[Read[AuditEntry]]":
        """How an operation stands."""
        return self._of_monitor(f"/operations/{operation_id}", AuditEntry)

    def policies(self) -> "Future[Read[PoliciesInForce]]":
        """Those in force, the choices, who changed what, and who follows."""
        return self._of_monitor("/policies", PoliciesInForce)

    def demand(self) -> "Future[Read[DemandSeen]]":
        """What clients ask for."""
        return self._of_monitor("/demand", DemandSeen)

    def search(self, params: Params) -> "Future[Read[Found]]":
        """Requests of all schedulers, out of the database."""
        return self._of_scheduler("/requests/search", Found, params)

    def recent(self) -> "Future[Read[list[JobReport]]]":
        """The newest requests that this scheduler has in memory."""
        return self._of_scheduler("/requests", list[JobReport], {"limit": RECENT})

    def request(self, job_id: str) -> "Future[Read[JobReport]]":
        """One request's row."""
        return self._of_scheduler(f"/requests/{job_id}", JobReport)

    def timeline(self, job_id: str) -> "Future[Read[RequestTimeline]]":
        """A request's timeline, of one under way as far as it is known."""
        return self._of_scheduler(f"/requests/{job_id}/timeline", RequestTimeline)

    def scheduler_health(self) -> "Future[Read[Any]]":
        """Whether the scheduler answers."""
        return self._of_scheduler("/health", Any)

    def gateway_health(self) -> "Future[Read[Any]] | None":
        """Whether the gateway answers; None where none is configured."""
        return self._at(self.settings.gateway_url, "/health", Any)

    def predictor(self) -> "Future[Read[LengthSource]] | None":
        """Who predicts output lengths; None where no predictor is configured."""
        return self._at(self.settings.predictor_url, "/v1/model", LengthSource)

    def classes(self) -> "Future[Read[list[ClassLoad]]] | None":
        """What the gateway holds back or refuses of each class; None where none is configured."""
        if not self.settings.gateway_url:
            return None
        urls = self.settings.gateway_urls or (self.settings.gateway_url,)
        clients = self.hub.clients

        async def counted() -> list[ClassLoad]:
            return class_loads(*await asyncio.gather(*(clients.at(url).text("/metrics") for url in urls)))

        return self.hub.ask("classes", counted, list[ClassLoad], self.fresh_s)

    def allow(self, account: Account) -> None:
        """Raises NotAllowed for somebody who may only look, Unauthorized when their key is no longer in the file."""
        (self.keys.account(account.secret) if self.keys is not None else account).require_operate()

    def operate(self, intent: Intent, operation_id: str, account: Account) -> AuditEntry:
        """Drain, resume or flip, and wait for the end. Raises as `allow`, and what the monitor fails with."""
        self.allow(account)
        try:
            answer = self.hub.run(self._operate(intent, operation_id, account.name)).result()
            return msgspec.convert(answer, AuditEntry)
        except ValueError as error:  # not JSON, or not an entry of the audit
            raise Unavailable(f"the monitor's answer was not understood: {error}") from error
        finally:
            self.hub.forget()

    def set_policies(self, change: Mapping[str, PolicySpec | None], account: Account) -> None:
        """Change the policies of some kinds; None: back to the cluster file's. Raises as `operate` does."""
        self.allow(account)
        try:
            self.hub.run(self._monitor.set_policies(change, who=account.name)).result()
        finally:
            self.hub.forget()

    def close(self) -> None:
        """Close all connections."""
        self.hub.close()

    async def _operate(self, intent: Intent, operation_id: str, name: str) -> dict[str, Any]:
        timeout_s, target = self.settings.drain_timeout_s, intent.instance_id
        monitor, force = self._monitor, intent.force
        match intent.action:
            case Action.DRAIN:
                return await monitor.drain(
                    target, force=force, timeout_s=timeout_s, who=name, operation_id=operation_id
                )
            case Action.RESUME:
                return await monitor.resume(target, who=name, operation_id=operation_id)
            case Action.FLIP:
                return await monitor.flip(
                    target, force=force, drain_timeout_s=timeout_s, who=name, operation_id=operation_id
                )

    def _of_monitor(self, path: str, kind: Any, params: Params | None = None, fresh_s: float = 0.0) -> "Future[Any]":
        call = partial(self._monitor.call, "GET", path, params=params)
        return self.hub.ask(f"monitor {path} {params}", call, kind, max(FRESH * fresh_s, self.fresh_s))

    def _of_scheduler(self, path: str, kind: Any, params: Params | None = None) -> "Future[Any]":
        call = partial(self._scheduler.call, "GET", path, params=params)
        return self.hub.ask(f"scheduler {path} {params}", call, kind, self.fresh_s)

    def _at(self, url: str, path: str, kind: Any) -> "Future[Read[Any]] | None":
        if not url:
            return None
        return self.hub.ask(f"{url}{path}", partial(self.hub.clients.at(url).call, "GET", path), kind, self.fresh_s)
