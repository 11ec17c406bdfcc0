"""The cluster monitor's HTTP API."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.domain.adapters import AdapterSet
from shared.domain.instance import InstanceInfo, Role
from shared.domain.route import PolicySpec
from shared.domain.slo import SloReport
from shared.domain.verdict import Verdict
from shared.errors import DeadlineExceeded, OutcomeUnknown, Unavailable
from shared.runtime.actor import acting_as
from shared.wire.api import DemandProfile, Event, Operation, Origin, SchedulerNews
from shared.wire.api.monitor import (
    AdaptersInForce,
    ClusterSummary,
    DemandAnswer,
    History,
    InstanceRow,
    NewsAccepted,
    PoliciesInForce,
    Registered,
)
from shared.wire.api.worker import LogLines
from shared.wire.clients.http import JsonClient, unanswered
from shared.wire.messages import AdaptersRequest, LoadRequest, UnloadRequest

SLACK_S = 10.0  # of a flip beyond its drain; the deadline of an operation is their sum
LEAVE_S = 1.0
POLICIES_S = 10.0  # a change waits for the database
LOAD_S = 150.0  # of an adapter: instances read it from a disk, one change after the other
FOLLOW_S = 2.0  # for an answer, beyond the wait that is requested
EVENTS_S = 5.0
ANSWER_S = 1.0  # for the answer, when the deadline has passed


class MonitorClient(JsonClient):
    """Calls to a monitor. They raise errors of `shared.errors`."""

    async def register(self, info: InstanceInfo, role: Role) -> Registered:
        """Join the cluster. Raises Incompatible with the difference, Conflict when the id is taken."""
        return await self.call("POST", "/instances", Registered, body={**msgspec.structs.asdict(info), "role": role})

    async def leave(self, info: InstanceInfo) -> None:
        """Report that this process stops. Raises NotFound, Conflict."""
        path, body = f"/instances/{info.instance_id}/leave", {"generation": info.generation}
        await self.call("POST", path, dict[str, str], body=body, timeout_s=LEAVE_S)

    async def instances(self) -> list[InstanceRow]:
        """All instances, dead ones included."""
        return await self.get("/instances", list[InstanceRow])

    async def instance(self, instance_id: str) -> InstanceRow:
        """One instance. Raises NotFound."""
        return await self.get(f"/instances/{instance_id}", InstanceRow)

    async def log(self, instance_id: str, lines: int) -> list[str]:
        """The last lines of an instance's log, oldest first. Raises NotFound, Unavailable."""
        return (await self.get(f"/instances/{instance_id}/log", LogLines, lines=lines)).lines

    async def drain(
        self, instance_id: str, *, force: bool = False, timeout_s: float, who: str = "", operation_id: str = ""
    ) -> Operation:
        """Give the instance no new work and wait for its accepted work. Raises as `flip` does."""
        body = {"force": force, "timeout_s": timeout_s}
        return await self._operate(f"/instances/{instance_id}/drain", body, timeout_s, who, operation_id)

    async def resume(self, instance_id: str, *, who: str = "", operation_id: str = "") -> Operation:
        """Give the instance work again."""
        return await self._operate(f"/instances/{instance_id}/resume", {}, 0.0, who, operation_id)

    async def flip(
        self,
        instance_id: str,
        *,
        force: bool = False,
        drain_timeout_s: float = 30.0,
        who: str = "",
        operation_id: str = "",
        why: str | None = None,
        origin: Origin | None = None,
        to: Role | None = None,
    ) -> Operation:
        """Change the role of the instance. Raises Conflict for the last ready instance of a role, unless forced, and
        for an instance that has the role `to` already; OutcomeUnknown without an answer: `operation` returns the
        outcome later.
        """
        body = {"force": force, "drain_timeout_s": drain_timeout_s, "why": why, "to_role": to}
        if origin is not None:  # by default an operator's
            body["origin"] = origin
        return await self._operate(f"/instances/{instance_id}/flip", body, drain_timeout_s, who, operation_id)

    async def move(self, job_id: str, *, to: str = "", who: str = "", operation_id: str = "") -> Operation:
        """Let a request that decodes go on at the instance `to`, or at any. Its gateway moves it, or does not, later.

        Raises NotFound for an unknown request or instance; Conflict for a request that does not decode or whose gateway
        migrates none, and for an instance that is not ready to decode; Unavailable where an instance that may have it
        does not answer; OutcomeUnknown without an answer of the monitor.
        """
        body = {"to": to or None}
        return await self._operate(f"/requests/{job_id}/move", body, 0.0, who, operation_id)

    async def operation(self, operation_id: str) -> Operation:
        """The state of an operation. Raises NotFound for one that did not arrive."""
        return await self.get(f"/operations/{operation_id}", Operation)

    async def forget(self, instance_id: str, *, who: str = "") -> None:
        """Remove a dead instance. Raises NotFound, or Conflict while it is alive."""
        await self.call("DELETE", f"/instances/{instance_id}", dict[str, str], headers=acting_as(who))

    async def flips(self, limit: int = 100) -> list[Operation]:
        """The log of flips, drains, resumes and moves, newest first."""
        return await self.get("/flips", list[Operation], limit=limit)

    async def events(
        self,
        *,
        limit: int = 100,
        since_s: float = 0.0,
        before_s: float | None = None,
        kinds: Sequence[str] = (),
        instance: str = "",
    ) -> list[Event]:
        """Events after `since_s` and before `before_s`, newest first; of some kinds or of one instance, if given."""
        params: dict[str, Any] = {"limit": limit, "since": since_s}
        params |= {"before": before_s} if before_s is not None else {}
        params |= {"kind": list(kinds)} if kinds else {}
        params |= {"instance": instance} if instance else {}
        return await self.call("GET", "/events", list[Event], params=params, timeout_s=EVENTS_S)

    async def report_event(self, event: Mapping[str, str]) -> None:
        """Report an event; repeating is safe. Raises InvalidRequest."""
        await self.call("POST", "/events", dict[str, bool], body=dict(event))

    async def demand(self) -> DemandAnswer:
        """The demand: its profile, last seconds and shifts, and the roles that would serve it best."""
        return await self.get("/demand", DemandAnswer)

    async def demand_profile(self) -> DemandProfile:
        """The profile alone, as early as possible, and the flips that people's flips forbid."""
        return await self.get("/demand/profile", DemandProfile)

    async def policies(self) -> PoliciesInForce:
        """The policies in force and of the cluster file, their changes, the choices, and the processes that follow."""
        return await self.get("/policies", PoliciesInForce)

    async def set_policies(self, change: Mapping[str, PolicySpec | None], *, who: str = "") -> PoliciesInForce:
        """Change the policies of some kinds; None: the cluster file's. Returns the same as `policies`.

        Raises, without a change, InvalidRequest that names the choices, or Unavailable when the database does not
        accept it.
        """
        return await self.call(
            "PUT", "/policies", PoliciesInForce, body=dict(change), headers=acting_as(who), timeout_s=POLICIES_S
        )

    async def adapters(self) -> AdaptersInForce:
        """The adapters that were loaded at run time, and the instances and gateways that serve them."""
        return await self.get("/adapters", AdaptersInForce)

    async def load_adapter(self, request: LoadRequest) -> AdapterSet:
        """Returns when all ready instances and all gateways have the adapter.

        Raises, without a change, InvalidRequest for a name that is taken, NotFound for a folder without an adapter, the
        error of an instance that could not load it, with its name, or Unavailable.
        """
        body = {"name": request.name, "path": request.path, "in_place": request.in_place}
        return await self.call(
            "POST", "/adapters/load", AdapterSet, body=body, headers=acting_as(request.who), timeout_s=LOAD_S
        )

    async def unload_adapter(self, request: UnloadRequest) -> AdapterSet:
        """Returns when no gateway accepts requests for it any more. Raises NotFound."""
        body = {"name": request.name}
        return await self.call(
            "POST", "/adapters/unload", AdapterSet, body=body, headers=acting_as(request.who), timeout_s=LOAD_S
        )

    async def follow_adapters(self, request: AdaptersRequest) -> AdapterSet:
        """See `AdaptersRequest`."""
        return await self.call(
            "POST", "/adapters/follow", AdapterSet, body=request, timeout_s=request.wait_s + FOLLOW_S
        )

    async def scheduler_news(self, scheduler_id: str, news: SchedulerNews) -> NewsAccepted:
        """Report what a scheduler knows. Raises InvalidRequest, and accepts nothing then."""
        return await self.call("POST", f"/schedulers/{scheduler_id}/news", NewsAccepted, body=news)

    async def verdict(self) -> Verdict:
        """The health of the cluster."""
        return await self.get("/verdict", Verdict)

    async def slo(self) -> list[SloReport]:
        """Attainment by class and window."""
        return await self.get("/slo", list[SloReport])

    async def history(self, minutes: int, points: int) -> History:
        """Series of the cluster over the last minutes."""
        return await self.get("/history", History, minutes=minutes, points=points)

    async def cluster(self) -> ClusterSummary:
        """A summary for dashboards."""
        return await self.get("/cluster", ClusterSummary)

    async def _operate(self, path: str, body: dict[str, Any], wait_s: float, who: str, operation_id: str) -> Operation:
        """path: ends with what is operated, and how."""
        operation_id, limit_s = operation_id or uuid.uuid4().hex, wait_s + SLACK_S
        terms = {"operation_id": operation_id, "deadline_s": time.time() + limit_s}
        try:
            return await self.call(
                "POST", path, Operation, body={**body, **terms}, headers=acting_as(who), timeout_s=limit_s + ANSWER_S
            )
        except (DeadlineExceeded, Unavailable) as error:
            if not unanswered(error):
                raise
            *_, subject, what = path.split("/")
            message = f"whether the {what} of {subject} was carried out is unknown: {error.message}"
            raise OutcomeUnknown(message, operation_id=operation_id) from error
