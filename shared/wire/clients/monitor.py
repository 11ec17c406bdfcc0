"""The cluster monitor's HTTP API."""

from typing import Any

import msgspec

from shared.domain.instance import InstanceInfo, Role
from shared.wire.clients.http import JsonClient

ACTOR_HEADER = "x-polyphase-actor"
_SLACK_S = 10.0  # what a flip takes beyond its drain, at most


class MonitorClient(JsonClient):
    """Typed calls to one monitor. All raise errors of `shared.errors`."""

    async def register(self, info: InstanceInfo, role: Role) -> dict[str, Any]:
        """Join the cluster. Raises Incompatible naming what differs, Conflict when the id is taken."""
        body = {**msgspec.to_builtins(info), "role": role.value}
        answer: dict[str, Any] = await self.call("POST", "/instances", body=body)
        return answer

    async def instances(self) -> list[dict[str, Any]]:
        """All instances, dead ones included."""
        answer: list[dict[str, Any]] = await self.call("GET", "/instances")
        return answer

    async def instance(self, instance_id: str) -> dict[str, Any]:
        """One instance. Raises NotFound."""
        answer: dict[str, Any] = await self.call("GET", f"/instances/{instance_id}")
        return answer

    async def drain(
        self, instance_id: str, *, force: bool = False, timeout_s: float, who: str = ""
    ) -> dict[str, Any]:
        """Stop giving it work and wait for what it has. Raises Conflict as `flip` does."""
        return await self._operate(instance_id, "drain", {"force": force, "timeout_s": timeout_s}, timeout_s, who)

    async def resume(self, instance_id: str, *, who: str = "") -> dict[str, Any]:
        """Give it work again."""
        return await self._operate(instance_id, "resume", {}, 0.0, who)

    async def flip(
        self, instance_id: str, *, force: bool = False, drain_timeout_s: float = 30.0, who: str = ""
    ) -> dict[str, Any]:
        """Change its role. Raises Conflict for the last ready instance of a role, unless forced."""
        body = {"force": force, "drain_timeout_s": drain_timeout_s}
        return await self._operate(instance_id, "flip", body, drain_timeout_s, who)

    async def forget(self, instance_id: str) -> None:
        """Remove a dead instance from the list."""
        await self.call("DELETE", f"/instances/{instance_id}")

    async def flips(self, limit: int = 100) -> list[dict[str, Any]]:
        """The audit of flips, drains and resumes, newest first."""
        answer: list[dict[str, Any]] = await self.call("GET", "/flips", params={"limit": limit})
        return answer

    async def slo(self) -> list[dict[str, Any]]:
        """Attainment by class and window."""
        answer: list[dict[str, Any]] = await self.call("GET", "/slo")
        return answer

    async def cluster(self) -> dict[str, Any]:
        """A summary for dashboards."""
        answer: dict[str, Any] = await self.call("GET", "/cluster")
        return answer

    async def _operate(
        self, instance_id: str, what: str, body: dict[str, Any], wait_s: float, who: str
    ) -> dict[str, Any]:
        headers = {ACTOR_HEADER: who} if who else {}
        answer: dict[str, Any] = await self.call(
            "POST",
            f"/instances/{instance_id}/{what}",
            body=body,
            headers=headers,
            timeout_s=wait_s + _SLACK_S,
        )
        return answer
