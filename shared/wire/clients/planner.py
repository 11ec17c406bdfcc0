"""The planner's HTTP API."""

from collections.abc import Mapping
from typing import Any

from shared.runtime.actor import acting_as
from shared.wire.clients.http import JsonClient

WHAT_IF_S = 10.0


class PlannerClient(JsonClient):
    """Calls to a planner. They raise errors of `shared.errors`."""

    async def fleet(self) -> dict[str, Any]:
        """The running cluster as the planner sees it: instances, routes, expected and measured figures."""
        return await self.object("GET", "/fleet")

    async def proposals(self, limit: int = 20) -> list[dict[str, Any]]:
        """The proposals, newest first."""
        return await self.rows("/proposals", params={"limit": limit})

    async def proposal(self, proposal_id: str) -> dict[str, Any]:
        """A proposal. Raises NotFound."""
        return await self.object("GET", f"/proposals/{proposal_id}")

    async def propose(self, *, who: str = "") -> dict[str, Any]:
        """Look for a proposal now: {"proposal": one or null, "why": "…"}."""
        return await self.object("POST", "/proposals", headers=acting_as(who), timeout_s=WHAT_IF_S)

    async def accept(self, proposal_id: str, *, who: str = "") -> dict[str, Any]:
        """Start a proposal; `proposals` shows its progress. Raises NotFound, Conflict."""
        return await self.object("POST", f"/proposals/{proposal_id}/accept", headers=acting_as(who))

    async def refuse(self, proposal_id: str, *, who: str = "") -> dict[str, Any]:
        """Refuse a proposal, which is not repeated for a while. Raises NotFound, Conflict."""
        return await self.object("POST", f"/proposals/{proposal_id}/refuse", headers=acting_as(who))

    async def set_auto(self, auto: bool, *, who: str = "") -> dict[str, Any]:
        """Set whether proposals are applied without confirmation. Returns the same as `fleet`."""
        return await self.object("PUT", "/mode", body={"auto": auto}, headers=acting_as(who))

    async def what_if(self, change: Mapping[str, Any]) -> dict[str, Any]:
        """The expected figures of the running cluster with other instances or another demand. Raises InvalidRequest."""
        return await self.object("POST", "/what-if", body=dict(change), timeout_s=WHAT_IF_S)

    async def submit(self, request: Mapping[str, Any], *, who: str = "") -> dict[str, Any]:
        """Start a search for a plan. Raises InvalidRequest, Overloaded."""
        return await self.object("POST", "/plans", body=dict(request), headers=acting_as(who))

    async def plans(self, limit: int = 20) -> list[dict[str, Any]]:
        """Searches, newest first, without their results' files."""
        return await self.rows("/plans", params={"limit": limit})

    async def plan(self, plan_id: str) -> dict[str, Any]:
        """One search: its state, progress, result. Raises NotFound."""
        return await self.object("GET", f"/plans/{plan_id}")

    async def cancel(self, plan_id: str, *, who: str = "") -> dict[str, Any]:
        """End a search; the best so far is its result. Raises NotFound, Conflict when it has ended."""
        return await self.object("POST", f"/plans/{plan_id}/cancel", headers=acting_as(who))
