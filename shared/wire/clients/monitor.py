"""The cluster monitor's HTTP API."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.domain.instance import InstanceInfo, Role
from shared.domain.route import PolicySpec
from shared.errors import DeadlineExceeded, OutcomeUnknown, Unavailable
from shared.runtime.actor import acting_as
from shared.wire.api import Origin, SchedulerNews
from shared.wire.clients.http import JsonClient, unanswered

SLACK_S = 10.0  # of a flip beyond its drain; the deadline of an operation is their sum
LEAVE_S = 1.0
POLICIES_S = 10.0  # a change waits for the database
ANSWER_S = 1.0  # for the answer, when the deadline has passed


class MonitorClient(JsonClient):
    """Calls to a monitor. They raise errors of `shared.errors`."""

    async def register(self, info: InstanceInfo, role: Role) -> dict[str, Any]:
        """Join the cluster. Raises Incompatible with the difference, Conflict when the id is taken."""
        body = {**msgspec.to_builtins(info), "role": role.value}
        return await self.object("POST", "/instances", body=body)

    async def leave(self, info: InstanceInfo) -> None:
        """Report that this process stops. Raises NotFound, Conflict."""
        await self.call(
            "POST", f"/instances/{info.instance_id}/leave", body={"generation": info.generation}, timeout_s=LEAVE_S
        )

    async def instances(self) -> list[dict[str, Any]]:
        """All instances, dead ones included."""
        return await self.rows("/instances")

    async def instance(self, instance_id: str) -> dict[str, Any]:
        """One instance. Raises NotFound."""
        return await self.object("GET", f"/instances/{instance_id}")

    async def drain(
        self, instance_id: str, *, force: bool = False, timeout_s: float, who: str = "", operation_id: str = ""
    ) -> dict[str, Any]:
        """Give the instance no new work and wait for its accepted work. Raises as `flip` does."""
        body = {"force": force, "timeout_s": timeout_s}
        return await self._operate(instance_id, "drain", body, timeout_s, who, operation_id)

    async def resume(self, instance_id: str, *, who: str = "", operation_id: str = "") -> dict[str, Any]:
        """Give the instance work again."""
        return await self._operate(instance_id, "resume", {}, 0.0, who, operation_id)

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
    ) -> dict[str, Any]:
        """Change the role of the instance. Raises Conflict for the last ready instance of a role, unless forced, and
        for an instance that has the role `to` already; OutcomeUnknown without an answer: `operation` returns the
        outcome later.
        """
        body = {"force": force, "drain_timeout_s": drain_timeout_s, "why": why, "to_role": to}
        if origin is not None:  # by default an operator's
            body["origin"] = origin
        return await self._operate(instance_id, "flip", body, drain_timeout_s, who, operation_id)

    async def operation(self, operation_id: str) -> dict[str, Any]:
        """The state of an operation. Raises NotFound for one that did not arrive."""
        return await self.object("GET", f"/operations/{operation_id}")

    async def forget(self, instance_id: str, *, who: str = "") -> None:
        """Remove a dead instance. Raises NotFound, or Conflict while it is alive."""
        await self.call("DELETE", f"/instances/{instance_id}", headers=acting_as(who))

    async def flips(self, limit: int = 100) -> list[dict[str, Any]]:
        """The audit of flips, drains and resumes, newest first."""
        return await self.rows("/flips", params={"limit": limit})

    async def events(self, *, limit: int = 100, since_s: float = 0.0, kind: str = "") -> list[dict[str, Any]]:
        """Events after `since_s`, newest first; of one kind, if given."""
        params: dict[str, str | int | float] = {"limit": limit, "since": since_s, **({"kind": kind} if kind else {})}
        return await self.rows("/events", params=params)

    async def happened(self, event: Mapping[str, str]) -> None:
        """Report an event; repeating is safe. Raises InvalidRequest."""
        await self.call("POST", "/events", body=dict(event))

    async def demand(self) -> dict[str, Any]:
        """The demand: its profile, last seconds and shifts, and the roles that would serve it best."""
        return await self.object("GET", "/demand")

    async def demand_profile(self) -> dict[str, Any]:
        """The profile alone, as early as possible, and the flips that people's flips forbid."""
        return await self.object("GET", "/demand/profile")

    async def policies(self) -> dict[str, Any]:
        """The policies in force and of the cluster file, their changes, the choices, and the processes that follow."""
        return await self.object("GET", "/policies")

    async def set_policies(self, change: Mapping[str, PolicySpec | None], *, who: str = "") -> dict[str, Any]:
        """Change the policies of some kinds; None: the cluster file's. Returns the same as `policies`.

        Raises, without a change, InvalidRequest that names the choices, or Unavailable when the database does not
        accept it.
        """
        return await self.object(
            "PUT", "/policies", body=msgspec.to_builtins(change), headers=acting_as(who), timeout_s=POLICIES_S
        )

    async def scheduler_news(self, scheduler_id: str, news: SchedulerNews) -> dict[str, int]:
        """Report what a scheduler knows.

        Returns the numbers of accepted seconds and outcomes. Raises InvalidRequest, and accepts nothing then.
        """
        body = msgspec.to_builtins(news)
        answer: dict[str, int] = await self.call("POST", f"/schedulers/{scheduler_id}/news", body=body)
        return answer

    async def slo(self) -> list[dict[str, Any]]:
        return await self.rows("/slo")

    async def cluster(self) -> dict[str, Any]:
        """A summary for dashboards."""
        return await self.object("GET", "/cluster")

    async def _operate(
        self, instance_id: str, what: str, body: dict[str, Any], wait_s: float, who: str, operation_id: str
    ) -> dict[str, Any]:
        operation_id, limit_s = operation_id or uuid.uuid4().hex, wait_s + SLACK_S
        terms = {"operation_id": operation_id, "deadline_s": time.time() + limit_s}
        try:
            answer: dict[str, Any] = await self.call(
                "POST",
                f"/instances/{instance_id}/{what}",
                body={**body, **terms},
                headers=acting_as(who),
                timeout_s=limit_s + ANSWER_S,
            )
        except (DeadlineExceeded, Unavailable) as error:
            if not unanswered(error):
                raise
            said = f"whether the {what} of {instance_id} was carried out is unknown: {error.message}"
            raise OutcomeUnknown(said, operation_id=operation_id) from error
        return answer
